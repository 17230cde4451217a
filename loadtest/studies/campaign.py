"""A folder of several runs, as ladder, compare and overhead leave it: a JSON file that is written after every run, and
gone on with when it is there.

Not here: a run's own folder (`measure.py`), and what to run next (`knee.py`, `sides.py`, `cost.py`).
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from penstock_loadtest.client.target import Target, find_target
from penstock_loadtest.errors import RecordsInvalid, ScenarioInvalid, TargetUnreachable
from penstock_loadtest.scenario import Scenario, to_tree
from penstock_loadtest.studies.measure import Measurement, measure

T = TypeVar("T")
Run = Callable[[Scenario, Target, Path, Console | None], Measurement]
TRIES = 3
ANSWERS_S = 5.0


def measure_without_plots(scenario: Scenario, target: Target, folder: Path, console: Console | None) -> Measurement:
    return measure(scenario, target, folder, console=console, plots=False)


def is_reachable(target: Target) -> bool:
    """Whether the server lists its models, in TRIES attempts, since one that was just overloaded may need a while."""
    for _ in range(TRIES):
        with suppress(TargetUnreachable):
            asyncio.run(find_target(target.url, keys=target.keys, model=target.model, timeout_s=ANSWERS_S))
            return True
    return False


def print_sentences(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def encode_settings(scenario: Scenario, **others: object) -> dict[str, object]:
    """The settings that define a command's runs, as JSON gives them back: to be compared with those in a file."""
    tree: dict[str, object] = json.loads(
        json.dumps(
            {"scenario": to_tree(scenario), **{name: msgspec.to_builtins(value) for name, value in others.items()}}
        )
    )
    return tree


def read_if_there(path: Path, kind: type[T]) -> T | None:
    """Read the file that an earlier run of the command left. Returns None if there is none. Raises RecordsInvalid."""
    if not path.exists():
        return None
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind, strict=False)
    except (OSError, ValueError) as error:
        raise RecordsInvalid(f"{path} can't be read: {error}.") from None


def must_be_same(path: Path, found: dict[str, object], wanted: dict[str, object]) -> None:
    """Only runs with the same settings may be joined. Raises ScenarioInvalid with the first setting that differs."""
    for name in dict.fromkeys([*found, *wanted]):
        if found.get(name) != wanted.get(name):
            where = _first_difference(name, found.get(name), wanted.get(name))
            raise ScenarioInvalid(
                f"{path} was begun with other settings ({where}); go on with the same ones, or name another folder."
            )


def _first_difference(name: str, found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*found, *wanted]):
            if found.get(key) != wanted.get(key):
                return _first_difference(f"{name}.{key}", found.get(key), wanted.get(key))
    return f"{name} was {found}, now {wanted}"


def new_folder(parent: Path, name: str) -> Path:
    """A folder that is not there yet: an interrupted run with the same name is kept beside it."""
    folder, attempt = parent / name, 1
    while folder.exists():
        attempt += 1
        folder = parent / f"{name}-{attempt}"
    return folder
