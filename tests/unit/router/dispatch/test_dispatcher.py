"""Placing of requests: what a replica is told, what counts as sent, who waits."""

import asyncio
from dataclasses import replace

import pytest

from penstock.router.config import GatewayConfig
from penstock.router.routing.policy import replay
from penstock.tenancy.share import Share
from penstock.wire.errors import ContextTooLong
from penstock.wire.frames import split_keys, unpack_token_ids
from tests.unit.router.fleet_fakes import BLOCK_SIZE, Cluster, FakeMember, answer_to, generation, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))


async def test_an_answer_comes_back_whole_with_its_receipt():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].cached_tokens = 8
        stream = await cluster.start(PROMPT)
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)
        receipt = stream.receipt
        assert (receipt.pool, receipt.replica, receipt.reason, receipt.tier, receipt.tier_reason) == (
            "pool",
            "a",
            "only_replica",
            "edge",
            "only_tier",
        )
        assert receipt.cached_tokens == 8
        assert receipt.predicted_ttft_s == receipt.scores["a"] > 0
        assert receipt.basis is not None
        assert replay(receipt.basis.read()).scores == receipt.scores
        assert receipt.attempts == 1
        assert cluster.attempts("first") == 1


async def test_a_submit_carries_the_whole_chain_of_its_prompt():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        submit = cluster.replicas["a"].submits[0]
        keys = split_keys(submit.block_keys)
        stream.close()

        assert unpack_token_ids(submit.packed_token_ids) == PROMPT
        assert len(keys) == len(PROMPT) // BLOCK_SIZE
        assert submit.chain_key == keys[-1]
        assert submit.num_output_tokens == 0


async def test_tenants_with_different_salts_share_no_key():
    async with Cluster(A) as cluster:
        streams = [await cluster.start(PROMPT, salt=salt) for salt in (b"one", b"two", b"one")]
        first, second, third = (set(split_keys(submit.block_keys)) for submit in cluster.replicas["a"].submits)
        for stream in streams:
            stream.close()

        assert not first & second
        assert first == third


async def test_what_has_come_meanwhile_is_read_as_one_delta():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        for _ in range(3):
            cluster.step()
        delta = await stream.next()
        stream.close()

        assert delta.token_ids == answer_to(PROMPT, 3)
        assert delta.num_cached_tokens == 0


async def test_a_burst_is_spread_by_what_was_sent_before_any_load_report():
    async with Cluster(A, B) as cluster:
        streams = [await cluster.start([number] * 30) for number in range(8)]
        counts = [len(replica.submits) for replica in cluster.replicas.values()]
        for stream in streams:
            stream.close()

        assert counts == [4, 4]


async def test_a_load_report_counts_what_it_has_seen_only_once():
    async with Cluster(A) as cluster:
        streams = [await cluster.start([number] * 30) for number in range(3)]
        client = cluster.fleet.ready_clients(["pool"])[0]
        assert client.view(0).unreported == (3, 90, 0)
        cluster.replicas["a"].report(last_sid=2)
        assert client.view(0).unreported == (1, 30, 0)
        cluster.replicas["a"].report(last_sid=0)
        assert client.view(0).unreported == (0, 0, 0)
        for stream in streams:
            stream.close()


async def test_a_report_that_names_no_sid_leaves_the_latest_requests_counted():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        client = cluster.fleet.ready_clients(["pool"])[0]
        cluster.replicas["a"].report(last_sid=0)
        assert client.view(0).unreported.num_sent == 1
        cluster.replicas["a"].report(last_sid=0)
        assert client.view(0).unreported.num_sent == 0
        stream.close()


async def test_a_sequence_that_is_over_no_longer_counts_before_the_next_report():
    async with Cluster(A) as cluster:
        streams = [await cluster.start(PROMPT, max_tokens=tokens) for tokens in (1, 9, 9)]
        cluster.replicas["a"].report()
        late = await cluster.start(PROMPT, max_tokens=1)
        client = cluster.fleet.ready_clients(["pool"])[0]
        assert client.view(0).unreported == (1, 30, 0)
        cluster.step()
        assert client.view(0).unreported == (0, 0, 1)
        streams[1].close()
        assert client.view(0).unreported == (0, 0, 2)
        cluster.replicas["a"].report()
        assert client.view(0).unreported == (0, 0, 0)
        for stream in (*streams, late):
            stream.close()


async def test_without_credit_a_request_waits_and_the_oldest_gets_the_next_place():
    async with Cluster(A, max_inflight=1) as cluster:
        running = await cluster.start(PROMPT)
        waiting = [asyncio.ensure_future(cluster.start(PROMPT, request_id=str(number))) for number in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        running.close()
        stream = await waiting[0]

        assert [submit.request_id for submit in cluster.replicas["a"].submits] == ["r", "0"]
        assert stream.receipt.queued_s > 0
        waiting[1].cancel()
        await asyncio.gather(waiting[1], return_exceptions=True)
        stream.close()


async def test_a_submit_carries_the_seconds_left_of_each_attempt_whatever_the_gateways_clock_says():
    async with Cluster(A, B) as cluster:
        cluster.dispatcher._submitter._now = lambda: 3600.0
        stream = await cluster.start(PROMPT, deadline_in_s=600.0)
        first = cluster.replicas[stream.receipt.replica]
        await asyncio.sleep(0.02)
        first.die()
        await cluster.read(stream)
        stream.close()
        second = cluster.replicas[stream.receipt.replica]
        submits = [first.submits[0], second.submits[-1]]

        assert 500.0 < submits[1].seconds_left <= submits[0].seconds_left - 0.02
        assert submits[0].seconds_left <= 600.0
        assert all(submit.deadline == pytest.approx(3600.0 + submit.seconds_left) for submit in submits)


@pytest.mark.parametrize(("fairness", "weights"), [("vtc", [0.4, 1.0]), ("arrival", [0.0, 0.0])])
async def test_a_submit_carries_class_and_weight_of_its_tenants_requests(fairness, weights):
    async with Cluster(A, config=GatewayConfig(fairness=fairness)) as cluster:
        share = Share(4.0, service_class="batch")
        stream = await cluster.dispatcher.start(replace(generation(PROMPT), share=share))
        other = await cluster.start(PROMPT)
        stream.close()
        other.close()

        assert [submit.service_class for submit in cluster.replicas["a"].submits] == ["batch", "standard"]
        assert [submit.weight for submit in cluster.replicas["a"].submits] == weights


async def test_a_submit_carries_the_part_of_the_cache_that_the_request_may_use():
    async with Cluster(A) as cluster:
        streams = [
            await cluster.dispatcher.start(replace(generation(PROMPT), cache_scope=scope, salt=scope.encode()))
            for scope in ("one", "two")
        ]
        for stream in streams:
            stream.close()

        assert [submit.cache_scope for submit in cluster.replicas["a"].submits] == ["one", "two"]
        assert len({submit.block_keys for submit in cluster.replicas["a"].submits}) == 2


async def test_a_prompt_that_fills_every_context_is_refused_at_once():
    async with Cluster(A, B) as cluster:
        with pytest.raises(ContextTooLong):
            await cluster.start([1] * 1000)


async def test_chains_are_of_the_replicas_block_size():
    small, large = FakeMember("a"), FakeMember("b", block_size=2 * BLOCK_SIZE)
    async with Cluster(small, large) as cluster:
        streams = [await cluster.start(PROMPT) for _ in range(8)]
        for replica in cluster.replicas.values():
            assert {len(submit.block_keys) // 16 for submit in replica.submits} == {
                len(PROMPT) // replica.member.block_size
            }
        for stream in streams:
            stream.close()
