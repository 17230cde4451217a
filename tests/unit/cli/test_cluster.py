import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import processes
from penstock.cli.cluster import Cluster, StartFailed, ray_environment
from penstock.cli.processes import end_descendants


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that were there before a test, such as a Redis of the whole session, are none of ours."""
    before, all_of_them = set(processes.descendants()), processes.descendants
    monkeypatch.setattr(processes, "descendants", lambda: [each for each in all_of_them() if each not in before])


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator["Clusters"]:
    found = Clusters(tmp_path)
    yield found
    end_descendants(0.1)
    for cluster in found.started:
        cluster.wait_until_ended()


class Clusters:
    """Drivers that are small scripts; `tell(text)` in them sends a line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.started: list[Cluster] = []

    def start(self, script: str, environment: dict[str, str] | None = None) -> Cluster:
        head = "import os, sys, time, signal\ntell = lambda line: os.write(int(sys.argv[-1]), line.encode())\n"
        with self.log.open("a", encoding="utf-8") as log:
            self.started.append(
                Cluster([sys.executable, "-c", head + textwrap.dedent(script)], self.folder, environment or {}, log)
            )
        return self.started[-1]


def test_events_are_awaited_in_order(clusters: Clusters) -> None:
    cluster = clusters.start(
        """tell('{"name":"ray"}\\n{"name":"dep'); time.sleep(0.1); tell('loyed"}\\n'); time.sleep(60)"""
    )

    cluster.wait_for("ray", 10)
    cluster.wait_for("deployed", 10)

    cluster.stop(threading.Event())


def test_a_failure_carries_the_drivers_sentence_and_detail(clusters: Clusters) -> None:
    cluster = clusters.start("""tell('{"name":"failed","message":"No room.","detail":"trace"}\\n')""")

    with pytest.raises(StartFailed, match=r"No room\.") as caught:
        cluster.wait_for("deployed", 10)

    assert caught.value.detail == "trace"


def test_a_driver_that_ends_is_reported_with_the_end_of_the_newest_log(clusters: Clusters) -> None:
    logs = clusters.folder / "ray" / "session_latest" / "logs" / "serve"
    logs.mkdir(parents=True)
    (logs / "replica.log").write_text("".join(f"line {i}\n" for i in range(40)), encoding="utf-8")
    cluster = clusters.start("raise SystemExit(3)")

    with pytest.raises(StartFailed, match="ended") as caught:
        cluster.wait_for("ray", 10)

    assert cluster.wait_until_ended() == 3
    assert caught.value.detail.splitlines() == [f"line {i}" for i in range(25, 40)]


def test_waiting_is_bounded(clusters: Clusters) -> None:
    cluster = clusters.start("time.sleep(60)")
    start = time.monotonic()

    with pytest.raises(StartFailed, match="did not come as far as 'ray' within 0 s"):
        cluster.wait_for("ray", 0.2)

    assert time.monotonic() - start < 5


def test_a_driver_deaf_to_sigterm_is_not_waited_for_when_in_a_hurry(clusters: Clusters) -> None:
    cluster = clusters.start(
        """signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('{"name":"ray"}\\n'); time.sleep(60)"""
    )
    cluster.wait_for("ray", 10)
    hurry = threading.Event()
    hurry.set()
    start = time.monotonic()

    cluster.stop(hurry)

    assert time.monotonic() - start < 5
    assert len(processes.descendants()) == 1
    assert end_descendants(0.1) == 1


def test_the_driver_sees_its_environment_and_no_foreign_cluster(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    seen = clusters.folder / "seen"
    cluster = clusters.start(
        f"open({str(seen)!r}, 'w').write(repr((os.environ.get('RAY_ADDRESS'), os.environ['A'])))", {"A": "1"}
    )

    assert cluster.wait_until_ended() == 0
    assert seen.read_text(encoding="utf-8") == "(None, '1')"


def test_every_run_has_a_token_of_its_own_and_reports_nothing() -> None:
    first, second = ray_environment(), ray_environment()

    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not set(first) & set(os.environ), "nothing is set for this process"
