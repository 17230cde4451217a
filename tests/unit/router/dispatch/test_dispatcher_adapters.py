"""Requests with an adapter: where they go, what travels with them, and telling replicas about adapters."""

import asyncio

from penstock.router.replicas.adapter_placement import AdapterPlacement, AdapterPlacer
from penstock.wire.frames import split_keys
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))
ONE, OTHER = "1" * 32, "2" * 32


async def test_a_request_goes_where_its_adapter_is_and_any_request_without_one_does_not_care() -> None:
    async with Cluster(A, B) as cluster:
        cluster.replicas["b"].report(resident_adapters=(ONE,))
        for _ in range(4):
            stream = await cluster.start(PROMPT, adapter=ONE)
            await cluster.read(stream)
            stream.close()

        assert [len(cluster.replicas[name].submits) for name in "ab"] == [0, 4]
        assert stream.receipt.scores["b"] + 0.1 < stream.receipt.scores["a"], "loading it takes a while"
        plain = await cluster.start(list(range(50, 60)))
        assert plain.receipt.scores["a"] == plain.receipt.scores["b"]
        plain.close()


async def test_a_busy_replica_with_the_adapter_is_left_for_an_idle_one_that_must_load_it() -> None:
    async with Cluster(A, B) as cluster:
        cluster.replicas["b"].report(resident_adapters=(ONE,), num_waiting=4, prefill_tokens_outstanding=3000)

        stream = await cluster.start(PROMPT, adapter=ONE)

        assert stream.receipt.replica == "a"
        stream.close()


async def test_requests_that_would_wait_for_an_adapter_wait_in_the_gateway_and_hold_up_nobody() -> None:
    async with Cluster(A, max_inflight=8) as cluster:
        many = [
            asyncio.ensure_future(cluster.start([number] * 9, adapter=f"{number:032}", tenant="many"))
            for number in range(5)
        ]
        await settle()
        assert [task.done() for task in many] == [True, True, False, False, False], "a quarter of the credit"
        other = await cluster.start(PROMPT, adapter=OTHER, tenant="other")
        plain = await cluster.start(PROMPT, tenant="many")
        cluster.step()  # the first two have their adapters, and a place more of the engine
        await settle()

        assert [task.done() for task in many] == [True] * 4 + [False]
        many[0].result().close()
        await settle()
        for stream in (other, plain, *[await task for task in many[1:4]]):
            stream.close()
        (await many[4]).close()


async def test_a_resident_adapter_is_never_waited_for() -> None:
    async with Cluster(A, max_inflight=8) as cluster:
        cluster.replicas["a"].report(resident_adapters=(ONE,))
        streams = [await cluster.start([number] * 9, adapter=ONE, tenant="many") for number in range(8)]
        for stream in streams:
            stream.close()


async def test_the_adapter_travels_with_the_sequence_and_no_key_is_anothers() -> None:
    async with Cluster(A, max_inflight=16) as cluster:
        streams = [await cluster.start(PROMPT, adapter=adapter) for adapter in (None, ONE, OTHER, ONE)]
        submits = cluster.replicas["a"].submits
        for stream in streams:
            stream.close()

        assert [submit.adapter for submit in submits] == [None, ONE, OTHER, ONE]
        base, one, other, again = (set(split_keys(submit.block_keys)) for submit in submits)
        assert not base & one
        assert not one & other
        assert not base & other
        assert one == again


async def test_an_answer_that_goes_on_elsewhere_keeps_its_adapter() -> None:
    async with Cluster(A, B) as cluster:
        cluster.replicas["a"].report(resident_adapters=(ONE,))
        stream = await cluster.start(PROMPT, adapter=ONE)
        cluster.step(3)
        first = await stream.next()
        cluster.replicas["a"].die()

        rest = await cluster.read(stream)
        stream.close()

        assert first.token_ids + rest == answer_to(PROMPT, 8)
        assert [submit.adapter for submit in cluster.replicas["b"].submits] == [ONE]


async def test_the_adapter_of_a_request_in_the_queue_is_loaded_meanwhile_where_there_is_the_least_to_do() -> None:
    async with Cluster(A, B, max_inflight=1) as cluster:
        cluster.replicas["a"].report(num_running=3)
        full = [await cluster.start([number] * 9) for number in range(2)]
        waiting = [
            asyncio.ensure_future(cluster.start(PROMPT, adapter=adapter, tenant="t")) for adapter in (ONE, ONE, OTHER)
        ]
        await settle()

        assert not any(task.done() for task in waiting)
        assert [cluster.replicas[name].adapter_ops for name in "ab"] == [
            [],
            [("load for t", ONE), ("load for t", OTHER)],
        ]
        for task in waiting:
            task.cancel()
        for stream in full:
            stream.close()


async def test_an_adapter_that_a_replica_has_is_not_loaded_elsewhere_for_a_request_in_the_queue() -> None:
    async with Cluster(A, B, max_inflight=1) as cluster:
        cluster.replicas["b"].report(resident_adapters=(ONE,))
        full = [await cluster.start([number] * 9) for number in range(2)]
        waiting = asyncio.ensure_future(cluster.start(PROMPT, adapter=ONE))
        await settle()

        assert not waiting.done()
        assert [cluster.replicas[name].adapter_ops for name in "ab"] == [[], []]
        waiting.cancel()
        for stream in full:
            stream.close()


async def test_every_replica_is_asked_to_load_and_the_wait_ends_when_each_has_or_could_not() -> None:
    async with Cluster(A, B) as cluster:
        placer = AdapterPlacer(cluster.fleet.ready_clients)
        loading = asyncio.create_task(placer.load(["pool"], ONE, "tenant", timeout_s=10))
        await settle()
        assert [cluster.replicas[name].adapter_ops for name in "ab"] == [[("load", ONE)]] * 2
        cluster.replicas["a"].report(resident_adapters=(ONE,))
        cluster.replicas["b"].report(failed_adapters=((ONE, "an older failure"),))
        await settle()
        assert not loading.done()
        cluster.replicas["b"].report(failed_adapters=((ONE, "It does not fit."),))

        assert await loading == AdapterPlacement(live=2, where=("a",), error="It does not fit.", num_failed=1)


async def test_a_replica_that_does_not_answer_is_waited_for_only_so_long() -> None:
    async with Cluster(A) as cluster:
        placer = AdapterPlacer(cluster.fleet.ready_clients)

        assert await placer.load(["pool"], ONE, "tenant", timeout_s=0.02) == AdapterPlacement(
            live=1, where=(), error=None
        )


async def test_replicas_are_told_to_drop_what_is_deleted() -> None:
    async with Cluster(A, B) as cluster:
        AdapterPlacer(cluster.fleet.ready_clients).drop(["pool"], ONE)

        assert [cluster.replicas[name].adapter_ops for name in "ab"] == [[("drop", ONE)]] * 2
