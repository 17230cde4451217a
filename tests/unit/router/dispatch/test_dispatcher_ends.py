"""Ends of answers from this side: deadlines, slow readers, closed and cancelled ones."""

import asyncio
import gc
import weakref

import pytest

from penstock.router.config import GatewayConfig
from penstock.wire.errors import DeadlineExceeded, EngineFault, Overloaded
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, settle

A = FakeMember("a")
PROMPT = list(range(10, 40))


async def test_the_router_keeps_the_deadline_when_the_replica_does_not(monkeypatch):
    # the timer runs out as soon as the request has started, however long starting takes
    monkeypatch.setattr("penstock.router.dispatch.dispatcher.DEADLINE_GRACE_S", -60.0)

    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT, deadline_in_s=60.0)
        with pytest.raises(DeadlineExceeded):
            await stream.next()

        assert cluster.replicas["a"].aborts == [1]
        stream.close()


async def test_a_request_past_its_deadline_is_not_submitted():
    async with Cluster(A) as cluster:
        with pytest.raises(DeadlineExceeded):
            await cluster.start(PROMPT, deadline_in_s=-1.0)

        assert cluster.replicas["a"].submits == []


async def test_a_reader_that_is_too_slow_loses_its_sequence_but_not_what_has_come():
    async with Cluster(A, config=GatewayConfig(max_buffered_deltas=3)) as cluster:
        stream = await cluster.start(PROMPT, max_tokens=100)
        for _ in range(6):
            cluster.step()

        assert cluster.replicas["a"].aborts == [1]
        assert (await stream.next()).token_ids == answer_to(PROMPT, 4)
        with pytest.raises(Overloaded):
            await stream.next()
        assert cluster.metrics.registry.get_sample_value("penstock_slow_clients_total") == 1
        stream.close()


async def test_closing_aborts_what_runs_and_only_once():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        stream.close()
        stream.close()

        assert cluster.replicas["a"].aborts == [1]
        with pytest.raises(RuntimeError):
            await stream.next()


async def test_closing_a_finished_stream_aborts_nothing():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        await cluster.read(stream)
        with pytest.raises(RuntimeError):
            await stream.next()
        unread = await cluster.start(PROMPT, max_tokens=1)
        cluster.step()
        stream.close()
        unread.close()

        assert cluster.replicas["a"].aborts == []


async def test_a_closed_stream_is_held_by_nothing_not_even_its_timer():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        remains = weakref.ref(stream)
        stream.close()
        del stream
        gc.collect()

        assert remains() is None


async def test_a_caller_cancelled_in_the_queue_leaves_nothing():
    async with Cluster(A, max_inflight=0) as cluster:
        waiting = asyncio.ensure_future(cluster.start(PROMPT))
        await settle()
        assert len(cluster.queue) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        cluster.check_empty()
        assert cluster.replicas["a"].submits == []


async def test_a_caller_cancelled_just_as_it_was_placed_leaves_nothing():
    async with Cluster(A, max_inflight=0) as cluster:
        waiting = asyncio.ensure_future(cluster.start(PROMPT))
        await settle()
        cluster.replicas["a"].report(max_inflight=1)  # submits, but its task has not run yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        assert cluster.replicas["a"].aborts == [1]
        cluster.check_empty()


async def test_a_reader_cancelled_between_tokens_leaves_nothing():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        reading = asyncio.ensure_future(stream.next())
        await settle()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        stream.close()

        assert cluster.replicas["a"].aborts == [1]
        cluster.check_empty()


async def test_a_reader_cancelled_while_it_waits_to_be_resumed_leaves_nothing():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        reading = asyncio.ensure_future(stream.next())
        await settle()
        cluster.replicas["a"].die()
        await settle()
        assert len(cluster.queue) == 1
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        stream.close()

        cluster.check_empty()


async def test_a_listener_that_raises_ends_its_own_answer_and_no_other(caplog):
    async with Cluster(A) as cluster:
        broken, healthy = (
            await cluster.start(PROMPT, request_id="broken"),
            await cluster.start(PROMPT, request_id="healthy"),
        )
        cluster.step()
        head = (await healthy.next()).token_ids
        await broken.next()
        listened: list[int] = []

        def fail(_delta):
            raise ValueError("a bug in passing on")

        broken.listen(fail)
        healthy.listen(lambda delta: listened.extend(delta.token_ids) is None)
        cluster.step()
        with pytest.raises(EngineFault):
            await broken.next()
        broken.close()
        tail = await cluster.read(healthy)
        healthy.close()

        assert head + listened + tail == answer_to(PROMPT, 8)
        assert cluster.replicas["a"].aborts == [1]
        assert (cluster.replicas["a"].num_connects, healthy.receipt.attempts) == (1, 1)
    (record,) = [record for record in caplog.records if record.name == "penstock.stream"]
    assert (record.request_id, record.exc_info[0]) == ("broken", ValueError)
