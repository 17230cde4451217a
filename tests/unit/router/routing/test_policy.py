from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import scale_costs
from penstock.router.routing.policy import (
    FULL_BACKLOG_S,
    LEAST_WEIGHT,
    Reason,
    ReplicaView,
    UnreportedWork,
    Wait,
    choose,
    weigh_others,
)
from penstock.wire.frames import Load, StepCosts

COSTS = StepCosts(base_s=0.01, row_s=0.002, prefill_token_s=0.001, kv_token_s=1e-6)
"""Step costs of a CPU replica: a cached token saves a millisecond, a row costs two."""
IDLE = Load(
    "epoch",
    0,
    max_inflight=8,
    num_running=0,
    num_waiting=0,
    prefill_tokens_outstanding=0,
    kv_tokens=0,
    free_blocks=1000,
    total_blocks=1000,
    costs=COSTS,
    max_batched_tokens=512,
)

NOTHING = UnreportedWork()


def replica(
    name: str,
    cached: int = 0,
    inflight: int = 0,
    unreported: UnreportedWork = NOTHING,
    max_model_len: int = 8192,
    pool: str = "pool",
    **load: object,
) -> ReplicaView:
    return ReplicaView(
        name, pool, msgspec.structs.replace(IDLE, **load), unreported, inflight, 16, max_model_len, cached
    )


def pick(*replicas: ReplicaView, num_tokens: int = 1024, expected: float = 64.0, seed: int = 0):
    return choose(num_tokens, expected, replicas, Random(seed))


def test_the_replica_that_holds_the_prefix_wins_among_equals():
    decision = pick(replica("a"), replica("b", cached=512))

    assert (decision.replica_id, decision.reason, decision.cached_tokens) == ("b", Reason.PREFIX, 512)
    assert decision.scores["b"] == decision.predicted_ttft_s < decision.scores["a"]


def test_the_idle_replica_wins_without_a_prefix():
    decision = pick(replica("a", num_running=4), replica("b"))

    assert (decision.replica_id, decision.reason) == ("b", Reason.LEAST_LOADED)


BUSY = replica("busy", num_running=8, num_waiting=4, prefill_tokens_outstanding=20_000)
"""One that so much waits for that others' delays count in full at three candidates."""


def test_a_prefix_is_left_when_the_batch_there_costs_more_than_computing_it_again():
    def pick_beside(num_running: int) -> str | None:
        holder = replica("a", cached=512, num_running=num_running, prefill_tokens_outstanding=200)
        return pick(holder, replica("b"), BUSY).replica_id

    assert (pick_beside(0), pick_beside(12)) == ("a", "b")


def test_a_prefix_is_left_when_the_prefill_queue_there_is_longer_than_what_it_saves():
    queued = replica("a", cached=512, num_waiting=1, prefill_tokens_outstanding=4000)

    assert pick(queued, replica("b"), expected=1).replica_id == "b"


def test_what_was_sent_since_the_load_report_counts():
    decision = pick(replica("a", cached=128, unreported=UnreportedWork(2, 1000)), replica("b"))

    assert (decision.replica_id, decision.reason) == ("b", Reason.LEAST_LOADED)


def test_prompts_sent_since_the_load_report_are_waited_for():
    decision = pick(replica("a", unreported=UnreportedWork(1, 4000)), replica("b", unreported=UnreportedWork(1, 100)))

    assert (decision.replica_id, decision.reason) == ("b", Reason.LEAST_LOADED)


def test_what_ended_since_the_load_report_no_longer_counts():
    decision = pick(
        replica("a", cached=512, num_running=8, kv_tokens=8000, unreported=UnreportedWork(num_ended=8)), replica("b")
    )

    assert (decision.replica_id, decision.reason) == ("a", Reason.PREFIX)
    assert decision.scores == pick(replica("a", cached=512), replica("b")).scores


def test_a_prompt_goes_where_its_prefill_holds_nobody_up_if_much_is_outstanding():
    """Alone it would be quicker on a: half its prefill is saved, and ten rows more cost less than that; but the ten
    would stand still."""
    choices = replica("a", cached=512, num_running=10, prefill_tokens_outstanding=200), replica("b")

    assert pick(*choices, BUSY, expected=8).replica_id == "b"
    assert pick(*choices, expected=8).replica_id == "a"


