"""Drafts in the scheduler: what of them is kept, and what they may take."""

import pytest

from penstock.wire.frames import Finish, SamplingParams, StepCosts, TokenLogprobs
from penstock.workers.engine.sequence import Sampled, Sequence
from tests.unit.workers.engine.scheduler_bench import (
    DRAFTERS,
    Bench,
    adversary,
    expected,
    make_output,
    oracle,
    prompt_of,
    step_s,
)
from tests.unit.workers.paged_hash import EOS, VOCAB, make_sequence


def test_a_draft_that_is_right_is_taken_over_with_one_token_more() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(5), max_tokens=20)
    bench.add(seq)
    bench.step()
    (chunk,) = bench.step().chunks

    assert (chunk.num_tokens, chunk.max_drafts) == (1, 4)
    assert seq.num_output_tokens == 1 + 5
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert bench.drain() == 3
    assert make_output(seq) == expected(seq)
    assert bench.scheduler.drafts is not None
    assert bench.scheduler.drafts.num_drafted == bench.scheduler.drafts.num_accepted == 4 + 4 + 4 + 3


def test_a_draft_counts_up_to_its_first_wrong_token() -> None:
    def wrong_from_the_third(seq: Sequence, count: int) -> list[int]:
        first, second, third, *_ = oracle(seq, count)
        return [first, second, (third + 1) % VOCAB, third]

    bench = Bench(drafter=wrong_from_the_third)
    seq = bench.sequence(prompt_of(5), max_tokens=20)
    bench.add(seq)
    bench.step()
    bench.step()

    assert make_output(seq) == expected(seq)[: 1 + 3]
    assert bench.scheduler.drafts is not None
    assert (bench.scheduler.drafts.num_drafted, bench.scheduler.drafts.num_accepted) == (4, 2)


def test_a_block_that_a_rejected_draft_filled_is_not_published_and_not_kept() -> None:
    bench = Bench(drafter=lambda seq, count: [(token_id + 1) % VOCAB for token_id in oracle(seq, count)])
    seq = bench.sequence(prompt_of(7), max_tokens=9)
    bench.add(seq)
    bench.step()  # 8 tokens known, 7 computed
    step = bench.scheduler.schedule()

    assert len(seq.block_table) == 3
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert len(bench.pool.cached_keys()) == 2
    assert len(seq.block_table) == 3  # the 9th token will be computed there
    step = bench.scheduler.schedule()
    assert len(seq.block_table) == 4
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert len(seq.block_table) == 3
    assert len(bench.pool.cached_keys()) == 2
    bench.drain()
    follower = bench.sequence([*seq.token_ids, 1])
    bench.add(follower)
    bench.drain()
    assert follower.num_cached_tokens == 12
    assert make_output(follower) == expected(follower)


@pytest.mark.parametrize("method", ["oracle", "half right", "adversary"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=500),
        SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=(EOS,)),
        SamplingParams(max_tokens=7),
    ],
)
def test_a_stop_token_or_the_last_token_within_a_draft_ends_the_sequence_there(
    method: str, sampling: SamplingParams
) -> None:
    for first in range(10):
        bench = Bench(num_blocks=200, drafter=DRAFTERS[method]())
        seq = make_sequence(bench.hasher, prompt_of(5, first), sampling)
        bench.add(seq)
        bench.drain()

        assert make_output(seq) == expected(seq)


def test_an_error_behind_an_accepted_draft_ends_the_sequence_after_what_was_chosen() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(6), max_tokens=20)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    ((first, second, *_),) = bench.runner.launch(step)()
    (output,) = bench.scheduler.commit(step, [[first, second, Sampled(0, error="no choice")]])

    assert (output.token_ids, output.finish, seq.error) == (expected(seq)[1:3], Finish.ERROR, "no choice")
    assert bench.pool.cached_keys() == []  # nothing that it computed is trusted
    bench.drain()


def test_logprobs_stay_beside_their_tokens() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(6), max_tokens=20)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    (choices,) = bench.runner.launch(step)()
    (output,) = bench.scheduler.commit(
        step, [[Sampled(choice.token_id, TokenLogprobs(-float(place))) for place, choice in enumerate(choices[:4])]]
    )

    assert output.token_ids == expected(seq)[1:5]
    assert output.logprobs == [TokenLogprobs(-float(place)) for place in range(4)]
    bench.drain()


