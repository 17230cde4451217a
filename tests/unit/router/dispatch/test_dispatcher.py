import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import PenstockError
from penstock.router.config import GatewayConfig
from penstock.router.dispatch.dispatcher import MAX_ATTEMPTS
from penstock.router.dispatch.shares.counters import cost_of
from penstock.tenancy.share import Share
from penstock.wire.errors import ContextTooLong, DeadlineExceeded, EngineFault, InvalidRequest, Overloaded, ReplicaLost
from penstock.wire.frames import BlockEvents, Delta, Finish, pack_token_ids, split_keys, unpack_token_ids
from tests.unit.router.fleet_fakes import BLOCK_SIZE, Cluster, FakeMember, answer_to, generation, settle

A, B, C = FakeMember("a"), FakeMember("b"), FakeMember("c")
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


async def test_tenants_share_the_blocks_of_a_published_prefix_and_nothing_behind_it():
    async with Cluster(A) as cluster:
        cluster.chains.publish({cluster.members[0].model_digest: [pack_token_ids(PROMPT[:18])]})
        answers = [await cluster.start(PROMPT, salt=salt) for salt in (b"one", b"two")]
        stranger = await cluster.start([7, *PROMPT[1:]], salt=b"three")
        first, second, third = (split_keys(submit.block_keys) for submit in cluster.replicas["a"].submits)
        for answer in (*answers, stranger):
            answer.close()

        num_public = 18 // BLOCK_SIZE
        assert num_public > 0
        assert first[:num_public] == second[:num_public]
        assert not set(first[num_public:]) & set(second[num_public:])
        assert not set(third) & {*first, *second}


async def test_where_tenants_share_nothing_a_published_prefix_is_cached_for_the_tenant_that_used_it_alone():
    async with Cluster(replace(A, has_private_prefixes=True)) as cluster:
        cluster.chains.publish({cluster.members[0].model_digest: [pack_token_ids(PROMPT[:18])]})
        first = await cluster.start(PROMPT, salt=b"one")
        keys = cluster.replicas["a"].submits[0].block_keys
        cluster.replicas["a"].send(events=[BlockEvents(0, stored=keys, is_snapshot=True)])
        await cluster.read(first)
        cluster.replicas["a"].report()
        same = await cluster.start(PROMPT, salt=b"one")
        other = await cluster.start(PROMPT, salt=b"two")

        assert same.receipt.predicted_cached_tokens == len(split_keys(keys)) * BLOCK_SIZE
        assert other.receipt.predicted_cached_tokens == 0
        for answer in (first, same, other):
            answer.close()


async def test_a_published_prefix_is_cached_for_whoever_uses_it_next_and_for_nobody_else():
    async with Cluster(A, B) as cluster:
        cluster.chains.publish({cluster.members[0].model_digest: [pack_token_ids(PROMPT[:18])]})
        first = await cluster.start(PROMPT, salt=b"one")
        holder = first.receipt.replica
        keys = cluster.replicas[holder].submits[0].block_keys
        cluster.replicas[holder].send(events=[BlockEvents(0, stored=keys, is_snapshot=True)])
        await cluster.read(first)
        cluster.replicas[holder].report()
        user = await cluster.start(PROMPT, salt=b"two")
        cluster.chains.publish({})
        other = await cluster.start(PROMPT, salt=b"three")

        assert user.receipt.predicted_cached_tokens == 18 // BLOCK_SIZE * BLOCK_SIZE
        assert other.receipt.predicted_cached_tokens == 0
        for answer in (first, user, other):
            answer.close()


async def test_what_has_come_meanwhile_is_read_as_one_delta():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        for _ in range(3):
            cluster.step()
        delta = await stream.next()
        stream.close()

        assert delta.token_ids == answer_to(PROMPT, 3)
        assert delta.num_cached_tokens == 0


async def test_a_request_goes_where_its_prefix_is():
    async with Cluster(A, B) as cluster:
        first = await cluster.start(PROMPT)
        holder = first.receipt.replica
        keys = cluster.replicas[holder].submits[0].block_keys
        cluster.replicas[holder].send(events=[BlockEvents(0, stored=keys, is_snapshot=True)])
        await cluster.read(first)
        cluster.replicas[holder].report()
        second = await cluster.start([*PROMPT, 1, 2, 3])

        assert second.receipt.replica == holder
        assert second.receipt.reason == "prefix"
        assert second.receipt.predicted_cached_tokens == 28
        first.close()
        second.close()


