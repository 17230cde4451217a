"""Test files of tests/gpu, run by pytest in this process: one row of counts a file, and one for each test that fails or
is skipped."""

import pytest

from bench.gpu.rows import Rows

LENGTH = 300
"""Characters of a reason that are kept."""
FEW = 3
"""Tests of a file that a check runs: the interpreter takes minutes for all of them, and `make test-slow` does that."""


class Counts:
    """A pytest plugin that counts outcomes and adds a row for each test that does not pass."""

    def __init__(self, rows: Rows, most: int | None) -> None:
        """most: tests that are run; None: all."""
        self._rows = rows
        self._most = most
        self.passed = self.failed = self.skipped = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._most is not None:
            del items[self._most :]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self._rows.add(report.nodeid, note=f"failed in {report.when}: {_reason(report)}")
        elif report.skipped:
            self.skipped += 1
            self._rows.add(report.nodeid, note=f"skipped: {_reason(report)}")
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed += 1
            self._rows.add(report.nodeid, note=f"not collected: {_reason(report)}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    found = report.longrepr
    if isinstance(found, tuple):
        return str(found[2])[:LENGTH]
    crash = getattr(found, "reprcrash", None)
    return str(crash.message if crash is not None else found).strip().splitlines()[0][:LENGTH]


def run(rows: Rows, *arguments: str, is_check: bool) -> bool:
    """arguments: test files, relative to the root, and pytest's own. Returns whether all pass and there are any."""
    counts = Counts(rows, FEW if is_check else None)
    status = pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "--maxfail=20"], plugins=[counts])
    note = f"{counts.failed} failed, {counts.skipped} skipped"
    rows.add(f"{' '.join(arguments)}: tests that pass", counts.passed, None, "tests", note)
    return status == pytest.ExitCode.OK and counts.passed > 0
