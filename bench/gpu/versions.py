"""Versions of the packages that steps import, held against what they and Penstock ask of each other. Needs `packaging`,
which comes with pytest."""

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from bench.gpu.wheels import normal

PROJECT = "Penstock"


class Conflict(NamedTuple):
    """A package that is there in a version that another one can't use."""

    name: str
    version: str
    needed: str
    """What is asked, as `NAME>=VERSION`."""
    by: str

    @property
    def sentence(self) -> str:
        return f"{self.name} {self.version} is there, and {self.by} needs {self.needed}"


def project_requirements(text: str) -> list[Requirement]:
    """Packages that the platform needs on this machine, from the text of pyproject.toml."""
    return _here(tomllib.loads(text)["project"]["dependencies"])


def ranges(text: str, names: Iterable[str]) -> list[Requirement]:
    """Ranges in which Penstock works with these packages, from the text of pyproject.toml: what the platform needs, and
    the packages of its `dev` group."""
    found = tomllib.loads(text)
    wanted = {normal(name) for name in names}
    every = [*found["project"]["dependencies"], *found["dependency-groups"]["dev"]]
    return [requirement for requirement in _here(every) if normal(requirement.name) in wanted]


def _here(texts: Iterable[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in texts]
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


LookUp = Callable[[str], importlib.metadata.Distribution | None]


def installed(path: Sequence[str]) -> LookUp:
    """Looks a distribution up by its name, in the folders of `path`, the first that has it."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        if distribution.metadata["Name"]:
            found.setdefault(normal(distribution.metadata["Name"]), distribution)
    return lambda name: found.get(normal(name))


def conflicts(names: Iterable[str], own: Iterable[Requirement], path: Sequence[str]) -> list[Conflict]:
    """What does not fit together among the packages `names` and those they need, as far as they are there. own: what
    Penstock asks."""
    look_up = installed(path)
    asked = [(PROJECT, requirement) for requirement in own]
    for name in names:
        distribution = look_up(name)
        if distribution is not None:
            asked += [(name, requirement) for requirement in _here(distribution.requires or ())]
    found = []
    for by, requirement in asked:
        there = look_up(requirement.name)
        if there is not None and not requirement.specifier.contains(there.version, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            found.append(Conflict(normal(requirement.name), there.version, needed, by))
    return found


def has(requirement: str, look_up: LookUp) -> bool:
    """Whether the package of a line such as `ray[serve]>=2.60` is there, in such a version."""
    wanted = Requirement(requirement)
    there = look_up(wanted.name)
    return there is not None and wanted.specifier.contains(there.version, prereleases=True)


def pyproject(root: Path) -> str:
    """Text of the checkout's pyproject.toml."""
    return (root / "pyproject.toml").read_text(encoding="utf-8")
