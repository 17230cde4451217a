"""Prefixes of prompts: where they are cached, for whom, and what they draw."""

from dataclasses import replace

from penstock.wire.frames import BlockEvents, pack_token_ids, split_keys
from tests.unit.router.fleet_fakes import BLOCK_SIZE, Cluster, FakeMember

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))


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
