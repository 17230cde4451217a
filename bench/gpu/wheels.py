"""A folder of wheels in place of an installation: those that fit this Python and whose package is not installed are
unpacked into a temporary folder, which goes onto the path of the steps.

An installed package is taken as it is, so that what the machine brings along (numpy, transformers) stays consistent;
but where one is of a version that others can't use, the folder's wheel goes before it. By the standard library alone:
neither pip nor network is needed. The wheel format is PEP 427, the tags are PEP 425.
"""

import importlib.metadata
import platform
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
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
    if wheel.name.count("-") < 4:
        return False
    pythons, abis, platforms = (part.split(".") for part in wheel.stem.split("-")[-3:])
    own = f"cp{version[0]}{version[1]}"
    if "any" not in platforms and not any(re.fullmatch(rf"(?:many)?linux.*_{machine}", found) for found in platforms):
        return False
    if "none" in abis:
        return bool({f"py{version[0]}", f"py{version[0]}{version[1]}", own} & set(pythons))
    if "abi3" in abis:
        return any((minor := _minor(found)) is not None and minor <= version[1] for found in pythons)
    return own in pythons and own in abis


def _minor(tag: str) -> int | None:
    """Minor version of a tag such as cp310; None where it is no CPython 3."""
    found = re.fullmatch(r"cp3(\d+)", tag)
    return None if found is None else int(found[1])


def fitting(folder: Path) -> list[Path]:
    """Wheels of the folder that this Python can use. Raises ValueError where there is no folder or no such wheel in it,
    and where there are two of one distribution."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} with wheels; `make gpu-wheels WHEELS={folder}` makes it")
    found = sorted(path for path in folder.glob("*.whl") if fits(path))
    if not found:
        python = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(
            f"{folder} has no wheel for Python {python} on {platform.machine()}; `make gpu-wheels WHEELS={folder} "
            f'ARGS="--python {python}"` downloads them'
        )
    names = [distribution_of(path) for path in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{folder} has two wheels of {sorted(twice)[0]} for this Python")
    return found


def unpack_missing(folder: Path, target: Path) -> list[str]:
    """Unpack the wheels of `folder` that fit, and whose distribution this Python has not, below `target`; returns their
    file names. Raises ValueError as `fitting` does and where a file is no wheel, OSError."""
    return _unpack_all(fitting(folder), target, lambda name: not is_installed(name))


def unpack_named(folder: Path, target: Path, names: Iterable[str]) -> list[str]:
    """Unpack the wheels of these distributions, whatever this Python has; returns their file names. Raises as
    `unpack_missing` does."""
    wanted = {normal(name) for name in names}
    return _unpack_all(fitting(folder), target, lambda name: name in wanted)


def _unpack_all(wheels: Iterable[Path], target: Path, is_wanted: Callable[[str], bool]) -> list[str]:
    unpacked = [wheel for wheel in wheels if is_wanted(distribution_of(wheel))]
    for wheel in unpacked:
        try:
            _unpack(wheel, target)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{wheel} is no whole wheel: {error}") from error
    return [wheel.name for wheel in unpacked]


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


def lacking(names: Iterable[str], path: Iterable[Path] = ()) -> list[str]:
    """Names of distributions that neither this Python has nor a folder of `path`."""
    folders = list(path)
    return [name for name in names if not is_installed(name, folders)]


def versions(names: Iterable[str], path: Iterable[Path] = ()) -> dict[str, str]:
    """Versions of the distributions that are there, by name."""
    found: dict[str, str] = {}
    for name in names:
        places = [*sys.path, *(str(folder) for folder in path)]
        for distribution in importlib.metadata.distributions(name=name, path=places):
            found.setdefault(name, distribution.version)
    return found