def test_the_weight_of_others_follows_what_is_outstanding_there_and_at_all_candidates():
    def mean(*outstanding: int) -> float:
        decision = pick(*(replica(str(tokens), prefill_tokens_outstanding=tokens) for tokens in outstanding))
        assert decision.basis is not None
        return decision.basis.read().mean_backlog_s

    assert mean(0, 0) == 0.0
    assert mean(1000, 3000) == pytest.approx(2.0)
    assert pick(replica("a"), BUSY._replace(num_inflight=8)).basis.read().mean_backlog_s == 0.0  # it is no candidate
    assert weigh_others(0.0, 80.0) == weigh_others(80.0, 0.0) == LEAST_WEIGHT
    assert weigh_others(0.5, 2.0) == pytest.approx(1 / FULL_BACKLOG_S)
    assert weigh_others(2.0, 8.0) == 1.0


def test_a_prefix_is_kept_to_for_those_that_come_later():
    """The request would begin sooner on b, but 512 tokens computed there are time that those behind it lack."""
    queued = replica("a", cached=512, num_waiting=1, prefill_tokens_outstanding=1000)

    decision = pick(queued, replica("b"), expected=1)

    assert decision.replica_id == "a"
    assert decision.scores["a"] > decision.scores["b"]


def slower(by: float) -> StepCosts:
    return scale_costs(COSTS, by)


def test_a_few_per_cent_between_replicas_of_a_pool_do_not_outweigh_a_prefix():
    assert pick(replica("a", cached=64, costs=slower(1.1)), replica("b"), expected=500).replica_id == "a"


def test_a_replica_that_is_much_slower_is_left_alone():
    assert pick(replica("a", cached=64, costs=slower(3)), replica("b"), expected=500).replica_id == "b"


def test_replicas_of_different_pools_are_compared_as_they_are():
    assert pick(replica("a", cached=64, costs=slower(1.1)), replica("b", pool="other"), expected=500).replica_id == "b"


def test_the_only_replica_left_says_so():
    assert pick(replica("a")).reason is Reason.ONLY_REPLICA
    assert pick(replica("a"), replica("b", is_draining=True)).reason is Reason.ONLY_REPLICA


def test_equals_are_drawn_and_the_emptier_of_two_wins():
    free_costs = StepCosts(base_s=0.01)
    replicas = [replica(name, inflight=inflight, costs=free_costs) for name, inflight in (("a", 3), ("b", 1), ("c", 2))]

    chosen = {pick(*replicas, seed=seed).replica_id for seed in range(30)}

    assert chosen == {"b", "c"}
    assert pick(*replicas).reason is Reason.TIE


def test_costs_within_a_millisecond_are_a_tie():
    assert pick(replica("a", cached=16), replica("b", cached=0), num_tokens=32).reason is Reason.PREFIX
    assert pick(replica("a", kv_tokens=1), replica("b"), num_tokens=32).reason is Reason.TIE


@pytest.mark.parametrize(
    ("blocked", "wait"),
    [
        (replica("a", is_draining=True), Wait.NO_REPLICA),
        (replica("a", inflight=8), Wait.NO_CREDIT),
        (replica("a", max_model_len=1024), Wait.CONTEXT),
        (replica("a")._replace(lacks_adapter_slot=True), Wait.NO_ADAPTER_SLOT),
        (replica("a", free_blocks=60, num_running=1), Wait.NO_BLOCKS),
    ],
)
def test_a_replica_that_cannot_take_it_is_not_chosen(blocked, wait):
    decision = pick(blocked)

    assert (decision.replica_id, decision.reason) == (None, wait)


@pytest.mark.parametrize("full", [replica("a", inflight=8, num_running=8), replica("a", free_blocks=60, num_running=8)])
def test_a_tenant_below_its_share_may_overdraw_while_few_wait(full):
    assert pick(full._replace(may_overdraw=True)).replica_id == "a"
    for crowd in (full._replace(unreported=UnreportedWork(2)), replica("a", inflight=8, num_running=8, num_waiting=2)):
        assert pick(crowd._replace(may_overdraw=True)).replica_id is None


def test_no_replica_at_all_is_a_wait():
    assert pick().reason is Wait.NO_REPLICA


def test_the_mildest_obstacle_names_the_wait():
    assert pick(replica("a", inflight=8), replica("b", max_model_len=10)).reason is Wait.NO_CREDIT


def test_an_idle_replica_takes_even_what_its_report_says_does_not_fit():
    assert pick(replica("a", free_blocks=0)).replica_id == "a"


