"""The environment of the steps: where they find code, where they keep what outlives them (compiled kernels, choices of
kernels), and where what does not (temporary files)."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (("penstock", "platform"), ("penstock_loadtest", "loadtest"))


def surrounding(folder: Path, site: Path, cache: Path, *, is_check: bool) -> dict[str, str]:
    """Environment of the steps. folder: a private one, for the links by which `penstock` is found where the checkout
    came without its own, and for temporary files (`scratch`). site: unpacked wheels. cache: `cache_folder`."""
    source = folder / "src"
    source.mkdir(exist_ok=True)
    for name, place in SOURCES:
        if not (source / name).exists():
            (source / name).symlink_to(ROOT / place)
    scratch(folder).mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    path = os.pathsep.join([str(source), str(ROOT), *inherited_path(), str(site)])
    own = {
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(scratch(folder)),
        "XDG_CACHE_HOME": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
    }
    if is_check:
        own |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return inherited | own


def inherited_path() -> list[str]:
    """Folders that PYTHONPATH names here."""
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def scratch(folder: Path) -> Path:
    """The steps' TMPDIR. Its name is short, because Ray's sockets lie below it and their paths may have 107 bytes."""
    return folder / "t"


def cache_folder(record: Path | None, folder: Path, *, is_check: bool) -> Path:
    """Folder for what the next call of the same record needs again, and need not compile: beside the record, in a check
    the user's own; below `folder` where nothing can be kept and run there. So a HOME that is absent or read-only does
    not matter."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # as it is where there is no HOME
    wanted = users if is_check else record and record.with_suffix(".cache")
    is_fit = wanted is not None and wanted.is_absolute() and can_run_from(wanted)
    return wanted if wanted is not None and is_fit else folder / "cache"


def can_run_from(folder: Path) -> bool:
    """Whether files can be written to the folder, and mapped as code: Triton's launchers are. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False
