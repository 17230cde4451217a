"""The choice among many replicas against the choice from views, which is its oracle."""

import os
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from penstock.perf.many import Request
from penstock.perf.model import scale_costs
from penstock.router.routing.native.build import load_library
from penstock.router.routing.native_search import NativeSearch
from penstock.router.routing.policy import (
    Decision,
    Reason,
    ReplicaView,
    UnreportedWork,
    Wait,
    choose,
    find_tied,
    replay,
    score_again,
)
from penstock.router.routing.replica_table import PoolQuery, ReplicaTable
from penstock.router.routing.search import Search, search
from penstock.wire.frames import Load, Stairs, StepCosts

COSTS = StepCosts(base_s=0.004, row_s=0.0004, prefill_token_s=1e-5, attention_s=1e-9, kv_token_s=1e-7, knee_s=0.005)
STAIRS = Stairs(16, 128, 0.012, ((16, 0.001), (32, 0.002), (128, 0.003)))
BLOCK = 16


@pytest.fixture(params=["arrays", "C++"])
def searching(request: pytest.FixtureRequest) -> Search:
    """The choice in arrays, and in C++."""
    if request.param == "arrays":
        return search
    library = load_library()
    if library is None:
        pytest.skip("the choice in C++ can't be built here")
    return NativeSearch(library)