async def test_a_prompt_counts_as_cached_where_it_was_sent_before_the_replica_says_so():
    async with Cluster(A, B) as cluster:
        for replica in cluster.replicas.values():
            replica.send(events=[BlockEvents(0, is_snapshot=True)])
        first = await cluster.start(PROMPT)
        await cluster.read(first)
        second = await cluster.start(PROMPT)
        first.close()
        second.close()

        assert second.receipt.replica == first.receipt.replica
        assert second.receipt.predicted_cached_tokens == 28


async def test_what_one_tenant_left_in_the_cache_draws_no_other_tenant():
    async with Cluster(A) as cluster:
        first = await cluster.start(PROMPT, salt=b"one")
        cluster.replicas["a"].send(
            events=[BlockEvents(0, stored=cluster.replicas["a"].submits[0].block_keys, is_snapshot=True)]
        )
        second = await cluster.start(PROMPT, salt=b"two")
        first.close()
        second.close()

        assert second.receipt.predicted_cached_tokens == 0


async def test_at_most_all_but_one_token_counts_as_cached():
    async with Cluster(A) as cluster:
        prompt = PROMPT[:8]
        first = await cluster.start(prompt)
        cluster.replicas["a"].send(
            events=[BlockEvents(0, stored=cluster.replicas["a"].submits[0].block_keys, is_snapshot=True)]
        )
        second = await cluster.start(prompt)
        first.close()
        second.close()

        assert second.receipt.predicted_cached_tokens == 4


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


async def test_a_place_goes_to_the_tenant_that_has_had_less_for_its_weight():
    async with Cluster(A, max_inflight=1) as cluster:
        running = await cluster.start(PROMPT, tenant="flooder")
        waiting = [
            asyncio.ensure_future(cluster.start(PROMPT, request_id=f"{tenant}{number}", tenant=tenant, share=share))
            for tenant, share in (("flooder", Share()), ("light", Share()), ("heavyweight", Share(4.0)))
            for number in range(6)
        ]
        await settle()
        for _ in waiting:
            await cluster.read(running)
            running.close()
            await settle()
            running = next(task.result() for task in waiting if task.done() and not task.result().is_closed)
        running.close()

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
        for _ in waiting:
            await cluster.read(running)
            running.close()
            await settle()
            running = next(task.result() for task in waiting if task.done() and not task.result().is_closed)
        running.close()

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


async def test_a_replica_lost_before_the_first_token_is_replaced_unseen():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        first = stream.receipt.replica
        cluster.replicas[first].die()
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)
        assert stream.receipt.replica != first
        assert (stream.receipt.attempts, cluster.attempts("retry")) == (2, 1)


async def test_a_replica_lost_in_the_middle_is_resumed_to_the_token():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        first = stream.receipt.replica
        cluster.step(3)
        head = await stream.next()
        cluster.step(2)  # has come, but nobody has read it when the replica dies
        cluster.replicas[first].die()
        tail = await cluster.read(stream)
        stream.close()

        assert head.token_ids + tail == answer_to(PROMPT, 8)
        submit = cluster.replicas[stream.receipt.replica].submits[-1]
        assert unpack_token_ids(submit.packed_token_ids) == PROMPT + answer_to(PROMPT, 5)
        assert (submit.num_output_tokens, submit.sampling.seed, submit.sampling.max_tokens) == (5, 5, 8)
        whole = cluster.chains.make(next(iter(stream.state.chains.by_kind)), b"salt", submit.packed_token_ids)
        assert (split_keys(submit.block_keys), submit.chain_key) == (whole.keys, whole.parent)
        assert cluster.attempts("resume") == 1


