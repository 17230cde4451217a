"""Shortages over time: how long one is waited for, and when more is tried again."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.autoscale.journal import Journal
from penstock.autoscale.limits.shortage import MAX_PAUSE_S, Retreat, Shortage, bound_by_shortage, note_shortage
from penstock.autoscale.observation import ServeState
from penstock.autoscale.policy import Reason
from penstock.autoscale.range import Range
from penstock.autoscale.scaler import ScaledPool, Scaler
from tests.unit.autoscale.test_scaler import SETTINGS, Rig, Serve, Source, busy

TWO_OF_FOUR = Shortage("unschedulable", 2, 2, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")


def test_a_shortage_is_waited_for_and_then_more_is_tried_ever_more_seldom() -> None:
    retreat, bounds = Retreat(), []
    for second in range(200):
        has_place = retreat.most is not None  # the pool follows at once
        retreat = note_shortage(retreat, None if has_place else TWO_OF_FOUR, 2, 10.0, float(second))
        bounds.append(retreat.most)

    begins = [second for second in range(1, 200) if bounds[second] is not None and bounds[second - 1] is None]
    ends = [second for second in range(1, 200) if bounds[second] is None and bounds[second - 1] is not None]
    assert begins[0] == 10
    assert [end - begin for begin, end in zip(begins, ends, strict=False)] == [10, 20, 40, 80]
    assert {bound for bound in bounds if bound is not None} == {2}


def test_a_shortage_that_is_over_in_time_changes_nothing() -> None:
    retreat = note_shortage(Retreat(), TWO_OF_FOUR, 2, 10.0, 0.0)
    retreat = note_shortage(retreat, None, 4, 10.0, 9.0)
    retreat = note_shortage(retreat, TWO_OF_FOUR, 4, 10.0, 11.0)

    assert retreat.most is None
    assert note_shortage(retreat, TWO_OF_FOUR, 4, 10.0, 20.9).most is None
    assert note_shortage(retreat, TWO_OF_FOUR, 4, 10.0, 21.0).most == 2


def test_pauses_begin_anew_once_more_run_than_had_a_place() -> None:
    paused = Retreat(0.0, 2, 40.0, 40.0, 2)

    assert note_shortage(paused, None, 2, 10.0, 41.0).pause_s == 40.0
    assert note_shortage(paused, None, 3, 10.0, 41.0).pause_s == 0.0


@given(st.lists(st.booleans(), max_size=60), st.floats(1.0, 5000.0))
def test_no_pause_is_longer_than_an_hour(shortages: list[bool], unplaced_s: float) -> None:
    retreat, now = Retreat(), 0.0
    for is_short in shortages:
        now += 600.0
        retreat = note_shortage(retreat, TWO_OF_FOUR if is_short else None, 2, unplaced_s, now)

        assert retreat.pause_s <= MAX_PAUSE_S
        assert retreat.most is None or retreat.retry_s > now


def test_a_pool_that_is_to_have_a_replica_keeps_asking_for_one() -> None:
    nothing = Retreat(0.0, 0, 10.0, 10.0, 0)

    assert bound_by_shortage(Range(2, 4), nothing)[:2] == (1, 1)
    assert bound_by_shortage(Range(0, 4), nothing)[:2] == (0, 0)
    assert bound_by_shortage(Range(1, 4), Retreat()) == Range(1, 4)


def test_the_target_goes_back_to_what_has_a_place_and_says_so() -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}))
    found: dict[str, Shortage] = {}

    def shortages() -> Mapping[str, Shortage]:
        return found

    pool = ScaledPool("a", "pool-a", 8, structs.replace(SETTINGS, unplaced_s=5.0))
    rig.scaler = Scaler(
        "x", [pool], rig.source, rig.serve, Journal(None), lambda: rig.now, lambda: rig.now, shortages=shortages
    )
    rig.reconcile()
    rig.serve.serve_states["a"] = ServeState(3, ("r1", "r2"), num_starting=1)
    found["pool-a"] = Shortage("quota", 2, 1, "exceeded quota: gpus")
    rig.reconcile(5)
    assert rig.serve.calls == [("set", "a", 3)], "a node may be on its way"
    rig.reconcile()

    assert rig.serve.calls[1:] == [("set", "a", 2)]
    (told,) = rig.source.published[-1].explanations
    assert (told.reason, told.most, told.most_reason, told.retry_s) == (Reason.SHORTAGE, 2, Reason.SHORTAGE, 5.0)
    assert told.shortage is not None
    assert (told.shortage.kind, told.shortage.message) == ("quota", "exceeded quota: gpus")
    found.clear()
    rig.reconcile(4)
    assert len(rig.serve.calls) == 2
    rig.reconcile(2)
    assert rig.serve.calls[2:] == [("set", "a", 3)], "and tries again"


def test_behind_a_pause_no_more_are_tried_than_before_until_one_more_runs() -> None:
    paused = note_shortage(note_shortage(Retreat(), TWO_OF_FOUR, 2, 10.0, 0.0), TWO_OF_FOUR, 2, 10.0, 10.0)
    tried = note_shortage(paused, None, 2, 10.0, 20.0)
    over = note_shortage(tried, None, 3, 10.0, 30.0)

    assert bound_by_shortage(Range(1, 9), paused).most == 2
    assert bound_by_shortage(Range(1, 9), tried).most == 4
    assert bound_by_shortage(Range(1, 9), over).most == 9


def test_a_pool_goes_back_for_a_shortage_on_fresh_reports_alone() -> None:
    rig = Rig(Source([]), Serve({"a": ServeState(3, ("r1",), num_starting=2)}))
    pools = [ScaledPool("a", "pool-a", 8, structs.replace(SETTINGS, unplaced_s=5.0))]
    short = Shortage("unschedulable", 1, 2, "no node")
    rig.scaler = Scaler(
        "s", pools, rig.source, rig.serve, Journal(None), lambda: rig.now, shortages=lambda: {"pool-a": short}
    )

    rig.reconcile(20)
    assert rig.serve.calls == []
    rig.source.reports = [busy(queued=40)]
    rig.reconcile(10)

    assert rig.serve.calls == [("set", "a", 1)]
