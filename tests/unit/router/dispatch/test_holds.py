"""Requests for a pool that has no replica and gets one when a request comes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.providers.provider import _Call
from penstock.router.routing.request import Route
from penstock.wire.errors import DeadlineExceeded, Overloaded, RateLimited
from tests.unit.router.fleet_fakes import Cluster, FakeMember, FakeReplica, generation, settle

A = FakeMember("a", "pool")
CLOUD = FakeMember("c", "cloud")
SHORT = GatewayConfig(queue_timeout_s=0.01)
"""A request that waits like any other is refused at once."""


class RecordedHold:
    """What a listener was told."""

    def __init__(self) -> None:
        self.num_held = 0
        self.ready_in_s: list[float | None] = []

    def begin_hold(self, ready_in_s: Callable[[], float | None]) -> None:
        self.num_held += 1
        self.ready_in_s.append(ready_in_s())

    def end_hold(self) -> None:
        self.num_held -= 1


def begin(cluster: Cluster, recorded: RecordedHold | None = None, **changes: object) -> "asyncio.Task[Mailbox]":
    made = generation([1, 2, 3], **changes)  # type: ignore[arg-type]
    return asyncio.create_task(cluster.dispatcher.start(made, recorded))


async def test_a_request_is_held_until_the_first_replica_is_there() -> None:
    async with Cluster(config=SHORT, on_demand=["pool"]) as cluster:
        cluster.replicas["a"] = FakeReplica(A, 8)
        cluster.ready_in_s, recorded = 12.5, RecordedHold()
        task = begin(cluster, recorded)
        await asyncio.sleep(5 * SHORT.queue_timeout_s)
        was_held, num_waiting = recorded.num_held, cluster.queue.num_waiting("pool")
        cluster.fleet.update([A])
        stream = await task
        tokens = await cluster.read(stream)

    assert (was_held, num_waiting) == (1, 1)
    assert recorded.ready_in_s == [12.5]
    assert recorded.num_held == 0
    assert len(tokens) == 8


async def test_where_no_replica_comes_on_demand_nothing_is_held() -> None:
    async with Cluster(config=SHORT) as cluster:
        recorded = RecordedHold()
        with pytest.raises(Overloaded):
            await begin(cluster, recorded)

    assert recorded.ready_in_s == []


async def test_a_request_that_waits_for_a_busy_replica_is_not_held() -> None:
    async with Cluster(A, config=SHORT, max_inflight=0, on_demand=["pool"]) as cluster:
        recorded = RecordedHold()
        with pytest.raises(Overloaded):
            await begin(cluster, recorded)

    assert recorded.ready_in_s == []


@pytest.mark.parametrize(("ready_in_s", "retry_after_s"), [(None, 10.0), (42.0, 42.0), (900.0, 60.0), (0.0, 10.0)])
async def test_a_tenant_with_as_many_held_as_may_is_refused_and_others_are_not(
    ready_in_s: float | None, retry_after_s: float
) -> None:
    async with Cluster(config=GatewayConfig(max_held=2), on_demand=["pool"]) as cluster:
        cluster.ready_in_s = ready_in_s
        held = [begin(cluster, request_id=str(number), tenant=tenant) for number, tenant in enumerate("aab")]
        await settle()
        with pytest.raises(
            RateLimited, match=r"No replica of this model runs yet.* 2 requests of this tenant"
        ) as found:
            await begin(cluster, tenant="a")
        num_waiting, num_unheld = len(cluster.queue), cluster.queue.num_unheld
        for task in held:
            task.cancel()
        await asyncio.wait(held)

        assert found.value.retry_after_s is not None
        assert retry_after_s < found.value.retry_after_s <= 1.25 * retry_after_s
        assert (num_waiting, num_unheld) == (3, 0)
        assert len(cluster.dispatcher._holds) == 0, "a client that hangs up leaves no trace"


async def test_all_tenants_together_have_half_as_many_held_as_the_queue_takes() -> None:
    async with Cluster(config=GatewayConfig(max_queue=4), on_demand=["pool"]) as cluster:
        held = [begin(cluster, request_id=tenant, tenant=tenant) for tenant in "ab"]
        await settle()
        with pytest.raises(Overloaded, match="2 requests wait for first replicas already") as found:
            await begin(cluster, tenant="c")
        for task in held:
            task.cancel()
        await asyncio.wait(held)

        assert found.value.retry_after_s is not None
        assert found.value.retry_after_s > 10.0


@pytest.mark.parametrize("is_open", [False, True])
async def test_where_a_provider_may_take_it_a_request_waits_like_any_other(is_open: bool) -> None:
    up = ProviderConfig(name="up", base_url="http://127.0.0.1:9/v1", model="m", served_names=("m",), max_concurrency=1)
    recorded = RecordedHold()
    async with Cluster(config=SHORT, providers=[up], on_demand=["pool"]) as cluster:
        provider = cluster.providers.by_name["up"]
        routes = (Route("edge", ("pool",)), Route("cloud", (), provider="up"))
        wanted = replace(generation([1, 2, 3], pools=("pool", "up")), routes=routes)
        provider._calls[0] = cast(_Call, None)  # it is full
        if is_open:
            provider._breaker.pause(provider._clock(), 60.0)
        task = asyncio.create_task(cluster.dispatcher.start(wanted, recorded))
        await asyncio.wait([task], timeout=10 * SHORT.queue_timeout_s if is_open else 10)
        was_done = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        provider._calls.clear()

    assert was_done != is_open
    assert len(recorded.ready_in_s) == is_open


async def test_a_replica_that_is_about_to_leave_does_not_keep_a_request_from_being_held() -> None:
    async with Cluster(A, config=SHORT, on_demand=["pool"]) as cluster:
        cluster.replicas["a"].report(is_draining=True)
        recorded = RecordedHold()
        task = begin(cluster, recorded)
        await asyncio.sleep(5 * SHORT.queue_timeout_s)
        was_held = recorded.num_held
        task.cancel()
        await asyncio.wait([task])

    assert was_held == 1


async def test_an_answer_that_loses_the_only_replica_is_held_again_and_its_listener_told() -> None:
    async with Cluster(A, config=SHORT, on_demand=["pool"]) as cluster:
        recorded = RecordedHold()
        stream = await begin(cluster, recorded)
        cluster.replicas["a"].step()
        await stream.next()
        cluster.replicas["a"].die()
        reading = asyncio.ensure_future(stream.next())
        await settle()
        was_held = recorded.num_held
        reading.cancel()
        await asyncio.wait([reading])
        stream.close()

    assert was_held == 1
    assert recorded.num_held == 0


async def test_a_hold_ends_with_its_timeout_or_the_deadline() -> None:
    async with Cluster(config=GatewayConfig(hold_timeout_s=0.05), on_demand=["pool"]) as cluster:
        with pytest.raises(Overloaded, match=r"within 0\.05 s"):
            await begin(cluster)
        with pytest.raises(DeadlineExceeded):
            await begin(cluster, deadline_in_s=0.01)


async def test_another_tier_answers_meanwhile_and_the_pool_is_asked_for_all_the_same() -> None:
    async with Cluster(CLOUD, on_demand=["edge"]) as cluster:
        routes = (Route("edge", ("edge",)), Route("cloud", ("cloud",)))
        wanted = replace(generation([1, 2, 3], pools=("edge", "cloud")), routes=routes)
        stream = await cluster.dispatcher.start(wanted)
        await cluster.read(stream)

    assert stream.receipt.pool == "cloud"
    assert cluster.fleet.traffic["edge"].to_wire().num_passed == 1
    assert cluster.fleet.traffic["cloud"].to_wire().num_passed == 0
