"""Explanations of decisions, against numbers worked out by hand, and as the scaler publishes them."""

import pytest

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import AverageRequest, Sample
from penstock.autoscale.explain import explain, with_phases
from penstock.autoscale.observation import Observation, ServeState
from penstock.autoscale.peaks import Peak
from penstock.autoscale.policy import Decision, Reason, State
from penstock.autoscale.range import Range
from penstock.autoscale.starts import PodTimes, Starts
from penstock.perf.capacity import Shape
from penstock.wire.discovery import StartTimes
from penstock.wire.explanation import StartPhases
from penstock.wire.scaling import PoolFlow, decode_targets, encode
from tests.unit.autoscale.test_policy import observation
from tests.unit.autoscale.test_scaler import Rig, Serve, Source, busy

SETTINGS = AutoscaleConfig(max_replicas=8, target_utilisation=0.5, scale_down_delay_s=60.0, burst_floor="day")
STATE = State(
    samples=(Sample(100.0, PoolFlow(), 0, used=0.5), Sample(110.0, PoolFlow(num_started=30), 0, used=1.5)),
    known=AverageRequest(Shape(200.0, 50.0, 20.0), 30.0),
    enough=(Peak(80.0, 5), Peak(105.0, 3)),
    bursts=(Peak(90.0, 2),),
    starts=Starts(took_s=(30.0, 40.0, 50.0)),
)


def test_an_explanation_has_the_numbers_of_the_decision() -> None:
    decision = Decision(4, Reason.COOLING, demand=1.5, capacity_rps=2.0, predicted_wait_s=0.25)

    found = explain("a", SETTINGS, Range(1, 8), STATE, observation(4, serving=3), decision, 110.0)

    assert (found.rate_rps, found.capacity_rps, found.decoding, found.demand, found.needed) == (3.0, 2.0, 1.0, 1.5, 3)
    assert (found.enough, found.enough_ago_s, found.burst_floor) == (5, 30.0, 2)
    assert (found.start_s, found.num_starts) == (30.0, 3), "the median with two first guesses of 10 s"
    assert (found.num_running, found.num_serving, found.num_starting) == (3, 3, 1)
    assert (found.prefill_tokens, found.cached_tokens, found.output_tokens) == (200.0, 50.0, 20.0)


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.BOUNDS])
def test_a_decision_that_looked_at_no_load_explains_none(reason: Reason) -> None:
    found = explain("a", SETTINGS, Range(1, 8), STATE, observation(4), Decision(4, reason), 110.0)

    assert (found.capacity_rps, found.demand, found.needed, found.predicted_wait_s) == (None, None, None, None)


def test_no_report_is_no_age() -> None:
    alone = Observation(ServeState(1, ("r1",)), {}, 0, 0.0, (), float("inf"))

    found = explain("a", SETTINGS, Range(1, 8), State(), alone, Decision(1, Reason.STALE), 110.0)

    assert (found.age_s, found.rate_rps, found.enough) == (None, None, None)


def test_the_scaler_publishes_what_it_decided_and_what_became_of_it() -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}))

    rig.reconcile(2)

    (first,), (second,) = (targets.explanations for targets in rig.source.published)
    assert (first.pool, first.was, first.target, first.reason, first.outcome) == ("a", 1, 3, "deadline", "applied")
    assert (second.was, second.target, second.outcome) == (3, 3, "kept")
    assert [(change.unix_s, change.was, change.target) for change in second.changes] == [(1001.0, 1, 3)]


def test_a_change_that_fails_again_and_again_is_one_change() -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}, fails=True))

    rig.reconcile(20)

    (found,) = rig.source.published[-1].explanations
    assert [(change.target, change.outcome) for change in found.changes] == [(3, "failed")]


def test_the_phases_are_of_the_latest_replica_that_says_them_and_of_the_newest_pod() -> None:
    told = [StartTimes(1.0, 2.0), StartTimes(3.0, 4.0), None]
    seen = observation(3)
    seen = seen._replace(
        replicas=tuple(each._replace(start=start) for each, start in zip(seen.replicas, told, strict=True))
    )
    bare = explain("a", SETTINGS, Range(1, 8), STATE, seen, Decision(3, Reason.STEADY), 110.0)

    assert with_phases(bare, seen, PodTimes(5.0, 6.0)).start_phases == StartPhases(5.0, 6.0, 3.0, 4.0)
    assert with_phases(bare, observation(3), None).start_phases == StartPhases()


def test_an_explanation_travels_with_the_targets() -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}))
    rig.reconcile()

    assert decode_targets(encode(rig.source.published[0])) == rig.source.published[0]
