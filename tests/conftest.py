"""Fixtures that more than one package's tests need, and the check that nothing is skipped without being named."""

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import uvloop

from tests.budget import Budget
from tests.skips import Skip, parse, unlisted

# how fast examples are made, and tests run, is the machine's affair; examples are the same each time, so that a commit
# which was green stays so: `--hypothesis-profile=explore` draws others
hypothesis.settings.register_profile("explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("penstock", hypothesis.settings.get_profile("explore"), derandomize=True)
hypothesis.settings.load_profile("penstock")


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private folder with a path short enough for unix sockets (pytest's own are too long)."""
    path = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real traces and prompts, from the folder that PENSTOCK_TEST_DATA names."""
    path = os.environ.get("PENSTOCK_TEST_DATA")
    if not path:
        pytest.skip("PENSTOCK_TEST_DATA names no folder of real data")
    return Path(path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on an event loop of its own, which ends with it: asyncio's, or uvloop's where marked."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    loop_factory = uvloop.new_event_loop if pyfuncitem.get_closest_marker("uvloop") else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="fail when a test is skipped that FILE does not name with its reason",
    )
    parser.addoption(
        "--until", type=float, metavar="UNIX_S", help="begin no further file of tests then; tests.run has a --budget"
    )
    parser.addoption("--turn", type=int, default=0, metavar="NUMBER", help="which file is the first, with --until")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with long tests (those with a time limit of their own) first on several cores, so that no core ends up
    alone with one."""
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("timeout")}
        items.sort(key=lambda item: item.path not in long)


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--allowed-skips")
    if path is not None:
        config.pluginmanager.register(SkipCheck(parse(path.read_text(encoding="utf-8")), str(path)), "penstock-skips")
    until_s: float | None = config.getoption("--until")
    if until_s is not None:
        config.pluginmanager.register(Budget(until_s, config.getoption("--turn")), "penstock-budget")


class SkipCheck:
    """Collects what is skipped; lists it before pytest's closing line; fails the run on what is not allowed."""

    def __init__(self, allowed: list[Skip], source: str) -> None:
        self._allowed = allowed
        self._source = source
        self._skipped: list[Skip] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if unlisted(self._skipped, self._allowed) and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("skipped tests")
        bad = set(unlisted(self._skipped, self._allowed))
        for skip in self._skipped:
            terminalreporter.write_line(
                f"{'NOT ALLOWED' if skip in bad else 'allowed'}  {skip.node_id}  ({skip.reason})"
            )
        terminalreporter.write_line(f"{len(self._skipped)} skipped, {len(bad)} of them not named in {self._source}")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skipped.append(Skip(report.nodeid, reason.removeprefix("Skipped: ")))
