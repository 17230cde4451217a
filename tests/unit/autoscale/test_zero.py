"""Scale to zero over time, a second a turn, under the whole policy."""

from dataclasses import dataclass, field

import pytest
from msgspec import structs

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.observation import Observation
from penstock.autoscale.policy import Decision, Reason, State, decide
from penstock.autoscale.range import Range, limit
from penstock.autoscale.zero import Usage, find_range, note_use, ready_in_s
from penstock.wire.scaling import PoolFlow
from tests.unit.autoscale.test_policy import observation

SETTINGS = AutoscaleConfig(
    min_replicas=0, max_replicas=4, idle_s=60.0, window_s=5.0, start_s=20.0, scale_down_delay_s=10.0
)


@dataclass
class Pool:
    """A pool whose targets are met at once."""

    target: int = 1
    settings: AutoscaleConfig = SETTINGS
    usage: Usage = field(default_factory=Usage)
    state: State = field(default_factory=State)
    now: float = 1000.0

    def turn(self, seen: Observation) -> Decision:
        self.now += 1.0
        self.usage = note_use(self.usage, seen, self.now)
        allowed = find_range(
            self.settings, Range(self.settings.min_replicas, self.settings.max_replicas), self.usage, seen, self.now
        )
        self.state, decision = decide(limit(self.settings, allowed), self.state, seen, 16, self.now)
        decision = allowed.explain(decision, self.target)
        self.target = decision.target
        return decision

    def rest(self, seconds: int) -> list[Reason]:
        return [self.turn(observation(self.target)).reason for _ in range(seconds)]


def test_an_unused_pool_goes_to_zero_and_stays_there() -> None:
    pool = Pool()

    reasons = pool.rest(60)
    assert pool.target == 1, "not before idle_s"
    reasons += pool.rest(60)

    assert pool.target == 0
    assert reasons.count(Reason.UNUSED) == 1
    assert Reason.IDLE not in reasons


def test_several_replicas_that_nobody_uses_all_go() -> None:
    pool = Pool(target=3)

    pool.rest(70)

    assert pool.target == 0


def test_a_floor_for_bursts_keeps_no_pool_from_zero_and_brings_none_back() -> None:
    pool = Pool(settings=structs.replace(SETTINGS, burst_floor="day"))
    pool.rest(5)
    for _ in range(5):
        pool.turn(observation(pool.target, serving=1, running=16, queued=60, oldest_s=5.0))
    assert pool.state.bursts, "which the floor remembers"

    pool.rest(60)
    reasons = pool.rest(60)

    assert pool.target == 0
    assert Reason.FLOOR not in reasons


def test_the_first_request_starts_one_replica_at_once() -> None:
    pool = Pool(target=0)
    pool.rest(5)

    decision = pool.turn(observation(0, queued=1, oldest_s=0.1))

    assert decision == Decision(1, Reason.ARRIVAL)


def test_a_request_that_another_tier_answered_starts_one_too() -> None:
    pool = Pool(target=0)
    pool.turn(observation(0, flow=PoolFlow(num_passed=7)))
    assert pool.target == 0, "what came before the first look is no news"

    decision = pool.turn(observation(0, flow=PoolFlow(num_passed=8)))

    assert decision == Decision(1, Reason.ARRIVAL)


def test_a_gateway_that_comes_with_old_totals_starts_nothing() -> None:
    pool = Pool(target=0)
    pool.rest(3)

    seen = observation(0)
    pool.turn(seen._replace(flows={**seen.flows, "other": PoolFlow(num_started=50)}))

    assert pool.target == 0


@pytest.mark.parametrize(
    "changes", [{"flow": PoolFlow(num_started=1)}, {"running": 1}, {"queued": 1}, {"flow": PoolFlow(num_passed=1)}]
)
def test_any_sign_of_use_begins_the_time_anew(changes: dict[str, object]) -> None:
    pool = Pool()
    pool.rest(50)

    pool.turn(observation(1, **changes))  # type: ignore[arg-type]
    flow = changes.get("flow")
    for _ in range(50):
        pool.turn(observation(pool.target, flow=flow))  # type: ignore[arg-type]

    assert pool.target >= 1


def test_without_news_nothing_counts_as_unused() -> None:
    pool = Pool()
    pool.rest(10)

    decisions = [pool.turn(observation(1)._replace(age_s=60.0, flows={})) for _ in range(100)]

    assert {decision.reason for decision in decisions} == {Reason.STALE}
    assert pool.target == 1


def test_a_pool_whose_lower_bound_is_above_zero_keeps_it() -> None:
    pool = Pool(settings=AutoscaleConfig(min_replicas=1, idle_s=10.0, window_s=5.0, scale_down_delay_s=1.0))

    reasons = pool.rest(60)

    assert pool.target == 1
    assert Reason.UNUSED not in reasons


def test_the_time_until_the_first_replica_counts_down_from_the_start_and_is_a_whole_one_again_after_it() -> None:
    pool = Pool(target=0)
    pool.rest(3)
    cold = ready_in_s(SETTINGS.start_s, pool.usage, pool.now)
    waiting = observation(1, serving=0, queued=1)
    pool.turn(waiting)
    for _ in range(5):
        pool.turn(waiting)

    assert cold == SETTINGS.start_s
    assert ready_in_s(SETTINGS.start_s, pool.usage, pool.now) == SETTINGS.start_s - 5
    assert ready_in_s(SETTINGS.start_s, pool.usage, pool.now + 100) == 0.0
    pool.turn(observation(1))
    assert ready_in_s(SETTINGS.start_s, pool.usage, pool.now) == SETTINGS.start_s