def test_drafts_take_what_prefill_and_waiting_sequences_leave() -> None:
    bench = Bench(max_batched_tokens=16, drafter=oracle)
    short, long = bench.sequence(prompt_of(3), max_tokens=30), bench.sequence(prompt_of(29, first=1))
    bench.add(short)
    bench.step()
    bench.add(long)

    assert [(chunk.num_tokens, chunk.max_drafts) for chunk in bench.step().chunks] == [(1, 0), (15, 0)]
    assert [(chunk.num_tokens, chunk.max_drafts) for chunk in bench.step().chunks] == [(1, 1), (14, 0)]
    bench.drain()


def test_nobody_is_preempted_for_a_draft() -> None:
    bench = Bench(num_blocks=6, drafter=oracle)
    old, new = bench.sequence(prompt_of(9), max_tokens=4), bench.sequence(prompt_of(9, first=1), max_tokens=4)
    bench.add(old, new)
    bench.step()
    step = bench.step()

    assert [chunk.max_drafts for chunk in step.chunks] == [2, 2]
    bench.drain()
    assert old.num_preemptions == new.num_preemptions == 0
    assert make_output(new) == expected(new)


def test_drafts_that_do_not_pay_are_not_made() -> None:
    bench = Bench(
        drafter=lambda seq, count: [(token_id + 1) % VOCAB for token_id in oracle(seq, count)], max_draft_tokens=2
    )
    costs = StepCosts(base_s=0.010, draft_token_s=0.002)
    seq = bench.sequence(prompt_of(6), max_tokens=200)
    bench.add(seq)
    steps = []
    while bench.scheduler.has_work:
        steps.append(bench.scheduler.schedule(costs))
        bench.scheduler.commit(steps[-1], bench.runner.launch(steps[-1])())

    assert steps[1].chunks[0].max_drafts == 2
    assert sum(step.chunks[0].max_drafts for step in steps[-100:]) <= 10  # it tries again now and then
    assert make_output(seq) == expected(seq)


# shares of the budget, places and blocks


def test_while_drafts_do_not_pay_nothing_is_reserved_for_them_nor_seen() -> None:
    """Only a request that brings a guess of its own has some."""
    costs = StepCosts(base_s=0.01, row_s=0.001, draft_token_s=0.001)
    bench = Bench(drafter=adversary, is_head=True, costs=costs, num_blocks=400, max_num_seqs=4, max_model_len=400)
    seqs = [bench.sequence(prompt_of(5, number), max_tokens=300) for number in range(4)]
    bench.add(*seqs)
    lengths = bench.scheduler.drafts
    for _ in range(100):
        step = bench.step()
        shape = step.shape
        assert all(chunk.is_observed for chunk in step.chunks) == lengths.learns_times
        if not lengths.learns_times:
            break
        lengths.record_time(shape, step_s(costs, step), 0.03 if shape.draft_tokens else 0.014)
    assert lengths.num_drafted
    assert not any(chunk.max_drafts or chunk.is_observed for chunk in step.chunks)
    seqs[2].prediction = expected(seqs[2])
    step = bench.step()
    assert [bool(chunk.max_drafts) for chunk in step.chunks] == [False, False, True, False]
    for seq in seqs[1:]:
        bench.scheduler.finish(seq, Finish.ABORT)
    bench.step()
    assert all(chunk.is_observed for chunk in bench.step().chunks), "of one alone nothing is known"
    bench.drain()
    assert make_output(seqs[0]) == expected(seqs[0])


def test_a_request_with_a_guess_of_its_own_does_not_keep_a_losing_drafter_in_use() -> None:
    """Tokens of a guess are not the drafter's gain, and steps that are compared with have no drafts at all."""
    costs = StepCosts(base_s=0.01, row_s=0.001, draft_token_s=0.001)
    bench = Bench(drafter=adversary, is_head=True, costs=costs, num_blocks=400, max_num_seqs=4, max_model_len=400)
    seqs = [bench.sequence(prompt_of(5, number), max_tokens=300) for number in range(4)]
    seqs[2].prediction = expected(seqs[2])
    bench.add(*seqs)
    lengths = bench.scheduler.drafts
    for _ in range(150):
        step = bench.step()
        if not lengths.learns_times:
            break
        lengths.record_time(step.shape, step_s(costs, step), 0.03 if step.shape.draft_tokens else 0.014)
    assert not lengths.learns_times, "it rests"
    assert lengths.num_drafted
    bench.drain()
    assert make_output(seqs[2]) == expected(seqs[2])
