"""Builds the kernels with a compiler of this machine, once, and loads them.

How a build is kept and found again is `base.native`'s. Whatever goes wrong, the engine still works, on torch operators,
and logs one sentence with the reason.

`python -m penstock.workers.compute.kernels.build` builds the library and prints its path; with `--levels` it builds
ahead (see `prebuilt`), with PyPI's ziglang.
"""

import functools
import logging
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.base import native
from penstock.base.native import ZIGLANG, BuildFailed, Compiler, Source, compile_to, find_compilers
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


def cache_folder() -> Path:
    return native.cache_folder("kernels")


def source() -> Source:
    """What the kernels are made of."""
    return Source(CPP, SOURCES, HEADERS, FLAGS, LINK_FLAGS, {"sampling": UNFUSED})


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
    return native.obtain(source(), compilers, cache, Library)


def build_levels(folder: Path) -> list[Path]:
    """The libraries for all levels; none where the machine is not x86-64. Raises BuildFailed."""
    if platform.machine() != "x86_64":
        return []
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{level}.so" for level in prebuilt.LEVELS]
    for path in paths:
        compile_to(path, source(), ZIGLANG, path.stem)
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
