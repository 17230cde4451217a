"""Long tests within a time: files of tests begin until it is over, each run with another one first, so that every file
gets its turn.

Not a choice of tests within a file: one that has begun is finished, and its fixtures are used for all of it.
"""

import time
from pathlib import Path

import pytest


def rotate(files: list[Path], turn: int) -> list[Path]:
    """The files in their order, beginning with another one each turn."""
    first = turn % len(files) if files else 0
    return files[first:] + files[:first]


class Budget:
    """A plugin of pytest. until_s: Unix time from which no further file begins. turn: see `rotate`."""

    def __init__(self, until_s: float, turn: int) -> None:
        self._until_s = until_s
        self._turn = turn
        self._begun: set[Path] = set()
        self._left: dict[Path, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = rotate(list(dict.fromkeys(item.path for item in items)), self._turn)
        items.sort(key=lambda item: order.index(item.path))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if item.path not in self._begun and time.time() >= self._until_s:
            self._left[item.path] = self._left.get(item.path, 0) + 1
            return True
        self._begun.add(item.path)
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section("left for another run: the time was over")
        for path, count in self._left.items():
            terminalreporter.write_line(f"{path.name}: {count} tests")
