"""The live faults' own parts: what the autoscaler's process is told, and what its turns are judged by."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.autoscale_faults import CASES, END_S, FAULTS, IN_PROCESS, OUTSIDE, Run, arrivals
from bench.support.scaling_bounds import Turn, below_safe, count_changes, most_allowed, wrongs
from bench.support.scaling_faults import FaultFile, FaultyChanges, FaultyRedis, ReportsOnTheWay
from penstock.autoscale.observation import ServeState
from penstock.autoscale.policy import Reason
from penstock.wire.scaling import report_key


class StoredBytes:
    """A client of Redis that has one value everywhere, and a command of its own."""

    def __init__(self) -> None:
        self.value = b""

    async def get(self, _key: str) -> bytes:
        return self.value

    async def smembers(self, _key: str) -> set[bytes]:
        return {b"gateway"}


class NotedChanges:
    def __init__(self) -> None:
        self.targets: list[int] = []

    async def read(self) -> Mapping[str, ServeState]:
        return {}

    async def set_target(self, _pool: str, target: int) -> None:
        self.targets.append(target)

    async def step_down(self, _pool: str, _victims: tuple[str, ...], target: int) -> bool:
        self.targets.append(target)
        return True


def told(faults: Mapping[float, Mapping[str, float]], seconds: int) -> list[bytes | None]:
    """What is told at each second of reports that say the second. faults: those that are on from a second on."""
    on_the_way, on = ReportsOnTheWay(), dict[str, float]()
    found = []
    for now in range(seconds):
        on = dict(faults.get(now, on))
        found.append(on_the_way.tell("key", b"%d" % now, on, float(now)))
    return found


def test_reports_are_told_as_they_are_while_nothing_is_wrong() -> None:
    assert told({}, 3) == [b"0", b"1", b"2"]


def test_a_report_that_no_other_follows_stays_until_it_lapses() -> None:
    found = told({2: {"reports_missing": 5.0}, 14: {}}, 15)

    assert found[:2] == [b"0", b"1"]
    assert found[2:11] == [b"1"] * 9, "of the last second in which one was written"
    assert found[11:] == [None, None, None, b"14"]


def test_frozen_reports_stay_what_was_told_last() -> None:
    assert told({2: {"reports_frozen": 5.0}, 4: {}}, 6) == [b"0", b"1", b"1", b"1", b"4", b"5"]


def test_late_reports_come_in_order_and_are_overtaken_when_they_are_late_no_more() -> None:
    assert told({2: {"reports_late": 2.0}, 6: {}}, 7) == [b"0", b"1", b"1", b"1", b"2", b"3", b"6"]


def test_reports_are_as_late_for_a_process_that_has_just_begun() -> None:
    assert told({0: {"reports_late": 2.0}}, 5) == [None, None, b"0", b"1", b"2"]


async def test_only_reports_are_meddled_with(tmp_path: Path) -> None:
    stored, file = StoredBytes(), FaultFile(tmp_path / "faults.json")
    client = FaultyRedis(stored, file)
    assert file.read() == {}
    stored.value = b"before"
    assert await client.get(report_key("gateway")) == b"before"
    file.write({"reports_frozen": 5.0})
    stored.value = b"after"

    assert await client.get(report_key("gateway")) == b"before"
    assert await client.get("penstock:scaling:record:pool") == b"after"
    assert await client.smembers("names") == {b"gateway"}


async def test_changes_are_refused_before_they_are_made_and_lost_behind_it(tmp_path: Path) -> None:
    noted, file = NotedChanges(), FaultFile(tmp_path / "faults.json")
    changes = FaultyChanges(noted, file)

    file.write({"changes_fail": 5.0})
    with pytest.raises(ValueError, match="refuses"):
        await changes.set_target("pool", 2)
    with pytest.raises(ValueError, match="refuses"):
        await changes.step_down("pool", ("one",), 1)
    assert noted.targets == []
    file.write({"changes_hang": 0.0})
    with pytest.raises(TimeoutError):
        await changes.set_target("pool", 3)
    file.write({})
    assert await changes.step_down("pool", ("one",), 2)
    assert noted.targets == [3, 2]


def test_every_fault_is_done_in_the_process_or_from_outside_and_over_before_the_load() -> None:
    for fault in FAULTS.values():
        assert (fault.kind in IN_PROCESS) != (fault.kind in OUTSIDE)
        assert fault.end_s < END_S
    assert {name for names in CASES.values() for name in names} == set(FAULTS)


def turn(before: int, target: int, reason: Reason = Reason.DEMAND, outcome: str = "applied") -> Turn:
    return Turn(0.0, before, target, reason, outcome)


@pytest.mark.parametrize(
    ("name", "turns", "running", "pids"),
    [
        ("reports missing", [Turn(14.0, 3, 3, Reason.STALE, "kept")], [3], ([1], [1])),
        ("changes fail", [Turn(10.0, 1, 3, Reason.DEMAND, "failed")], [1], ([1], [1])),
        ("controller away", [Turn(9.0, 1, 3, Reason.DEMAND, "applied")], [1], ([1], [1])),
        ("killed in mid-scale", [turn(1, 3)], [1], ([1], [2])),
        (
            "no GPUs",
            [Turn(10.0, 1, 4, Reason.DEMAND, "applied"), Turn(20.0, 4, 4, Reason.STEADY, "kept")],
            [1, 2],
            ([1], [1]),
        ),
    ],
)
def test_a_fault_that_was_not_felt_is_wrong(
    name: str, turns: list[Turn], running: list[int], pids: tuple[list[int], list[int]]
) -> None:
    fault = FAULTS[name]
    felt = Run(turns, running, [200], pids)
    calm = Run([Turn(11.0 + at_s, 1, 2, Reason.DEMAND, "applied") for at_s in range(3)], [2] * 3, [200], ([1], [1]))

    assert felt.wrongs(4, [fault]) == []
    assert calm.wrongs(4, [fault]) == [f"{fault.kind} was not felt"]


def test_the_load_rises_sixfold_and_is_the_same_each_time() -> None:
    times_s = arrivals(1)

    assert times_s == arrivals(1) != arrivals(2)
    assert 110 < sum(8 <= at_s < 33 for at_s in times_s) < 190
    assert 12 < sum(not 8 <= at_s < 33 for at_s in times_s) < 45


def test_a_target_may_be_a_fifth_above_the_undisturbed_one_rounded_up() -> None:
    assert [most_allowed(count) for count in (1, 4, 5, 6, 10)] == [2, 5, 6, 8, 12]
    assert wrongs([turn(4, 5), turn(5, 5, Reason.STEADY, "kept")], 4) == []
    assert wrongs([turn(4, 6)], 4) == ["the target rose to 6, without a fault to 4"]


def test_turning_from_up_to_down_and_back_is_counted() -> None:
    assert count_changes([1, 2, 3, 3, 2, 2, 3]) == 2
    assert wrongs([turn(each, 3) for each in (1, 3, 1, 3, 1, 3)], 3) == []
    assert wrongs([turn(each, 3) for each in (1, 3, 1, 3, 1, 3, 1)], 3) == ["5 changes of direction"]


def test_without_news_the_last_target_that_was_made_with_some_must_stay() -> None:
    safe = [turn(1, 4), turn(4, 4, Reason.STALE, "kept")]

    assert below_safe(safe) == []
    assert below_safe([*safe, turn(4, 3, Reason.STALE)]) == [turn(4, 3, Reason.STALE)]
    assert below_safe([turn(1, 4, outcome="failed"), turn(1, 1, Reason.STALE, "kept")]) == []


def test_a_run_with_a_request_that_failed_is_wrong() -> None:
    assert Run([turn(1, 2)], [2], [200, 200], ([1], [1])).wrongs(2) == []
    assert Run([turn(1, 2)], [2], [200, 0, 503], ([1], [1])).wrongs(2) == ["2 of 3 requests failed"]
