"""Prompts whose log probabilities are wanted, through the scheduler: each token is scored once, from KV of its own."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.wire.frames import Finish, SamplingParams, join_prompt_logprobs, unpack_floats
from penstock.workers.engine.isolation import run_apart
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of
from tests.unit.workers.paged_hash import scores


def scored(bench: Bench, prompt: list[int], max_tokens: int = 3, **options: object) -> Sequence:
    seq = bench.sequence(prompt, max_tokens, **options)
    seq.sampling = msgspec.structs.replace(seq.sampling, prompt_logprobs=0)
    return seq


def found(seq: Sequence) -> list[float]:
    joined = join_prompt_logprobs(seq.prompt_logprobs)
    return [] if joined is None else unpack_floats(joined.logprobs)


def wanted(seq: Sequence) -> list[float]:
    return scores(seq.token_ids[: seq.num_prompt_tokens], seq.sampling, seq.tenant)


def test_every_token_of_a_prompt_but_the_first_is_scored_and_the_answer_is_the_same() -> None:
    bench = Bench(max_batched_tokens=8)
    seqs = [scored(bench, prompt_of(length, first=length)) for length in (1, 2, 5, 30)]
    plain = bench.sequence(prompt_of(11))
    bench.add(*seqs, plain)
    bench.drain()

    assert [found(seq) for seq in seqs] == [wanted(seq) for seq in seqs]
    assert [make_output(seq) for seq in (*seqs, plain)] == [expected(seq) for seq in (*seqs, plain)]
    assert plain.prompt_logprobs == []


def test_a_cached_prefix_is_computed_again_for_its_scores_and_found_by_others() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(18)))
    bench.drain()
    again = scored(bench, prompt_of(18))
    bench.add(again)
    bench.drain()
    follower = bench.sequence(prompt_of(18))
    bench.add(follower)
    bench.drain()

    assert again.num_cached_tokens == 0
    assert found(again) == wanted(again)
    assert follower.num_cached_tokens == 16


def test_without_output_a_sequence_ends_when_its_prompt_is_scored() -> None:
    bench = Bench(max_batched_tokens=8)
    seq = scored(bench, prompt_of(21), max_tokens=0)
    bench.add(seq)
    bench.drain()

    assert (seq.finish, make_output(seq)) == (Finish.LENGTH, [])
    assert found(seq) == wanted(seq)


def test_without_output_and_scores_nothing_is_computed() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(21), max_tokens=0)

    assert not bench.scheduler.add(seq)
    assert seq.finish is Finish.LENGTH


def test_a_step_scores_a_bounded_number_of_tokens_and_others_go_on_beside() -> None:
    bench = Bench(num_blocks=400, max_batched_tokens=600)
    long, short = scored(bench, prompt_of(500)), scored(bench, prompt_of(9, first=5))
    plain = bench.sequence(prompt_of(300, first=2), max_tokens=9)
    bench.add(long, short, plain)
    rows: list[int] = []
    counts: list[int] = []
    while bench.scheduler.has_work:
        step = bench.scheduler.schedule()
        rows.append(sum(len(chunk.scored) for chunk in step.chunks))
        counts += [chunk.num_tokens for chunk in step.chunks if chunk.seq is plain]
        bench.scheduler.commit(step, bench.runner.launch(step)())

    assert counts == [300] + [1] * 8  # a prompt without scores is not held up
    assert rows[:3] == [MAX_SCORED_TOKENS] * 3
    assert sum(rows) == 499 + 8
    assert found(short) == wanted(short)
    assert found(long) == wanted(long)


def test_prompts_share_what_a_step_may_score() -> None:
    bench = Bench(num_blocks=400, max_batched_tokens=600)
    first, second = scored(bench, prompt_of(400)), scored(bench, prompt_of(20, first=5))
    bench.add(first, second)
    step = bench.scheduler.schedule()
    counts = [len(chunk.scored) for chunk in step.chunks]
    bench.scheduler.commit(step, bench.runner.launch(step)())

    assert counts == [MAX_SCORED_TOKENS - 19, 19]  # what the second leaves goes to the first
    bench.drain()
    assert found(first) == wanted(first)


def test_the_shape_of_a_step_counts_the_rows_that_are_scored() -> None:
    bench = Bench()
    bench.add(scored(bench, prompt_of(10)))
    shape = bench.scheduler.schedule().shape

    assert (shape.rows, shape.sampled_rows) == (1 + 9, 9)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(14, 40))
def test_whatever_is_preempted_no_token_is_scored_twice(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=num_blocks, max_num_seqs=4, max_batched_tokens=rng.choice([4, 16, 32]))
    seqs = []
    for number in range(6):
        prompt = prompt_of(rng.randrange(1, 30), first=rng.randrange(3))
        max_tokens = rng.choice([0, 1, 12])
        make = scored if number % 2 or not max_tokens else Bench.sequence
        seqs.append(make(bench, prompt, max_tokens))
    bench.add(*seqs)
    bench.drain()

    for seq in seqs:
        assert make_output(seq) == (expected(seq) if seq.sampling.max_tokens else [])
        assert found(seq) == (wanted(seq) if seq.sampling.prompt_logprobs is not None else [])
    assert sum(bench.runner.num_scored) == sum(len(found(seq)) for seq in seqs)


def test_a_step_that_is_computed_in_parts_keeps_its_scores() -> None:
    bench = Bench()
    seq, other = scored(bench, prompt_of(6)), scored(bench, prompt_of(7, first=3))
    bench.add(seq, other)
    step = bench.scheduler.schedule()
    bench.scheduler.commit(
        step, run_apart(step, lambda part: None if len(part.chunks) > 1 else bench.runner.compute(part))
    )
    bench.drain()

    assert found(seq) == wanted(seq)
    assert found(other) == wanted(other)


@pytest.mark.parametrize("num_scored", [0, 3, 9])
def test_a_chunk_scores_what_is_not_scored_yet(num_scored: int) -> None:
    bench = Bench()
    seq = scored(bench, prompt_of(10))
    whole = Chunk(seq, 0, 10)
    if num_scored:
        part = Chunk(seq, 0, num_scored)
        seq.block_table = [0, 1, 2]
        bench.runner.compute(Step([part], []))
        assert part.prompt_logprobs is not None
        seq.prompt_logprobs.append(part.prompt_logprobs)

    assert whole.scored == range(num_scored, 9)
    assert Chunk(seq, 9, 1).scored == range(9, 9)
    assert seq.lacks_scores == (num_scored < 9)
    assert not bench.sequence(prompt_of(10)).lacks_scores
    assert SamplingParams(1).prompt_logprobs is None
