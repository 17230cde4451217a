"""Fair shares of tenants: who gets the next place, and what an answer is charged."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.router.config import GatewayConfig
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.shares.counters import cost_of
from penstock.router.replicas.routing_policy import RoutingPolicy, production
from penstock.tenancy.share import Share
from penstock.wire.frames import Finish
from penstock.wire.targets import ClassTargets, Target
from tests.unit.router.fleet_fakes import Cluster, FakeMember, generation, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))


async def end_one_by_one(cluster: Cluster, running: Mailbox, waiting: Sequence[asyncio.Future[Mailbox]]) -> None:
    """End what runs at the only place, and whatever gets it next, until nothing waits."""
    for _ in waiting:
        await cluster.read(running)
        running.close()
        await settle()
        running = next(task.result() for task in waiting if task.done() and not task.result().is_closed)
    running.close()


async def test_a_place_goes_to_the_tenant_that_has_had_less_for_its_weight():
    async with Cluster(A, max_inflight=1) as cluster:
        running = await cluster.start(PROMPT, tenant="flooder")
        waiting = [
            asyncio.ensure_future(cluster.start(PROMPT, request_id=f"{tenant}{number}", tenant=tenant, share=share))
            for tenant, share in (("flooder", Share()), ("light", Share()), ("heavyweight", Share(4.0)))
            for number in range(6)
        ]
        await settle()
        await end_one_by_one(cluster, running, waiting)

        placed = [submit.request_id for submit in cluster.replicas["a"].submits]
        first = [name[:-1] for name in placed[1:10]]
        assert first.count("heavyweight") >= 5
        assert abs(first.count("light") - first.count("flooder")) <= 1
        for tenant in ("flooder", "light", "heavyweight"):
            assert [name for name in placed if name.startswith(tenant)] == [f"{tenant}{n}" for n in range(6)]


async def test_a_tenants_own_requests_go_before_the_lines_of_its_batches():
    async with Cluster(A, max_inflight=1) as cluster:
        lines = Share().for_lines()
        running = await cluster.start(PROMPT, request_id="first-line", tenant="acme", share=lines)
        waiting = [
            asyncio.ensure_future(cluster.start(PROMPT, request_id=name, tenant="acme", share=share))
            for name, share in (("line-0", lines), ("line-1", lines), ("own-0", Share()), ("own-1", Share()))
        ]
        await settle()
        await end_one_by_one(cluster, running, waiting)

        placed = [submit.request_id for submit in cluster.replicas["a"].submits]
        assert placed == ["first-line", "own-0", "own-1", "line-0", "line-1"]
        assert {submit.tenant for submit in cluster.replicas["a"].submits} == {"acme"}


async def test_a_tenant_with_its_share_leaves_the_last_place_free_for_others():
    async with Cluster(A, max_inflight=8, config=GatewayConfig(reserved_places=0.05)) as cluster:
        light = await cluster.start(PROMPT, tenant="light")
        flood = [asyncio.ensure_future(cluster.start([number] * 9, tenant="flooder")) for number in range(8)]
        await settle()
        assert [task.done() for task in flood] == [True] * 6 + [False] * 2
        second = await cluster.start(PROMPT, tenant="light")
        cluster.replicas["a"].report()
        await settle()
        assert not flood[6].done()
        light.close()
        second.close()
        cluster.replicas["a"].report()
        await settle()
        assert [task.done() for task in flood] == [True] * 7 + [False]
        for task in flood[:7]:
            task.result().close()
        (await flood[7]).close()


async def test_a_tenant_below_its_share_is_placed_where_no_place_is_free():
    async with Cluster(A, max_inflight=8, config=GatewayConfig(reserved_places=0.05)) as cluster:
        flood = [await cluster.start([number] * 9, tenant="flooder") for number in range(8)]
        more = asyncio.ensure_future(cluster.start(PROMPT, tenant="flooder"))
        await settle()
        cluster.replicas["a"].report(num_running=8)
        light = await cluster.start(PROMPT, tenant="light")
        await settle()

        assert not more.done()
        more.cancel()
        await asyncio.gather(more, return_exceptions=True)
        for stream in (light, *flood):
            stream.close()


async def test_first_come_first_served_where_the_configuration_says_so():
    async with Cluster(A, max_inflight=1, config=GatewayConfig(fairness="arrival")) as cluster:
        running = await cluster.start(PROMPT, tenant="flooder")
        tenants = ["flooder", "flooder", "light"]
        waiting = [
            asyncio.ensure_future(cluster.start(PROMPT, request_id=str(number), tenant=tenant))
            for number, tenant in enumerate(tenants)
        ]
        for task in waiting:
            await settle()
            running.close()
            running = await task
        running.close()

        assert [submit.request_id for submit in cluster.replicas["a"].submits] == ["r", "0", "1", "2"]


async def test_a_tenant_is_charged_what_was_computed():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].cached_tokens = 8
        stream = await cluster.start(PROMPT, max_tokens=5, tenant="one", share=Share(2.0))
        assert cluster.counters.counter("one") == cost_of(30, 0, 5) / 2
        await cluster.read(stream)

        assert cluster.counters.counter("one") == pytest.approx(cost_of(30, 8, 5) / 2)
        stream.close()


async def test_an_answer_that_comes_in_one_piece_is_charged_less_what_was_cached():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].cached_tokens = 8
        stream = await cluster.start(PROMPT, max_tokens=5, tenant="one")
        cluster.step(5)

        assert cluster.counters.counter("one") == pytest.approx(cost_of(30, 8, 5))
        stream.close()


async def test_a_request_whose_reader_leaves_is_charged_its_prompt_and_what_had_come():
    async with Cluster(A) as cluster:
        unread = await cluster.start(PROMPT, tenant="unread")
        cluster.step(3)
        unread.close()
        gone = await cluster.start(PROMPT, tenant="gone")
        gone.close()

        assert cluster.counters.counter("unread") == cost_of(30, 0, 3)
        assert cluster.counters.counter("gone") == cluster.counters.counter("unread") + cost_of(30, 0, 0)


async def test_what_the_replica_said_of_its_cache_counts_though_the_reader_leaves_before_it_reads_it():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].cached_tokens = 8
        stream = await cluster.start(PROMPT, tenant="one")
        cluster.step()
        stream.close()

        assert cluster.counters.counter("one") == pytest.approx(cost_of(30, 8, 1))


async def test_what_is_aborted_for_a_slow_reader_is_under_way_no_more():
    async with Cluster(A, config=GatewayConfig(max_buffered_deltas=3)) as cluster:
        stream = await cluster.start(PROMPT, max_tokens=100, tenant="one")
        for _ in range(4):
            cluster.step()

        assert cluster.replicas["a"].aborts == [1]
        assert cluster.charges.num_live("one") == 0
        assert cluster.counters.counter("one") == cost_of(30, 0, 4)
        stream.close()


async def test_output_beyond_what_was_expected_is_charged_while_it_comes():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT, max_tokens=500, tenant="one")
        cluster.step(200)
        await stream.next()
        cluster.charges.correct()

        assert cluster.counters.counter("one") == cost_of(30, 0, 200)
        stream.close()


async def test_a_refusal_costs_nothing():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT, tenant="one")
        cluster.replicas["a"].finish(1, Finish.REFUSED)

        assert cluster.counters.counter("one") == 0.0
        stream.close()


async def test_an_answer_that_goes_on_elsewhere_is_charged_what_is_computed_again():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT, tenant="one")
        cluster.step(3)
        await stream.next()
        cluster.replicas[stream.receipt.replica].die()
        await cluster.read(stream)

        assert cluster.counters.counter("one") == cost_of(30, 0, 3) + cost_of(33, 0, 5)
        stream.close()


async def test_a_finished_sequence_frees_its_place_before_the_reader_takes_its_end():
    async with Cluster(A, max_inflight=1) as cluster:
        running = await cluster.start(PROMPT, max_tokens=1)
        waiting = asyncio.ensure_future(cluster.start(PROMPT))
        await settle()
        cluster.step()
        stream = await waiting
        running.close()
        stream.close()


@pytest.mark.parametrize(("fairness", "order"), [("vtc", ["second", "first"]), ("arrival", ["first", "second"])])
async def test_a_tenants_own_requests_are_placed_by_their_priority(fairness, order):
    async with Cluster(A, max_inflight=1, config=GatewayConfig(fairness=fairness)) as cluster:
        running = await cluster.start(PROMPT)
        waiting = [
            asyncio.ensure_future(
                cluster.dispatcher.start(replace(generation(PROMPT), request_id=name, priority=priority))
            )
            for name, priority in (("first", 5), ("second", -5))
        ]
        await settle()
        await end_one_by_one(cluster, running, waiting)

        assert [submit.request_id for submit in cluster.replicas["a"].submits][1:] == order


@pytest.mark.parametrize(
    ("overdue", "expected"), [("in_turn", ["old-0", "old-1", "new"]), ("last", ["new", "old-0", "old-1"])]
)
async def test_who_can_be_in_time_goes_before_who_is_overdue_where_that_is_wanted(overdue: str, expected: list[str]):
    config, now = GatewayConfig(ttft_target_s=1.0, overdue=overdue), 0.0
    async with Cluster(A, max_inflight=1, config=config, clock=lambda: now) as cluster:
        running = await cluster.start(PROMPT, request_id="first", tenant="acme")
        waiting = [asyncio.ensure_future(cluster.start(PROMPT, request_id=f"old-{n}", tenant="acme")) for n in (0, 1)]
        await settle()
        now = 5.0
        waiting.append(asyncio.ensure_future(cluster.start(PROMPT, request_id="new", tenant="acme")))
        await settle()
        await end_one_by_one(cluster, running, waiting)

        assert [submit.request_id for submit in cluster.replicas["a"].submits] == ["first", *expected]


async def test_who_is_overdue_is_told_by_the_target_of_its_class():
    config, now = GatewayConfig(ttft_target_s=1.0, overdue="last"), 0.0
    async with Cluster(A, max_inflight=1, config=config, clock=lambda: now) as cluster:
        running = await cluster.start(PROMPT, request_id="first", tenant="acme")
        patient = replace(generation(PROMPT, request_id="patient", tenant="acme"), ttft_target_s=60.0)
        waiting = [asyncio.ensure_future(cluster.dispatcher.start(patient))]
        await settle()
        now = 5.0
        waiting.append(asyncio.ensure_future(cluster.start(PROMPT, request_id="new", tenant="acme")))
        await settle()
        await end_one_by_one(cluster, running, waiting)

        assert [submit.request_id for submit in cluster.replicas["a"].submits] == ["first", "patient", "new"]


async def test_a_request_that_was_placed_before_is_never_overdue():
    config, now = GatewayConfig(ttft_target_s=1.0, overdue="last"), 0.0
    members = FakeMember("a"), FakeMember("b")
    async with Cluster(*members, config=config, max_inflight=1, clock=lambda: now) as cluster:
        streams = [await cluster.start(PROMPT, request_id=f"{number}", tenant="acme") for number in range(2)]
        lost, kept = sorted(streams, key=lambda stream: stream.receipt.replica)
        now = 5.0
        cluster.replicas["a"].die()
        reading = asyncio.ensure_future(lost.next())
        newcomer = asyncio.ensure_future(cluster.start(PROMPT, request_id="new", tenant="acme"))
        await settle()
        await cluster.read(kept)
        kept.close()
        await settle()

        last = cluster.replicas["b"].submits[-1].request_id
        reading.cancel()
        lost.close()
        (await newcomer).close()
        assert last == streams[streams.index(lost)].receipt.request_id


@pytest.mark.parametrize(("tpot_s", "chosen"), [(0.05, "a"), (None, "b")])
@pytest.mark.parametrize("policy", [None, production(Random(0))])
async def test_a_request_to_which_batch_rows_yield_goes_where_they_have_all_places(
    tpot_s: float | None, chosen: str, policy: RoutingPolicy | None
) -> None:
    targets = ClassTargets(interactive=Target(tpot_s=tpot_s))
    async with Cluster(A, B, max_inflight=8, targets=targets, routing=policy) as cluster:
        batch = [
            await cluster.start(PROMPT, request_id=f"batch{number}", tenant="batch", share=Share(1.0, "batch"))
            for number in range(8)
        ]
        at_a = len(cluster.replicas["a"].submits)
        cluster.replicas["a"].max_inflight = at_a
        cluster.replicas["a"].report()
        cluster.replicas["b"].report(num_running=60, prefill_tokens_outstanding=5000)
        mailbox = await cluster.start(PROMPT, request_id="urgent", tenant="urgent", share=Share(1.0, "interactive"))

        assert cluster.replicas[chosen].submits[-1].request_id == "urgent"
        for each in (*batch, mailbox):
            each.close()
