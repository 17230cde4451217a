"""Builds the kernels with a compiler of this machine, once, and loads them.

A build lies in the user's cache folder under the hash of everything it depends on: source, flags, compiler, CPU. It is
sealed with a checksum of its content (behind the ELF image, which the loader does not read) and arrives by rename, so
replicas that start at once, or a crash in the middle, can't leave half a library. Whatever goes wrong, the engine still
works, on torch operators, and logs one sentence with the reason.

`python -m penstock.workers.compute.kernels.build` builds the library and prints its path; with `--levels` it builds
ahead (see `prebuilt`), with PyPI's ziglang.
"""

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.base.cores import available_cores
from penstock.workers.compute.kernels import prebuilt
from penstock.workers.compute.kernels.library import Library

logger = logging.getLogger(__name__)

CPP = Path(__file__).with_name("cpp")
"""Folder of the C++ files, by noun; they include each other by their paths in it."""
SOURCES = tuple(sorted(CPP.glob("*/*.cpp")))
HEADERS = tuple(sorted(CPP.glob("*/*.hpp")))
FLAGS = ("-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fPIC", "-pthread")
UNFUSED = ("-ffp-contract=off",)
"""More flags for the files of cpp/sampling, whose roundings are a definition: a fused multiply-add has one less."""
LINK_FLAGS = ("-O3", "-shared", "-pthread", "-Wl,--as-needed")
NATIVE = "native"
BUILD_TIMEOUT_S = 300.0
_SEAL_BYTES = 16


class BuildFailed(Exception):
    """A compiler could not make a library that loads."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(Path(part).name if index == 0 else part for index, part in enumerate(self.command))


ZIGLANG = Compiler((sys.executable, "-m", "ziglang", "cc", "-x", "c++"))
"""Compiler of PyPI's ziglang; it is called as a C compiler with the language given, since it then needs no libc++."""


def find_compilers() -> list[Compiler]:
    """C++ compilers of this machine, best first: the system's, then PyPI's ziglang."""
    paths = [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name)) is not None]
    different = {os.path.realpath(path): path for path in reversed(paths)}
    found = [Compiler((path,)) for path in paths if path in different.values()]
    if importlib.util.find_spec("ziglang") is not None:
        found.append(ZIGLANG)
    return found


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "kernels"


@functools.cache
def load_kernels() -> Library | None:
    """The kernels, built if need be (seconds, the first time); None, and one warning, where that is impossible."""
    ahead = prebuilt.find(prebuilt.cpu_flags())
    if ahead is not None:
        return Library(ahead)
    try:
        return obtain(find_compilers(), cache_folder())
    except BuildFailed as error:
        logger.warning(
            "Steps run on torch operators, which is slow, because the C++ kernels could not be built: %s", error
        )
        return None


def obtain(compilers: Sequence[Compiler], cache: Path) -> Library:
    """The library of the first compiler that gives one that loads, out of the cache or freshly built. Raises
    BuildFailed."""
    if not compilers:
        raise BuildFailed(
            "there is no C++ compiler (c++, g++, clang++) on PATH, and the package ziglang is not installed."
        )
    failures = []
    for compiler in compilers:
        try:
            return _obtain_from(compiler, cache)
        except (BuildFailed, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{compiler.name}: {error}")
    raise BuildFailed("; ".join(failures))


def _obtain_from(compiler: Compiler, cache: Path) -> Library:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        is_kept = os.access(cache, os.W_OK)
    except OSError:
        is_kept = False
    if is_kept:
        return _find_cached(compiler, cache / f"{_key(compiler)}.so")
    # nowhere to keep it: a loaded library lives on without its file
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as folder:
        path = Path(folder) / "kernels.so"
        compile_to(path, compiler)
        return Library(path)


def _find_cached(compiler: Compiler, path: Path) -> Library:
    with _hold_lock(path.with_suffix(".lock")):
        if _is_sealed(path):
            try:
                return Library(path)
            except OSError:
                logger.info("The cached kernel library %s does not load; it is built again.", path)
        compile_to(path, compiler)
        return Library(path)


def compile_to(path: Path, compiler: Compiler, cpu: str = NATIVE) -> None:
    """Compile on all cores, link, seal and move to `path`. cpu: as the compiler's -march wants it. Raises BuildFailed
    with the compiler's first complaint."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        made, march = Path(folder) / path.name, f"-march={cpu}"
        # zig keeps its own caches: in here, unless the environment names others, they vanish with the folder
        environment = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder} | os.environ
        objects = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
        with ThreadPoolExecutor(available_cores()) as pool:
            commands = [
                [*compiler.command, *_flags_of(source), f"-I{CPP}", march, "-c", "-o", str(to), str(source)]
                for source, to in zip(SOURCES, objects, strict=True)
            ]
            for _ in pool.map(partial(_run, environment=environment), commands):
                pass
        # whatever language the command names, objects are in none
        _run([*compiler.command, *LINK_FLAGS, march, "-o", str(made), "-x", "none", *map(str, objects)], environment)
        if not made.exists():
            raise BuildFailed("it left no library.")
        content = made.read_bytes()
        with made.open("ab") as file:
            file.write(_seal(content))
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)


def _flags_of(source: Path) -> tuple[str, ...]:
    return FLAGS + UNFUSED if source.parent.name == "sampling" else FLAGS


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
    )
    if result.returncode != 0:
        raise BuildFailed(_first_complaint(result.stderr) or f"it ended with status {result.returncode}.")


def _first_complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES).digest()


def _is_sealed(path: Path) -> bool:
    """Whether the file is there and whole: a truncated library would not fail to load but kill the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return _seal(content[:-_SEAL_BYTES]) == content[-_SEAL_BYTES:]


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Builds of one key wait for each other; the lock dies with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(compiler: Compiler) -> str:
    version = subprocess.run(
        [*compiler.command, "--version"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    parts = [
        *(path.read_text() for path in (*SOURCES, *HEADERS)),
        " ".join((*FLAGS, *UNFUSED, *LINK_FLAGS, NATIVE)),
        " ".join(compiler.command),
        version.stdout,
        _cpu(),
    ]
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part.encode())
    return state.hexdigest()


def _cpu() -> str:
    """What -march=native depends on: architecture, model and feature flags of the first CPU."""
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
    )
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        first = ""
    return "\n".join(
        [
            platform.machine(),
            *(line for line in first.splitlines() if line.split("\t")[0].split(":")[0].strip() in wanted),
        ]
    )


def build_levels(folder: Path) -> list[Path]:
    """The libraries for all levels; none where the machine is not x86-64. Raises BuildFailed."""
    if platform.machine() != "x86_64":
        return []
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{level}.so" for level in prebuilt.LEVELS]
    for path in paths:
        compile_to(path, ZIGLANG, path.stem)
    return paths


def main(arguments: Sequence[str]) -> int:
    """Build and print the path; returns status 1, having printed the reason, where that is impossible."""
    try:
        if arguments == ["--levels"]:
            sys.stdout.writelines(f"{path}\n" for path in build_levels(prebuilt.FOLDER))
            return 0
        sys.stdout.write(f"{obtain(find_compilers(), cache_folder()).path}\n")
    except BuildFailed as error:
        sys.stderr.write(f"The kernels could not be built: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