async def test_a_listener_gets_plain_deltas_at_once_and_the_reader_the_rest():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        listened: list[int] = []
        is_taking = True

        def listen(delta):
            if is_taking:
                listened.extend(delta.token_ids)
            return is_taking

        stream.listen(listen)
        cluster.step(3)
        first = (
            await stream.next()
        )  # holds the number of cached tokens: not plain; and so nothing behind it is, until it is read
        cluster.step(2)
        taken = list(listened)
        is_taking = False
        cluster.step(1)
        declined = await stream.next()
        is_taking = True
        tail = await cluster.read(stream)
        stream.close()

        assert first.token_ids + taken + declined.token_ids == answer_to(PROMPT, 6)
        assert (len(first.token_ids), len(taken), len(declined.token_ids)) == (3, 2, 1)
        assert listened[2:] + tail == answer_to(PROMPT, 8)[6:]


async def test_what_a_listener_has_taken_is_part_of_a_resumed_prompt():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        first = stream.receipt.replica
        listened: list[int] = []
        stream.listen(lambda delta: listened.extend(delta.token_ids) is None)
        cluster.step()
        head = await stream.next()
        cluster.step(3)
        cluster.replicas[first].die()
        tail = await cluster.read(stream)
        stream.close()

        submit = cluster.replicas[stream.receipt.replica].submits[-1]
        assert unpack_token_ids(submit.packed_token_ids) == PROMPT + answer_to(PROMPT, 4)
        assert len(listened) >= 3
        assert sorted([*head.token_ids, *listened, *tail]) == sorted(answer_to(PROMPT, 8))


async def test_the_reader_hears_of_cached_tokens_once():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.replicas[stream.receipt.replica].cached_tokens = 4
        cluster.step()
        first = await stream.next()
        cluster.replicas[stream.receipt.replica].die()
        reading = asyncio.ensure_future(stream.next())
        await settle()
        cluster.step()
        second = await reading
        stream.close()

        assert (first.num_cached_tokens, second.num_cached_tokens) == (4, None)
        assert stream.receipt.cached_tokens == 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=MAX_ATTEMPTS - 1),
    st.integers(0, MAX_ATTEMPTS),
    st.integers(1, 12),
)
def test_wherever_replicas_die_the_answer_is_the_same(deaths, unannounced, max_tokens):
    async def main():
        async with Cluster(*[FakeMember(str(number)) for number in range(MAX_ATTEMPTS)]) as cluster:
            stream = await cluster.start(PROMPT, max_tokens=max_tokens)
            tokens: list[int] = []
            reading = asyncio.ensure_future(stream.next())
            is_over = False
            for number, (num_steps, is_read_first) in enumerate(deaths):
                for _ in range(num_steps):
                    cluster.step()
                    if is_read_first:
                        await settle()
                if reading.done():
                    tokens += reading.result().token_ids
                    is_over = reading.result().finish is not None
                    if is_over:
                        break
                    reading = asyncio.ensure_future(stream.next())
                await settle()
                if number != unannounced:  # all but one, since after two losses an answer ends
                    cluster.replicas[stream.receipt.replica].report(is_draining=True)
                cluster.replicas[stream.receipt.replica].die()
                await settle()
            while not is_over:
                await settle()
                if reading.done():
                    tokens += reading.result().token_ids
                    if reading.result().finish is not None:
                        break
                    reading = asyncio.ensure_future(stream.next())
                else:
                    cluster.step()
            stream.close()

            assert tokens == answer_to(PROMPT, max_tokens)

    asyncio.run(main())


async def test_attempts_are_bounded():
    async with Cluster(*[FakeMember(str(number)) for number in range(MAX_ATTEMPTS + 1)]) as cluster:
        stream = await cluster.start(PROMPT)
        reading = asyncio.ensure_future(stream.next())
        for _ in range(MAX_ATTEMPTS):
            await settle()
            cluster.replicas[stream.receipt.replica].report(is_draining=True)
            cluster.replicas[stream.receipt.replica].die()
        with pytest.raises(ReplicaLost):
            await reading
        stream.close()

        assert sum(len(replica.submits) for replica in cluster.replicas.values()) == MAX_ATTEMPTS


async def test_a_resume_that_finds_no_replica_in_time_says_that_the_replica_was_lost():
    async with Cluster(A, config=GatewayConfig(queue_timeout_s=0.01)) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.step()
        await stream.next()
        cluster.replicas["a"].die()
        with pytest.raises(ReplicaLost):
            await stream.next()
        stream.close()


