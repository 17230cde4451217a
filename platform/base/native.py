"""Builds a C++ library with a compiler of this machine, once, and loads it.

Not what a library does, nor what becomes of its users without it: those are each library's own affair. A build lies in
a cache folder under the hash of everything it depends on: source, flags, compiler, CPU. It is sealed with a checksum of
its content (behind the ELF image, which the loader does not read) and arrives by rename, so processes that start at
once, or a crash in the middle, can't leave half a library.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from penstock.base.cores import available_cores

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class Source:
    """What a library is made of."""

    folder: Path
    """Folder of the files; they include each other by their paths in it."""
    files: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    more_flags: Mapping[str, tuple[str, ...]]
    """Further flags, by the name of a file's own folder."""

    def flags_of(self, file: Path) -> tuple[str, ...]:
        return self.flags + self.more_flags.get(file.parent.name, ())


def cache_folder(name: str) -> Path:
    """The user's cache folder for a kind of library."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / name


def obtain(source: Source, compilers: Sequence[Compiler], cache: Path, load: Callable[[Path], T]) -> T:
    """The library of the first compiler that gives one that loads, out of the cache or freshly built. load: raises
    OSError for a file that is no such library. Raises BuildFailed."""
    if not compilers:
        raise BuildFailed(
            "there is no C++ compiler (c++, g++, clang++) on PATH, and the package ziglang is not installed."
        )
    failures = []
    for compiler in compilers:
        try:
            return _obtain_from(source, compiler, cache, load)
        except (BuildFailed, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{compiler.name}: {error}")
    raise BuildFailed("; ".join(failures))


def _obtain_from(source: Source, compiler: Compiler, cache: Path, load: Callable[[Path], T]) -> T:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        is_kept = os.access(cache, os.W_OK)
    except OSError:
        is_kept = False
    if is_kept:
        return _find_cached(source, compiler, cache / f"{_key(source, compiler)}.so", load)
    # nowhere to keep it: a loaded library lives on without its file
    with tempfile.TemporaryDirectory(prefix="penstock-native-") as folder:
        path = Path(folder) / "library.so"
        compile_to(path, source, compiler)
        return load(path)


def _find_cached(source: Source, compiler: Compiler, path: Path, load: Callable[[Path], T]) -> T:
    with _hold_lock(path.with_suffix(".lock")):
        if _is_sealed(path):
            try:
                return load(path)
            except OSError:
                logger.info("The cached library %s does not load; it is built again.", path)
        compile_to(path, source, compiler)
        return load(path)


def compile_to(path: Path, source: Source, compiler: Compiler, cpu: str = NATIVE) -> None:
    """Compile on all cores, link, seal and move to `path`. cpu: as the compiler's -march wants it. Raises BuildFailed
    with the compiler's first complaint."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        made, march = Path(folder) / path.name, f"-march={cpu}"
        # zig keeps its own caches: in here, unless the environment names others, they vanish with the folder
        environment = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder} | os.environ
        objects = [Path(folder) / f"{file.stem}.o" for file in source.files]
        with ThreadPoolExecutor(available_cores()) as pool:
            commands = [
                [*compiler.command, *source.flags_of(file), f"-I{source.folder}", march, "-c", "-o", str(to), str(file)]
                for file, to in zip(source.files, objects, strict=True)
            ]
            for _ in pool.map(partial(_run, environment=environment), commands):
                pass
        # whatever language the command names, objects are in none
        link = [*compiler.command, *source.link_flags, march, "-o", str(made), "-x", "none", *map(str, objects)]
        _run(link, environment)
        if not made.exists():
            raise BuildFailed("it left no library.")
        content = made.read_bytes()
        with made.open("ab") as file:
            file.write(_seal(content))
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)


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


def _key(source: Source, compiler: Compiler) -> str:
    version = subprocess.run(
        [*compiler.command, "--version"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    more = [flag for folder in sorted(source.more_flags) for flag in (folder, *source.more_flags[folder])]
    parts = [
        *(path.read_text() for path in (*source.files, *source.headers)),
        " ".join((*source.flags, *more, *source.link_flags, NATIVE)),
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


@dataclass(frozen=True, slots=True)
class PortableLibrary(Generic[T]):
    """A library that runs without torch and may be built ahead: for gateways, whose images have no compiler."""

    name: str
    """Name of its cache folder."""
    source: Source
    ahead: Path
    """The library built ahead, for any x86-64."""
    load: Callable[[Path], T]
    """Raises OSError for a file that is no such library."""

    def find(self) -> T:
        """The library built ahead where there is one for this machine, else as `build` has it. Raises BuildFailed, or
        OSError where the one that was built ahead does not load."""
        if platform.machine() == "x86_64" and self.ahead.exists():
            return self.load(self.ahead)
        return self.build()

    def build(self) -> T:
        """The library from the cache, or built by a compiler that is here (seconds, the first time). Raises
        BuildFailed."""
        return obtain(self.source, find_compilers(), cache_folder(self.name), self.load)

    def build_ahead(self, path: Path) -> Path | None:
        """Build the library for any x86-64, with ziglang. Returns None where the machine is another one. Raises
        BuildFailed."""
        if platform.machine() != "x86_64":
            return None
        path.parent.mkdir(exist_ok=True)
        compile_to(path, self.source, ZIGLANG, "x86_64")
        return path
