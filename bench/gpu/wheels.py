"""A folder of wheels in place of an installation: those that fit this Python and whose package is not installed are
unpacked into a temporary folder, which goes onto the path of the steps.

An installed package is taken as it is, so that what the machine brings along (numpy, transformers) stays consistent. By
the standard library alone: neither pip nor network is needed. The wheel format is PEP 427, the tags are PEP 425.
"""

import importlib.metadata
import platform
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).with_name("wheels.txt")
MAX_BYTES = 30 * 2**20
"""Most that the wheels for one Python may have together."""


def listed(text: str) -> list[str]:
    """Names in a list of packages, one a line; what stands behind # is a comment."""
    return [name for line in text.splitlines() if (name := line.partition("#")[0].strip())]


def pins(names: Iterable[str], constraints: str) -> list[str]:
    """The names with their versions, as `NAME==VERSION`, out of the text of constraints.txt. Raises ValueError for one
    that is not there."""
    found = {normal(line.partition("==")[0]): line for line in listed(constraints)}
    absent = [name for name in names if normal(name) not in found]
    if absent:
        raise ValueError(f"constraints.txt pins no {absent[0]}")
    return [found[normal(name)] for name in names]


def normal(name: str) -> str:
    """A distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(wheel: Path) -> str:
    """Normal name of the distribution in a wheel, by the file's name."""
    return normal(wheel.name.partition("-")[0])


def fits(wheel: Path, version: tuple[int, int] = sys.version_info[:2], machine: str = platform.machine()) -> bool:
    """Whether CPython of this version on glibc's Linux can use the wheel, by the file's name. How new a glibc it needs
    is not looked at."""
    pythons, abis, platforms = (part.split(".") for part in wheel.stem.split("-")[-3:])
    own = f"cp{version[0]}{version[1]}"
    if "any" not in platforms and not any(re.fullmatch(rf"(?:many)?linux.*_{machine}", found) for found in platforms):
        return False
    if "none" in abis:
        return bool({f"py{version[0]}", f"py{version[0]}{version[1]}", own} & set(pythons))
    if "abi3" in abis:
        return any(_minor(found) is not None and _minor(found) <= version[1] for found in pythons)
    return own in pythons and own in abis


def _minor(tag: str) -> int | None:
    """Minor version of a tag such as cp310; None where it is no CPython 3."""
    found = re.fullmatch(r"cp3(\d+)", tag)
    return None if found is None else int(found[1])


def unpack_missing(folder: Path, target: Path) -> list[str]:
    """Unpack the wheels of `folder` that fit, and whose distribution this Python has not, below `target`; returns their
    file names. Raises ValueError where there are two of one distribution, OSError, zipfile.BadZipFile."""
    wheels = sorted(path for path in folder.glob("*.whl") if fits(path) and not is_installed(distribution_of(path)))
    names = [distribution_of(path) for path in wheels]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{folder} has two wheels of {sorted(twice)[0]} for this Python")
    for wheel in wheels:
        _unpack(wheel, target)
    return [wheel.name for wheel in wheels]


def _unpack(wheel: Path, target: Path) -> None:
    """What would lie in site-packages; scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            first, _, rest = entry.filename.partition("/")
            if not first.endswith(".data"):
                archive.extract(entry, target)
            elif rest.startswith(("purelib/", "platlib/")) and not entry.is_dir():
                place = target / rest.partition("/")[2]
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(entry))


def is_installed(name: str, path: Iterable[Path] = ()) -> bool:
    """Whether this Python, or a folder of `path`, has the distribution."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return any(True for _ in importlib.metadata.distributions(name=name, path=[str(folder) for folder in path]))
    return True


def versions(names: Iterable[str], path: Iterable[Path] = ()) -> dict[str, str]:
    """Versions of the distributions that are there, by name."""
    found: dict[str, str] = {}
    for name in names:
        places = [*sys.path, *(str(folder) for folder in path)]
        for distribution in importlib.metadata.distributions(name=name, path=places):
            found.setdefault(name, distribution.version)
    return found