async def test_a_last_token_whose_end_got_lost_ends_the_answer():
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT, max_tokens=2)
        sid = cluster.replicas["a"].submits[0].sid
        cluster.replicas["a"].send(Delta(sid, answer_to(PROMPT, 2)))
        assert (await stream.next()).finish is None
        cluster.replicas["a"].die()
        last = await stream.next()
        stream.close()

        assert (last.token_ids, last.finish) == ([], Finish.LENGTH)


async def test_a_refusal_sends_the_request_elsewhere_and_not_back():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        first = stream.receipt.replica
        cluster.replicas[first].finish(1, Finish.REFUSED)
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)
        assert len(cluster.replicas[first].submits) == 1


async def test_a_request_that_everyone_refuses_fails_at_once():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        reading = asyncio.ensure_future(stream.next())
        for _ in range(2):
            await settle()
            cluster.replicas[stream.receipt.replica].finish(1, Finish.REFUSED)
        with pytest.raises(Overloaded):
            await reading
        stream.close()


async def test_a_request_refused_by_a_draining_replica_waits_for_the_next_one():
    async with Cluster(A, B) as cluster:
        cluster.fleet.update([A])
        stream = await cluster.start(PROMPT)
        reading = asyncio.ensure_future(stream.next())
        cluster.replicas["a"].report(is_draining=True)
        cluster.replicas["a"].finish(1, Finish.REFUSED)
        await settle()
        assert not reading.done()
        cluster.fleet.update([A, B])
        await settle()
        cluster.step()
        await reading

        assert stream.receipt.replica == "b"
        stream.close()


@pytest.mark.parametrize(
    ("finish", "is_charged"), [(Finish.ERROR, True), (Finish.DEADLINE, True), (Finish.INVALID, False)]
)
async def test_a_sequence_that_failed_alone_has_used_its_prompt(finish, is_charged):
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.replicas["a"].finish(1, finish, "it broke")
        with pytest.raises(PenstockError):
            await stream.next()
        stream.close()

        assert stream.receipt.is_taken is is_charged


@pytest.mark.parametrize(
    ("finish", "error"),
    [(Finish.DEADLINE, DeadlineExceeded), (Finish.ERROR, EngineFault), (Finish.INVALID, InvalidRequest)],
)
async def test_an_end_that_is_final_is_raised_behind_the_tokens_before_it(finish, error):
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        replica = cluster.replicas[stream.receipt.replica]
        cluster.step(2)
        replica.finish(1, finish, "it broke")
        delta = await stream.next()

        assert (delta.token_ids, delta.finish) == (answer_to(PROMPT, 2), None)
        for _ in range(2):
            with pytest.raises(error):
                await stream.next()
        stream.close()


async def test_an_abort_that_nobody_asked_for_is_resumed_elsewhere():
    async with Cluster(A, B) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.step(2)
        cluster.replicas[stream.receipt.replica].finish(1, Finish.ABORT)
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)


async def test_a_submit_carries_the_seconds_left_of_each_attempt_whatever_the_gateways_clock_says():
    async with Cluster(A, B) as cluster:
        cluster.dispatcher._submitter._now = lambda: 3600.0
        stream = await cluster.start(PROMPT, deadline_in_s=30.0)
        first = cluster.replicas[stream.receipt.replica]
        await asyncio.sleep(0.02)
        first.die()
        await cluster.read(stream)
        stream.close()
        second = cluster.replicas[stream.receipt.replica]
        submits = [first.submits[0], second.submits[-1]]

        assert 29.0 < submits[1].seconds_left <= submits[0].seconds_left - 0.02
        assert submits[0].seconds_left <= 30.0
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
        for _ in waiting:
            await cluster.read(running)
            running.close()
            await settle()
            running = next(task.result() for task in waiting if task.done() and not task.result().is_closed)
        running.close()

        assert [submit.request_id for submit in cluster.replicas["a"].submits][1:] == order


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


async def test_a_prompt_that_fills_every_context_is_refused_at_once():
    async with Cluster(A, B) as cluster:
        with pytest.raises(ContextTooLong):
            await cluster.start([1] * 1000)


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