def test_a_cached_prefix_needs_no_blocks():
    assert pick(replica("a", free_blocks=40, num_running=1, cached=512)).replica_id == "a"


def test_a_hot_prefix_does_not_pile_everything_onto_one_replica():
    """256 requests share 200 of 1,000 tokens that only one of four replicas holds at first; nothing finishes
    meanwhile."""
    unreported = [UnreportedWork()] * 4
    held = [192, 0, 0, 0]
    counts = [0] * 4
    for seed in range(256):
        views = [
            replica(
                str(i),
                cached=held[i],
                inflight=counts[i],
                unreported=unreported[i],
                max_inflight=256,
                free_blocks=100_000,
            )
            for i in range(4)
        ]
        chosen = int(pick(*views, num_tokens=1000, seed=seed).replica_id or "")
        unreported[chosen] = UnreportedWork(
            unreported[chosen].num_sent + 1, unreported[chosen].prefill_tokens + 1000 - held[chosen]
        )
        held[chosen] = 192
        counts[chosen] += 1

    assert min(counts) > 256 / 4 * 0.8


views = st.builds(
    lambda name, cached, inflight, running, waiting, prefill, free, draining: replica(
        name,
        cached,
        inflight,
        num_running=running,
        num_waiting=waiting,
        prefill_tokens_outstanding=prefill,
        free_blocks=free,
        is_draining=draining,
    ),
    st.uuids().map(str),
    st.integers(0, 63).map(lambda blocks: 16 * blocks),
    st.integers(0, 9),
    st.integers(0, 64),
    st.integers(0, 8),
    st.integers(0, 5000),
    st.integers(0, 200),
    st.booleans(),
)


FULL = {"num_running": 8, "num_waiting": 1, "max_inflight": 12, "row_hold_s": 4.0}
"""A replica with as many rows as sequences that run, one of which ends each half second; one sequence waits."""


def test_where_all_rows_are_taken_the_wait_for_one_is_predicted():
    free, full = pick(replica("a", **FULL, max_running=16)), pick(replica("a", **FULL, max_running=8))

    assert full.predicted_ttft_s - free.predicted_ttft_s == pytest.approx(1.0)


def test_sequences_that_are_on_their_way_wait_for_rows_too():
    on_their_way = UnreportedWork(num_sent=2, num_ended=1)
    before, after = (
        pick(replica("a", unreported=unreported, **FULL, max_running=8)) for unreported in (NOTHING, on_their_way)
    )

    assert after.basis.read().compared[0].start_wait_s - before.basis.read().compared[0].start_wait_s == 0.5


def test_a_free_row_is_worth_more_than_a_prefix_where_rows_are_taken():
    other = replica("b", num_running=8, num_waiting=1, max_running=16)

    assert pick(replica("a", cached=128, **FULL, max_running=16), other).replica_id == "a"
    assert pick(replica("a", cached=128, **FULL, max_running=8), other).replica_id == "b"


def test_a_tenant_for_whom_others_make_room_waits_for_no_row():
    decision = pick(replica("a", **FULL, max_running=8)._replace(may_overdraw=True))

    assert decision.basis.read().compared[0].start_wait_s == 0.0


def test_an_adapter_is_loaded_while_the_request_waits_for_a_row():
    waits_s = [
        pick(replica("a", **FULL, max_running=8)._replace(adapter_load_s=load_s)).basis.read().compared[0].start_wait_s
        for load_s in (0.2, 3.0)
    ]

    assert waits_s == [1.0, 3.0]


@given(st.lists(views, max_size=6), st.integers(0, 5))
def test_who_is_chosen_had_credit_and_room_and_is_not_draining(replicas, seed):
    decision = pick(*replicas, seed=seed)

    assert decision == pick(*replicas, seed=seed)
    if decision.replica_id is None:
        assert isinstance(decision.reason, Wait)
        return
    view = next(view for view in replicas if view.replica_id == decision.replica_id)
    assert not view.load.is_draining
    assert view.num_inflight < view.load.max_inflight
    assert decision.replica_id in decision.scores


@given(st.integers(0, 63), st.integers(0, 64), st.integers(0, 5000))
def test_of_two_that_differ_in_cache_only_the_emptier_cache_never_wins(blocks, running, prefill):
    load = {"num_running": running, "prefill_tokens_outstanding": prefill, "num_waiting": 1}
    decision = pick(replica("a", cached=16 * blocks, **load), replica("b", cached=0, **load))

    assert decision.replica_id == "a" or decision.reason is Reason.TIE
