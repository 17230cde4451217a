"""The recorded reports that end-to-end tests play, put to the autoscaler's policy without a cluster: a look a second,
pods that take 30 s to start."""

import itertools
from collections import deque
from collections.abc import Iterable

import pytest

from penstock.autoscale.observation import ServeState
from penstock.autoscale.observe import AgedReport, observe
from penstock.autoscale.policy import State, decide
from penstock.wire.scaling import REPORT_S, ReplicaReport
from tests.e2e.recorded import (
    DURATION_S,
    ENDING_S,
    LENGTH_S,
    MAX_ROWS,
    NUM_GATEWAYS,
    ONSET_S,
    PIECES,
    SETTINGS,
    Players,
    recording,
    stretches,
)

START_S = 30


class Pool:
    def __init__(self, target: int) -> None:
        self.players = Players("a")
        self.target = target
        self.due: deque[int] = deque()
        """Times at which the replicas that are on their way will be there."""
        self.now_s = 0
        self.demands: list[float] = []
        self.targets: list[int] = []
        self._state = State()

    def reconcile(self, count: int) -> None:
        for _ in range(count):
            self._turn()

    def _turn(self) -> None:
        self.now_s += 1
        while self.due and self.due[0] <= self.now_s:
            self.due.popleft()
        running = range(1, 1 + self.target - len(self.due))
        reports = [self.players.reports(running) for _ in range(round(1 / REPORT_S))][-1]
        serve_state = ServeState(self.target, tuple(f"r{number}" for number in running), num_starting=len(self.due))
        observed = observe("a", serve_state, [AgedReport(report, 0.0) for report in reports])
        self._state, decision = decide(SETTINGS, self._state, observed, MAX_ROWS, self.now_s)
        self.due.extend([self.now_s + START_S] * max(0, decision.target - self.target))
        self.target = decision.target
        self.demands.append(decision.demand)
        self.targets.append(decision.target)


def test_there_is_a_report_for_every_half_second_of_the_load() -> None:
    lines = recording()

    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(lines)]
    assert lines[0].at_s < 1
    assert lines[-1].at_s > DURATION_S - 1
    assert max(gaps) < 3 * REPORT_S
    assert sum(gaps) / len(gaps) == pytest.approx(REPORT_S, rel=0.05)
    assert {row.replica_id for line in lines for row in line.replicas} == {str(piece) for piece in range(PIECES)}


def test_what_the_stretches_gain_is_what_the_gateway_let_in() -> None:
    lines, found = recording(), stretches(recording())

    lengths_s = [len(stretch) * REPORT_S for stretch in found]
    assert lengths_s == pytest.approx(
        [DURATION_S - LENGTH_S - ENDING_S, ONSET_S, LENGTH_S - ONSET_S, ENDING_S], abs=1.5
    )
    assert (
        sum(frame.gain.num_started for stretch in found for frame in stretch)
        == lines[-1].pool.flow.num_started - lines[0].pool.flow.num_started
    )
    assert sum(frame.gain.num_started for frame in found.busy) > 6 * (LENGTH_S - ONSET_S)
    assert max(frame.num_waiting for frame in found.onset) > 0
    assert not any(frame.num_waiting for frame in found.calm)


def test_the_calm_wants_no_more_than_four_replicas() -> None:
    pool = Pool(SETTINGS.min_replicas)

    pool.reconcile(300)

    assert set(pool.targets) == {SETTINGS.min_replicas}
    assert max(pool.demands[10:]) <= SETTINGS.min_replicas * SETTINGS.target_utilisation


def test_the_step_wants_forty_and_keeps_them_and_its_end_gives_them_back() -> None:
    pool = Pool(SETTINGS.min_replicas)
    pool.reconcile(20)

    pool.players.press()
    pool.reconcile(20)
    way_up = pool.targets[20:]
    pool.reconcile(180)
    kept = pool.targets[40:]
    wanted = [demand / SETTINGS.target_utilisation for demand in pool.demands[40:]]
    pool.players.release()
    pool.reconcile(150)
    way_down = pool.targets[220:]

    assert sorted(way_up) == way_up
    assert set(kept) == {SETTINGS.max_replicas}
    assert sum(wanted) / len(wanted) > SETTINGS.max_replicas, "not by the queue alone"
    assert way_down == sorted(way_down, reverse=True)
    assert way_down[-1] == SETTINGS.min_replicas


def test_as_many_replicas_as_were_recorded_for_all_gateways_have_what_those_had() -> None:
    players = Players("a")
    players.press()
    for _ in players.recorded.onset:
        players.reports(())

    found = [players.reports(range(1, NUM_GATEWAYS * PIECES + 1))[-1].replicas for _ in players.recorded.busy]

    assert (
        sum(map(num_present, found))
        == NUM_GATEWAYS * sum(num_present(frame.replicas) for frame in players.recorded.busy)
        > 0
    )


def num_present(rows: Iterable[ReplicaReport]) -> int:
    return sum(row.load.num_running + row.load.num_waiting for row in rows)