def draw_view(random: Random, number: int, num_tokens: int, pool: str, *, has_stairs: bool) -> ReplicaView:
    pace = random.choice((1.0, 1.0, 1.0, random.uniform(0.9, 1.1), random.choice((0.5, 2.0))))
    costs = COSTS if not has_stairs else StepCosts(*(getattr(COSTS, n) for n in COSTS.__struct_fields__[:-1]), STAIRS)
    running = random.choice((0, random.randrange(33)))
    rows = Random(1000 * num_tokens + number)
    inflight, credit = random.randrange(33), random.choice((16, 32, 32, 32))
    load = Load(
        "epoch",
        0,
        max_inflight=credit,
        num_running=running,
        num_waiting=random.choice((0, 0, random.randrange(12))),
        prefill_tokens_outstanding=random.choice((0, random.randrange(8000))),
        kv_tokens=running * random.randrange(1, 3000),
        free_blocks=random.choice((10_000, random.randrange(100))),
        total_blocks=10_000,
        costs=scale_costs(costs, pace),
        max_batched_tokens=random.choice((512, 2048)),
        is_draining=random.random() < 0.05,
        num_sampled=random.randrange(4),
        max_running=rows.choice((0, 32, 64)),
        row_hold_s=rows.choice((0.0, rows.uniform(0.1, 20.0))),
    )
    sent = random.choice((0, 0, random.randrange(4)))
    unreported = UnreportedWork(sent, sent * 300, random.choice((0, random.randrange(3))))
    held = random.choice((0, 0, random.randrange(num_tokens) // BLOCK * BLOCK))
    return ReplicaView(
        f"{pool}-{number}",
        pool,
        load,
        unreported,
        inflight,
        BLOCK,
        random.choice((8192, 8192, 1000)),
        held,
        random.choice((0.0, 0.0, 0.2)),
        random.random() < 0.1,
    )


def make_queries(views: Sequence[ReplicaView]) -> list[PoolQuery]:
    """Tables of the views' pools, with rows of replicas besides that are not ready."""
    queries = []
    for pool in dict.fromkeys(view.pool for view in views):
        members = [view for view in views if view.pool == pool]
        table = ReplicaTable(pool, ["closed", *(view.replica_id for view in members), "never ready"])
        table.write(0, members[0])
        table.close(0)
        for row, view in enumerate(members, 1):
            table.write(row, view._replace(load=members[0].load, num_inflight=1))  # what was there before is replaced
            table.write(row, view)
        queries.append(
            PoolQuery(
                table,
                column(members, "cached_tokens"),
                any(view.cached_tokens for view in members),
                None,
                column(members, "adapter_load_s"),
                column(members, "lacks_adapter_slot") > 0,
            )
        )
    return queries


def column(views: Sequence[ReplicaView], name: str) -> np.ndarray:
    return np.array([0.0, *(getattr(view, name) for view in views), 0.0])


def draw_case(seed: int, most: int = 40) -> tuple[list[ReplicaView], Request]:
    random = Random(seed)
    num_tokens = random.randrange(1, 3000)
    pools = random.choice((["pool"], ["pool"], ["pool", "other"]))
    size, has_stairs = random.randrange(1, most), random.random() < 0.5
    views = [
        draw_view(random, number, num_tokens, pool, has_stairs=has_stairs) for pool in pools for number in range(size)
    ]
    if random.random() < 0.15:  # nobody has room
        views = [view._replace(num_inflight=40, lacks_adapter_slot=random.random() < 0.3) for view in views]
    if random.random() < 0.1:  # all alike, but for this router's requests
        alike = next((view for view in views if not view.load.is_draining), views[0])
        views = [alike._replace(replica_id=view.replica_id, num_inflight=random.randrange(8)) for view in views]
    return views, Request(num_tokens, random.choice((1.0, 40.0, 600.0)), random.choice((0, 0, 0, 200)))


MANY = 10_000 if os.environ.get("PENSTOCK_TEST_FULL") else 2_000


def cost_of(decision: Decision, replica_id: str) -> float:
    assert decision.basis is not None
    basis = decision.basis.read()
    compared = next(each for each in basis.compared if each.replica_id == replica_id)
    return score_again(basis, compared).cost_s


@pytest.mark.parametrize("may_overdraw", [False, True])
@pytest.mark.parametrize("num_cases", [150, pytest.param(MANY, marks=pytest.mark.slow)])
def test_the_choice_among_many_is_the_choice_from_views(searching: Search, may_overdraw: bool, num_cases: int) -> None:
    num_equal, seen = 0, set[object]()
    for seed in range(num_cases):
        views, request = draw_case(seed)
        wanted = choose(
            request.num_tokens,
            request.expected_output_tokens,
            [view._replace(may_overdraw=may_overdraw) for view in views],
            Random(seed),
            request.scored_tokens,
        )
        found = searching(make_queries(views), request, Random(seed), may_overdraw=may_overdraw)

        seen.add(wanted.reason)
        num_equal += (found.replica_id, found.reason) == (wanted.replica_id, wanted.reason)
        if wanted.replica_id is None or found.replica_id is None:
            assert found == wanted
            continue
        assert cost_of(wanted, found.replica_id) <= cost_of(wanted, wanted.replica_id) * 1.03 + 0.001
        for replica_id, ttft_s in found.scores.items():
            assert ttft_s == pytest.approx(wanted.scores[replica_id], rel=1e-9)
            if searching is not search and views[0].load.costs.stairs is None:
                assert ttft_s == wanted.scores[replica_id], "in C++ to the last bit"
    assert num_equal >= 0.999 * num_cases
    assert num_equal == num_cases or searching is search
    assert seen >= {*Reason, Wait.NO_CREDIT, Wait.NO_ADAPTER_SLOT} or may_overdraw


@pytest.mark.parametrize("is_search", [False, True])
def test_a_decision_is_made_again_from_its_basis(searching: Search, is_search: bool) -> None:
    num_drawn = 0
    for seed in range(150):
        views, request = draw_case(seed)
        if is_search:
            queries = make_queries(views)
            decision = searching(queries, request, Random(seed))
        else:
            decision = choose(*request[:2], views, Random(seed), request.scored_tokens)
        if decision.basis is None:
            continue
        if is_search:
            for query in queries:  # what changes later changes nothing that was decided
                query.table.write(1, views[0]._replace(num_inflight=0))
                query.cached_tokens[:] = 7
        basis = decision.basis.read()
        again = replay(basis)

        assert (again.replica_id, again.reason) == (decision.replica_id, decision.reason)
        assert again.predicted_ttft_s == pytest.approx(decision.predicted_ttft_s, rel=1e-9)
        assert again.cached_tokens == decision.cached_tokens
        assert again.scores == pytest.approx(decision.scores, rel=1e-9)
        scores = [score_again(basis, each) for each in basis.compared]
        cheap = {basis.compared[place].replica_id for place in find_tied(scores)}
        assert set(basis.drawn or [decision.replica_id]) <= cheap
        num_drawn += basis.drawn is not None
    assert num_drawn > 10


def test_a_replica_that_is_not_allowed_is_left_out(searching: Search) -> None:
    views = [draw_view(Random(7), number, 100, "pool", has_stairs=False) for number in range(3)]
    views = [view._replace(load=views[0].load, num_inflight=0, lacks_adapter_slot=False) for view in views]
    (query,) = make_queries(views)
    allowed = np.array([True, False, False, True, True])

    found = searching([query._replace(is_allowed=allowed)], Request(100, 10.0), Random(0))
    none = searching([query._replace(is_allowed=np.zeros(5, dtype=bool))], Request(100, 10.0), Random(0))

    assert (found.replica_id, found.reason) == ("pool-2", Reason.ONLY_REPLICA)
    assert none == Decision(None, Wait.NO_REPLICA)


def test_places_are_counted_where_replicas_are_ready() -> None:
    views, _ = draw_case(3)
    credits = [(view.load.max_inflight, view.num_inflight) for view in views]

    counts = [query.table.count_places() for query in make_queries(views)]

    assert sum(free for free, _ in counts) == sum(max(0, most - used) for most, used in credits)
    assert sum(places for _, places in counts) == sum(max(most, used) for most, used in credits)
