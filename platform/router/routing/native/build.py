"""Obtains the library of the choice: built ahead (images have no compiler), from the cache, or by a compiler that is
here.

`python -m penstock.router.routing.native.build` builds it and prints its path; with `--ahead` it builds one for every
CPU of this kind of machine, with PyPI's ziglang, into the package.
"""

import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.base.native import BuildFailed, PortableLibrary, Source
from penstock.router.routing.native.library import Library

logger = logging.getLogger(__name__)

CPP = Path(__file__).with_name("cpp")
SOURCE = Source(
    CPP,
    tuple(sorted(CPP.glob("*.cpp"))),
    tuple(sorted(CPP.glob("*.hpp"))),
    # products and sums are rounded one by one, as Python rounds them: the same costs on every machine
    ("-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-fPIC", "-ffp-contract=off", "-fno-math-errno"),
    ("-O3", "-shared", "-Wl,--as-needed"),
    {},
)
AHEAD = Path(__file__).with_name("prebuilt") / "x86_64.so"
"""The library built ahead, for any x86-64."""
LIBRARY = PortableLibrary("choice", SOURCE, AHEAD, Library)


@functools.cache
def load_library() -> Library | None:
    """The library, built if need be (seconds, the first time); None, and one warning, where that is impossible."""
    try:
        return LIBRARY.find()
    except (BuildFailed, OSError) as error:
        logger.warning(
            "Replicas are chosen in Python, which takes twice the time, because the C++ choice could not be built: %s",
            error,
        )
        return None


def main(arguments: Sequence[str]) -> int:
    """Build and print the path; returns status 1, having printed the reason, where that is impossible."""
    try:
        path = LIBRARY.build_ahead(AHEAD) if arguments == ["--ahead"] else LIBRARY.build().path
    except BuildFailed as error:
        sys.stderr.write(f"The choice of a replica could not be built: {error}\n")
        return 1
    if path is not None:
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
