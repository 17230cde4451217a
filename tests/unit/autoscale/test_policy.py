"""The policy over time: a pool is played by a few lines that turn a target into replicas and a rate into reports."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import AverageRequest
from penstock.autoscale.observation import Observation, ReplicaSnapshot, ServeState
from penstock.autoscale.peaks import Peak
from penstock.autoscale.policy import RUSH_STARTS, STALE_S, Decision, Reason, State, decide
from penstock.perf.capacity import Shape
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import PoolFlow

COSTS = StepCosts(base_s=0.02, row_s=0.0003, prefill_token_s=0.00015, kv_token_s=4e-7)
MAX_ROWS = 16
PROMPT, OUTPUT = 100, 64
CAPACITY = 8.3
"""Requests a second that one replica of these takes; the tests check it."""
KNOWN = AverageRequest(Shape(PROMPT, 0.0, OUTPUT), 1000.0)
SETTINGS = AutoscaleConfig(max_replicas=8, target_utilisation=0.7, window_s=5.0, start_s=4.0, scale_down_delay_s=10.0)


def replica(
    name: str, num_running: int = 0, num_waiting: int = 0, costs: StepCosts = COSTS, num_sampled: int = 0
) -> ReplicaSnapshot:
    load = Load(
        "epoch",
        0,
        16,
        num_running,
        num_waiting,
        num_waiting * PROMPT,
        num_running * PROMPT,
        2048,
        2048,
        costs,
        512,
        num_sampled=num_sampled,
    )
    return ReplicaSnapshot(name, load, 16, 0, 0)


def observation(
    target: int,
    *,
    serving: int | None = None,
    flow: PoolFlow | None = None,
    running: int = 0,
    queued: int = 0,
    oldest_s: float = 0.0,
) -> Observation:
    serving = target if serving is None else serving
    names = tuple(f"r{number}" for number in range(serving))
    share = running // max(1, serving)
    replicas = tuple(replica(name, share) for name in names)
    return Observation(
        ServeState(target, names, max(0, target - serving)),
        {"gateway": flow or PoolFlow()},
        queued,
        oldest_s,
        replicas,
        0.1,
    )


@dataclass
class Pool:
    """Replicas come at once, or `start_s` after they were asked for; a queue forms where arrivals exceed what they
    take."""

    settings: AutoscaleConfig = SETTINGS
    target: int = 1
    start_s: float = 0.0
    capacity: float = CAPACITY
    now: float = 100.0
    state: State = field(default_factory=State)
    queued: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    ready: list[float] = field(default_factory=lambda: [0.0])
    decisions: list[Decision] = field(default_factory=list)

    @property
    def flow(self) -> PoolFlow:
        started, ended = round(self.started), round(self.ended)
        return PoolFlow(started, ended, started * PROMPT, 0, ended * OUTPUT)

    def second(self, rate: float) -> Decision:
        serving = sum(ready <= self.now for ready in self.ready)
        taken = min(self.queued + rate, serving * self.capacity)
        self.queued += rate - taken
        self.started += taken
        self.ended += taken
        self.now += 1.0
        running = round(MAX_ROWS * taken / CAPACITY)
        observed = observation(
            self.target,
            serving=serving,
            flow=self.flow,
            running=running,
            queued=round(self.queued),
            oldest_s=self.queued / (serving * self.capacity),
        )
        self.state, decision = decide(self.settings, self.state, observed, MAX_ROWS, self.now)
        self.decisions.append(decision)
        self.target = decision.target
        self.ready += [self.now + self.start_s] * (self.target - len(self.ready))
        del self.ready[self.target :]
        return decision

    def run(self, rate: float, seconds: int) -> list[int]:
        return [self.second(rate).target for _ in range(seconds)]


def test_the_capacity_that_these_tests_count_on() -> None:
    pool = Pool()
    pool.run(5.0, 60)

    assert pool.decisions[-1].capacity_rps == pytest.approx(CAPACITY, rel=0.03)


def test_a_pool_is_sized_for_its_load_at_the_target_utilisation() -> None:
    pool = Pool()
    targets = pool.run(20.0, 40)

    assert targets[-1] == math.ceil(20.0 / CAPACITY / SETTINGS.target_utilisation)
    assert max(targets) <= SETTINGS.max_replicas


def test_a_step_is_answered_within_one_period_once_the_queue_endangers_the_deadline() -> None:
    pool = Pool(start_s=3.0)
    pool.run(3.0, 20)
    assert pool.target == 1

    pool.run(20.0, 2)

    assert pool.decisions[-1].reason is Reason.DEADLINE
    assert pool.target >= 3
    assert max(pool.run(20.0, 40)) <= 6, "the queue of the start-up is not taken for load that stays"
    assert pool.queued == 0


def test_after_the_load_it_goes_down_in_one_go_once_the_delay_is_over() -> None:
    pool = Pool()
    pool.run(20.0, 30)
    high = pool.target

    targets = pool.run(1.0, 60)
    changes = [place for place in range(1, len(targets)) if targets[place] != targets[place - 1]]

    assert targets[: int(SETTINGS.scale_down_delay_s)] == [high] * int(SETTINGS.scale_down_delay_s)
    assert targets[-1] == 1
    assert changes[-1] - changes[0] <= SETTINGS.window_s, "as fast as the window forgot the load, no delay for each"


def test_it_goes_down_to_the_most_that_was_enough_within_the_delay() -> None:
    pool = Pool(target=8, ready=[0.0] * 8)
    pool.run(10.0, 10)

    targets = pool.run(1.0, 40)

    assert targets[0] == 8
    assert targets[7] == 2, "what the 10 requests/s needed, in one go"
    assert targets[-1] == 1


def test_a_burst_that_came_faster_than_replicas_is_prepared_for_as_long_as_it_is_remembered() -> None:
    def run_bursts(floor: Literal["off", "day"]) -> tuple[int, Reason, float]:
        pool = Pool(settings=structs.replace(SETTINGS, burst_floor=floor), start_s=SETTINGS.start_s)
        pool.run(1.0, 30)
        pool.run(20.0, 30)
        pool.run(1.0, 60)
        kept, reason = pool.target, pool.decisions[-1].reason
        longest_s = max(pool.second(20.0).predicted_wait_s for _ in range(10))
        return kept, reason, longest_s

    with_floor, without = run_bursts("day"), run_bursts("off")

    assert with_floor[1] is Reason.FLOOR
    assert with_floor[0] >= math.ceil(20.0 / CAPACITY)
    assert without[:2] == (1, Reason.STEADY)
    assert with_floor[2] <= SETTINGS.ttft_target_s < without[2]


def test_a_burst_that_the_floor_carried_is_remembered_anew() -> None:
    pool = Pool(settings=structs.replace(SETTINGS, burst_floor="day"), start_s=SETTINGS.start_s)
    pool.run(1.0, 30)
    pool.run(20.0, 30)
    pool.now += 80_000.0
    pool.run(1.0, 60)
    pool.run(20.0, 30)
    assert pool.decisions[-1].predicted_wait_s <= SETTINGS.ttft_target_s, "the floor carries it"
    pool.now += 80_000.0

    assert pool.run(1.0, 60)[-1] >= math.ceil(20.0 / CAPACITY)


def test_a_look_without_news_does_not_begin_the_delay_again() -> None:
    pool = Pool()
    pool.run(20.0, 30)
    pool.run(1.0, 20)
    known_s = pool.state.known_s
    assert known_s is not None

    stale = observation(pool.target, serving=pool.target)._replace(age_s=math.inf)
    pool.state, decision = decide(SETTINGS, pool.state, stale, MAX_ROWS, pool.now)
    pool.run(1.0, 20)

    assert decision.reason is Reason.STALE
    assert pool.state.known_s == known_s


def test_a_floor_is_forgotten_after_its_time_and_never_above_the_bounds() -> None:
    remembering = structs.replace(SETTINGS, burst_floor="day")
    pool = Pool(settings=remembering)
    pool.run(1.0, 30)
    pool.state = pool.state._replace(bursts=(Peak(pool.now, 99),))

    assert pool.run(1.0, 2) == [8, 8]
    pool.now += remembering.burst_floor_s
    assert pool.run(1.0, 60)[-1] == 1


def test_a_load_that_comes_back_within_the_delay_changes_nothing() -> None:
    pool = Pool()
    pool.run(20.0, 30)
    high = pool.target

    found = {target for _ in range(6) for target in pool.run(1.0, 8) + pool.run(20.0, 8)}

    assert min(found) == high


@pytest.mark.parametrize(("left", "wanted"), [(0.4, 4), (0.6, 5)])
def test_one_more_only_where_a_start_up_time_did_not_halve_the_backlog(left: float, wanted: int) -> None:
    pool = Pool(target=4, ready=[0.0] * 4)
    pool.run(8.0, 30)
    state, now = pool.state, pool.now
    queued = 30.0

    # four replicas with the load of one; what waits came long ago, so that no rate asks for more
    for length in (queued, queued * left):
        samples = tuple(sample._replace(num_queued=round(length)) for sample in state.samples)
        waiting = observation(4, flow=pool.flow, running=4, queued=round(length), oldest_s=2.0)
        state, decision = decide(SETTINGS, state._replace(samples=samples), waiting, MAX_ROWS, now)
        if length == queued:
            assert decision.target == 5, "nothing is known of what helps"
            state = state._replace(raised_s=now)
        now += SETTINGS.start_s + 0.1

    assert decision.target == wanted


def test_what_a_rush_asked_for_beyond_its_demand_is_not_kept_for_the_delay() -> None:
    delay_s, rush_s = 100.0, RUSH_STARTS * SETTINGS.start_s
    pool = Pool(settings=structs.replace(SETTINGS, scale_down_delay_s=delay_s, max_replicas=20), start_s=4.0)
    pool.run(1.0, 110)
    pool.run(40.0, 6)
    pool.run(1.0, 30)
    pressed_s = pool.state.pressed_s
    begin_s = pool.now - len(pool.decisions)
    course = [(begin_s + place, decision.target) for place, decision in enumerate(pool.decisions)]
    during = [target for at_s, target in course if pressed_s <= at_s < pressed_s + rush_s]
    planned = SETTINGS.target_utilisation * (1 - SETTINGS.scale_down_margin)
    needed = math.ceil(max(decision.demand for decision in pool.decisions) / planned)

    assert set(during) == {max(target for _, target in course)}, "nothing is cancelled before it has started"
    assert during[0] > needed
    assert 40.0 / CAPACITY <= pool.target <= needed, "the demand of the rush is remembered for the delay"
    assert pool.run(1.0, round(delay_s))[-1] == 1


@pytest.mark.parametrize("start_s", [1.0, 2.0, 5.0, 20.0])
def test_a_step_that_lasts_loses_no_replicas_that_it_needs(start_s: float) -> None:
    settings = structs.replace(SETTINGS, window_s=30.0, start_s=start_s, scale_down_delay_s=100.0, max_replicas=20)
    pool = Pool(settings=settings, start_s=start_s)
    pool.run(1.0, 140)

    targets = pool.run(40.0, 200)

    needed = math.ceil(40.0 / CAPACITY / SETTINGS.target_utilisation)
    reached = next(place for place, target in enumerate(targets) if target >= needed)
    assert min(targets[reached:]) >= needed


def test_replicas_that_were_needed_beyond_the_model_are_kept_for_the_delay() -> None:
    """Replicas take about half of what the model says, and nothing but the queue shows it."""
    settings = structs.replace(SETTINGS, window_s=30.0, start_s=10.0, scale_down_delay_s=300.0, max_replicas=20)
    pool = Pool(settings=settings, start_s=10.0, capacity=4.5)

    targets = pool.run(20.0, 600)

    steps = [after - before for before, after in itertools.pairwise(targets) if after != before]
    assert sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps)) <= 2
    assert sum(decision.predicted_wait_s > settings.ttft_target_s for decision in pool.decisions) <= 100


def test_a_floor_remembers_a_burst_that_is_shorter_than_the_window() -> None:
    settings = structs.replace(SETTINGS, burst_floor="day", window_s=30.0, max_replicas=20)
    pool = Pool(settings=settings, start_s=SETTINGS.start_s)
    pool.run(1.0, 60)
    pool.run(60.0, 15)
    pool.run(1.0, 40)

    floor = max(peak.replicas for peak in pool.state.bursts)

    assert 60.0 / CAPACITY <= floor <= 1.3 * 60.0 / CAPACITY


def test_one_more_each_start_up_time_where_the_model_says_enough_but_the_queue_does_not_go() -> None:
    state, now, target, ready_s = State(), 100.0, 2, [0.0] * 2
    targets = []
    for _ in range(20):
        now += 1.0
        serving = sum(at_s <= now for at_s in ready_s)
        observed = observation(target, serving=serving, queued=1, oldest_s=3.0)
        state, decision = decide(SETTINGS, state, observed, MAX_ROWS, now)
        target = decision.target
        targets.append(target)
        ready_s += [now + SETTINGS.start_s] * (target - len(ready_s))

    assert targets[0] == 3
    raises = [
        place for place, (before, after) in enumerate(zip([2, *targets], targets, strict=False)) if after > before
    ]
    assert all(later - earlier >= SETTINGS.start_s for earlier, later in itertools.pairwise(raises))
    assert targets[-1] > 4


def test_without_news_from_gateways_nothing_changes() -> None:
    pool = Pool(target=3, ready=[0.0] * 3)
    pool.run(1.0, 9)
    silent = observation(3)._replace(flows={}, replicas=(), age_s=math.inf)

    for second in range(60):
        pool.state, decision = decide(SETTINGS, pool.state, silent, MAX_ROWS, pool.now + second)
        assert (decision.target, decision.reason) == (3, Reason.STALE)
    _, first = decide(SETTINGS, pool.state, observation(3), MAX_ROWS, pool.now + 61)
    assert first.reason is Reason.UNKNOWN, "window and delay begin again"
    assert (
        decide(SETTINGS, State(), observation(3)._replace(age_s=STALE_S + 0.1), MAX_ROWS, 0.0)[1].reason is Reason.STALE
    )


@pytest.mark.parametrize("rate", [0.5, 5.5, 11.0, 20.0])
@pytest.mark.parametrize("seconds", [1, 30])
def test_an_autoscaler_that_starts_anew_under_a_steady_load_moves_nothing(rate: float, seconds: int) -> None:
    pool = Pool()
    pool.run(rate, 60)
    settled = pool.target

    pool.state = State()
    pool.run(rate, seconds)
    pool.state = State()

    assert set(pool.run(rate, 40)) == {settled}


def test_a_gateway_that_starts_anew_under_a_steady_load_moves_nothing() -> None:
    pool = Pool(start_s=SETTINGS.start_s)
    pool.run(20.0, 80)
    settled, before = pool.target, pool.state

    for second in (1, 2):  # it has no links yet, and what comes waits
        lonely = observation(settled, serving=0, queued=20 * second, oldest_s=float(second))
        lonely = lonely._replace(
            flows={"its successor": PoolFlow()}, serve_state=ServeState(settled, ("r0",) * settled)
        )
        pool.state, decision = decide(pool.settings, pool.state, lonely, MAX_ROWS, pool.now + second)
        assert (decision.target, decision.reason) == (settled, Reason.STARTING)
    pool.now += 2
    pool.started = pool.ended = 0.0

    assert before.known.shape == pytest.approx(pool.state.known.shape)
    assert set(pool.run(20.0, 40)) == {settled}


def test_nothing_goes_on_less_news_than_a_window() -> None:
    impatient = AutoscaleConfig(max_replicas=8, window_s=5.0, scale_down_delay_s=0.0)
    pool = Pool(settings=impatient, target=3, ready=[0.0] * 3)

    assert pool.run(0.0, 5) == [3] * 5
    assert pool.second(0.0).reason is Reason.IDLE


def test_a_replica_that_never_gets_ready_is_waited_for_and_no_other_asked_for_in_its_place() -> None:
    state, targets = State(known=KNOWN), []
    for second in range(60):
        state, decision = decide(
            SETTINGS,
            state,
            observation(2, serving=1, running=MAX_ROWS, queued=3, oldest_s=2.0),
            MAX_ROWS,
            100.0 + second,
        )
        targets.append((decision.target, decision.reason))

    assert set(targets) == {(2, Reason.STARTING)}


def test_at_its_bound_a_pool_says_that_it_is_full() -> None:
    bound = AutoscaleConfig(min_replicas=2, max_replicas=2, window_s=5.0, start_s=4.0, scale_down_delay_s=10.0)
    pool = Pool(settings=bound, target=2, ready=[0.0] * 2)

    assert set(pool.run(40.0, 20)) == {2}
    assert pool.decisions[-1].reason is Reason.FULL
    assert set(pool.run(0.0, 60)) == {2}
    assert pool.decisions[-1].reason is Reason.STEADY


def test_while_no_replica_knows_its_speed_nothing_changes() -> None:
    unmeasured = observation(2)._replace(replicas=(replica("r0", costs=StepCosts()),))

    assert decide(SETTINGS, State(), unmeasured, MAX_ROWS, 0.0)[1] == Decision(2, Reason.UNKNOWN)


@pytest.mark.parametrize(("target", "expected"), [(1, 2), (9, 5)])
def test_a_target_outside_of_the_bounds_is_brought_back(target: int, expected: int) -> None:
    bounds = AutoscaleConfig(min_replicas=2, max_replicas=5)

    assert decide(bounds, State(), observation(target), MAX_ROWS, 0.0)[1] == Decision(expected, Reason.BOUNDS)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 100.0), st.integers(1, 8))
def test_a_constant_load_settles_and_never_moves_both_ways(rate: float, target: int) -> None:
    pool = Pool(target=target, ready=[0.0] * target)
    pool.run(rate, 150)  # from wherever it was
    settled = pool.run(rate, 60)

    assert len(set(settled)) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 200.0), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 5))
def test_the_target_never_leaves_the_bounds(rates: list[float], least: int, more: int) -> None:
    bounds = AutoscaleConfig(
        min_replicas=least, max_replicas=least + more, window_s=3.0, start_s=2.0, scale_down_delay_s=2.0
    )
    pool = Pool(settings=bounds, target=least, ready=[0.0] * least, start_s=2.0)

    assert all(least <= pool.second(rate).target <= least + more for rate in rates)


flows = st.integers(0, 400)


@settings(deadline=None)
@given(
    st.integers(1, 8),
    flows,
    st.integers(0, 200),
    st.integers(0, 64),
    st.floats(0.0, 20.0),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 16),
)
def test_more_demand_never_means_fewer_replicas(
    target: int,
    arrived: int,
    queued: int,
    running: int,
    oldest_s: float,
    more_arrived: int,
    more_queued: int,
    more_running: int,
) -> None:
    state, _ = decide(SETTINGS, State(), observation(target, flow=PoolFlow()), MAX_ROWS, 0.0)
    state = state._replace(known_s=-100.0)  # as far down as it may go

    def target_for(arrived: int, queued: int, running: int) -> int:
        flow = PoolFlow(arrived, arrived, arrived * PROMPT, 0, arrived * OUTPUT)
        observed = observation(target, flow=flow, running=running, queued=queued, oldest_s=oldest_s if queued else 0.0)
        return decide(SETTINGS, state._replace(known=KNOWN), observed, MAX_ROWS, 5.0)[1].target

    assert target_for(arrived + more_arrived, queued + more_queued, running + more_running) >= target_for(
        arrived, queued, running
    )


def test_rows_that_take_more_than_the_largest_logit_lower_the_capacity() -> None:
    costs = structs.replace(COSTS, sampled_row_s=0.001)

    def capacity(num_sampled: int) -> float:
        observed = observation(1)._replace(replicas=(replica("r0", 8, costs=costs, num_sampled=num_sampled),))
        state = State(known=KNOWN)
        for second in range(30):
            state, decision = decide(SETTINGS, state, observed, MAX_ROWS, float(second))
        return decision.capacity_rps

    assert capacity(8) < capacity(4) < capacity(0)
    assert capacity(0) == pytest.approx(CAPACITY, rel=0.03)


def test_a_standby_is_beyond_what_the_load_and_the_least_ask_for_within_the_bounds() -> None:
    def rest(rate: float, **changes: int) -> int:
        pool = Pool(settings=structs.replace(SETTINGS, **changes))
        return pool.run(rate, 60)[-1]

    needed = math.ceil(20.0 / CAPACITY / SETTINGS.target_utilisation)
    assert (rest(0.0), rest(0.0, standby=2), rest(0.0, standby=2, min_replicas=2)) == (1, 3, 4)
    assert (rest(20.0), rest(20.0, standby=1)) == (needed, needed + 1)
    assert rest(20.0, standby=9) == SETTINGS.max_replicas


def test_a_standby_goes_again_when_the_load_does() -> None:
    pool = Pool(settings=structs.replace(SETTINGS, standby=1))
    high = pool.run(20.0, 40)[-1]

    assert pool.run(1.0, 60)[-1] == 2 < high
    assert pool.decisions[-1].reason is Reason.STEADY


def test_what_waits_because_replicas_never_come_asks_for_no_more_of_them() -> None:
    pool = Pool(settings=structs.replace(SETTINGS, max_replicas=60), target=2, start_s=1e6, ready=[0.0, 0.0])
    pool.run(10.0, 10)

    targets = pool.run(40.0, 300)

    assert pool.queued > 5000
    assert targets[-1] == targets[20], "twice a start later all stays as it is"
    assert targets[-1] < 15


def test_an_autoscaler_that_begins_in_mid_scale_gives_what_is_on_its_way_time_to_help() -> None:
    pressing = observation(4, running=16, queued=2, oldest_s=5.0)
    begun = pressing._replace(serve_state=pressing.serve_state._replace(running=("r0",), num_starting=3))

    state, _ = decide(SETTINGS, State(), begun, MAX_ROWS, 100.0)
    state, early = decide(SETTINGS, state, pressing, MAX_ROWS, 102.0)
    _, late = decide(SETTINGS, state, pressing, MAX_ROWS, 105.0)

    assert (early.target, early.reason) == (4, Reason.STARTING)
    assert (late.target, late.reason) == (5, Reason.DEADLINE)
