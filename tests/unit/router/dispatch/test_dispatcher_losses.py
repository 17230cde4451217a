"""Replicas that are lost, refuse or fail in the middle of an answer, and how it goes on elsewhere."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import PenstockError
from penstock.router.config import GatewayConfig
from penstock.router.dispatch.dispatcher import MAX_ATTEMPTS
from penstock.wire.errors import DeadlineExceeded, EngineFault, InvalidRequest, Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish, split_keys, unpack_token_ids
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))


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
