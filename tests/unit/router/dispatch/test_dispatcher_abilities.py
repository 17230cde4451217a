"""Requests that not every replica can answer as they want it: where they go, and what becomes of them when replicas are
lost."""

import asyncio
from array import array
from dataclasses import replace

import msgspec
import pytest

from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.route_states import ABILITIES
from penstock.router.routing.request import Generation
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import (
    Ability,
    BeamOutput,
    BlockEvents,
    Delta,
    Finish,
    PromptLogprobs,
    SamplingParams,
    needed_abilities,
    pack_token_ids,
)
from tests.unit.router.fleet_fakes import BLOCK_SIZE, Cluster, FakeMember, FakeReplica, generation, settle

A, B = FakeMember("a"), FakeMember("b")
PLAIN = FakeMember("plain", abilities=frozenset())
PROMPT = list(range(10, 40))
SCORES = PromptLogprobs(0, array("f", [-1.0] * 29).tobytes(), pack_token_ids([1] * 29))


def scored(max_tokens: int = 8) -> Generation:
    made = generation(PROMPT, max_tokens)
    return replace(made, sampling=msgspec.structs.replace(made.sampling, prompt_logprobs=0))


async def _next_after_resume(stream: Mailbox, replica: FakeReplica, delta: Delta | None = None) -> Delta:
    """What the reader gets when another replica has the sequence and sends a delta."""
    reading = asyncio.create_task(stream.next())
    await settle()
    replica.send(delta or Delta(1, [6], num_cached_tokens=0))
    replica.running.clear()
    return await reading


async def test_a_request_goes_to_a_replica_that_has_what_it_needs() -> None:
    async with Cluster(PLAIN, A) as cluster:
        for _ in range(4):
            stream = await cluster.dispatcher.start(scored())
            assert stream.receipt.replica == "a"
            stream.close()
        others = [await cluster.dispatcher.start(generation(PROMPT)) for _ in range(8)]
        assert {other.receipt.replica for other in others} == {"a", "plain"}
        for other in others:
            other.close()


@pytest.mark.parametrize("max_tokens", [0, 8])
async def test_where_no_replica_has_it_the_request_is_refused(max_tokens: int) -> None:
    async with Cluster(PLAIN) as cluster:
        with pytest.raises(InvalidRequest, match="log probabilities of its tokens"):
            await cluster.dispatcher.start(scored(max_tokens))


def test_every_ability_has_words_for_who_is_refused() -> None:
    assert ABILITIES.keys() == set(Ability)


async def test_no_token_of_a_prompt_that_is_scored_is_expected_in_a_cache() -> None:
    async with Cluster(A) as cluster:
        first = await cluster.dispatcher.start(generation(PROMPT))
        first.close()
        cluster.replicas["a"].send(
            events=[BlockEvents(1, cluster.replicas["a"].submits[0].block_keys, is_snapshot=True)]
        )
        plain = await cluster.dispatcher.start(generation(PROMPT))
        stream = await cluster.dispatcher.start(scored())
        plain_s, scored_s = plain.receipt.predicted_ttft_s, stream.receipt.predicted_ttft_s
        plain.close()
        stream.close()

        assert plain.receipt.predicted_cached_tokens == (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert stream.receipt.predicted_cached_tokens == 0
        assert plain_s is not None
        assert scored_s is not None
        assert scored_s > plain_s


async def test_scores_that_were_delivered_are_not_asked_for_again() -> None:
    async with Cluster(A, B) as cluster:
        stream = await cluster.dispatcher.start(scored())
        lost = cluster.replicas[stream.receipt.replica]
        lost.send(Delta(1, [5], num_cached_tokens=0, prompt_logprobs=SCORES))
        first = await stream.next()
        lost.die()
        other = cluster.replicas["b" if lost.member is A else "a"]
        resumed = await _next_after_resume(stream, other)
        stream.close()

        assert first.prompt_logprobs == SCORES
        assert lost.submits[0].sampling.prompt_logprobs == 0
        assert other.submits[0].sampling.prompt_logprobs is None
        assert resumed.prompt_logprobs is None


async def test_a_prompt_that_is_lost_before_its_scores_came_is_computed_elsewhere() -> None:
    async with Cluster(A, B) as cluster:
        stream = await cluster.dispatcher.start(scored(max_tokens=0))
        lost = cluster.replicas[stream.receipt.replica]
        lost.die()
        other = cluster.replicas["b" if lost.member is A else "a"]
        last = await _next_after_resume(
            stream, other, Delta(1, [], Finish.LENGTH, num_cached_tokens=0, prompt_logprobs=SCORES)
        )
        stream.close()

        assert other.submits[0].sampling.prompt_logprobs == 0
        assert last.prompt_logprobs == SCORES
        assert last.finish is Finish.LENGTH


async def test_scores_survive_that_deltas_are_read_together() -> None:
    async with Cluster(A) as cluster:
        stream = await cluster.dispatcher.start(scored())
        replica = cluster.replicas["a"]
        replica.send(Delta(1, [5], num_cached_tokens=0, prompt_logprobs=SCORES))
        replica.send(Delta(1, [6]))
        merged = await stream.next()
        stream.close()

        assert (merged.token_ids, merged.prompt_logprobs) == ([5, 6], SCORES)


async def test_what_a_search_has_computed_counts_before_its_end_and_once() -> None:
    async with Cluster(PLAIN, A) as cluster:
        made = generation(PROMPT)
        wanted = replace(made, sampling=msgspec.structs.replace(made.sampling, num_beams=2))
        stream = await cluster.dispatcher.start(wanted)
        replica = cluster.replicas["a"]
        replica.send(Delta(1, [], num_cached_tokens=0, num_beam_tokens=2))
        replica.send(Delta(1, [], num_beam_tokens=8))
        assert stream.num_received_tokens == 8
        assert (await stream.next()).num_beam_tokens == 8
        replica.send(Delta(1, [], num_beam_tokens=4))  # it lost its blocks, and started over
        assert (await stream.next()).finish is None
        stream.close()

        assert stream.num_received_tokens == 8


async def test_a_search_comes_at_once_and_counts_the_tokens_of_all_its_beams() -> None:
    async with Cluster(PLAIN, A) as cluster:
        made = generation(PROMPT)
        wanted = replace(made, sampling=msgspec.structs.replace(made.sampling, num_beams=2))
        stream = await cluster.dispatcher.start(wanted)
        assert stream.receipt.replica == "a"
        beams = [BeamOutput([5, 6], Finish.STOP)]
        replica = cluster.replicas["a"]
        replica.send(Delta(1, [], Finish.STOP, num_cached_tokens=0, beams=beams, num_beam_tokens=12))
        replica.running.clear()
        found = await stream.next()
        stream.close()

        assert (found.beams, stream.num_received_tokens) == (beams, 12)


def test_what_a_request_needs_follows_from_its_parameters() -> None:
    assert needed_abilities(scored().sampling) == {Ability.PROMPT_LOGPROBS}
    assert needed_abilities(generation(PROMPT, 0).sampling) == {Ability.PROMPT_LOGPROBS}
    assert needed_abilities(SamplingParams(1, allowed_token_ids=b"abcd")) == {Ability.TOKEN_MASKS}
    assert needed_abilities(SamplingParams(1, num_beams=2)) == {Ability.BEAMS}
    assert needed_abilities(SamplingParams(1, bad_words=((5,),))) == {Ability.TOKEN_MASKS}
    assert needed_abilities(generation(PROMPT).sampling) == set()
