"""What the scheduler makes of what was chosen: nothing, errors, ends, and choices of one prompt."""

import pytest

from penstock.wire.frames import Finish
from penstock.workers.engine.sequence import Sampled
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of


def test_a_row_without_a_choice_ends_its_own_sequence_publishes_nothing_and_frees_its_blocks() -> None:
    bench = Bench()
    broken, good = bench.sequence([1, 2, 3, 4, 5]), bench.sequence([6, 7, 8, 9, 10])
    bench.add(broken, good)
    step = bench.scheduler.schedule()
    chosen = bench.runner.launch(step)()
    outputs = bench.scheduler.commit(
        step,
        [
            [Sampled(0, error="no choice")] if chunk.seq is broken else choice
            for chunk, choice in zip(step.chunks, chosen, strict=True)
        ],
    )

    assert [(output.seq is broken, output.finish) for output in outputs] == [(True, Finish.ERROR), (False, None)]
    assert (broken.error, broken.block_table) == ("no choice", [])
    assert bench.pool.match(broken.block_keys, 1) == []
    assert len(bench.pool.match(good.block_keys, 1)) == 1
    bench.pool.check(bench.scheduler.sequences())


def test_what_a_sequence_computed_before_its_scores_were_no_numbers_is_found_by_nobody() -> None:
    bench = Bench()
    owner = bench.sequence(prompt_of(9), max_tokens=1)
    bench.add(owner)
    bench.drain()
    broken = bench.sequence([*prompt_of(8), *prompt_of(12, first=3)], max_tokens=30)
    broken.adapter = "d1"
    bench.add(broken)
    for _ in range(6):
        bench.step()
    follower = bench.sequence([*broken.token_ids[:20], 1], max_tokens=3)
    bench.add(follower)  # holds blocks of the broken one when it ends
    bench.step()
    step = bench.scheduler.schedule()
    chosen = bench.runner.launch(step)()
    bench.scheduler.commit(
        step,
        [
            [Sampled(0, error="no choice.")] if chunk.seq is broken else choice
            for chunk, choice in zip(step.chunks, chosen, strict=True)
        ],
    )
    bench.pool.check(bench.scheduler.sequences())

    assert broken.error == "no choice. It runs with the adapter d1."
    assert follower.num_cached_tokens == 20
    assert len(bench.pool.match(broken.block_keys, 99)) == 2, "what others had computed stays"
    bench.drain()
    assert make_output(follower) == expected(follower)
    again = bench.sequence(broken.token_ids[:20], max_tokens=3)
    bench.add(again)
    bench.drain()
    assert again.num_cached_tokens == 8


# --- what a grammar says


def test_a_token_behind_which_nothing_can_follow_ends_its_sequence() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5), max_tokens=4)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    bench.scheduler.commit(step, [[Sampled(9, is_last=True)]])

    assert (seq.finish, make_output(seq)[-1], seq.num_output_tokens) == (Finish.STOP, 9, 2)


def test_the_last_allowed_token_that_makes_an_answer_whole_is_a_stop_and_no_length() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5), max_tokens=1)
    bench.add(seq)
    bench.scheduler.commit(bench.scheduler.schedule(), [[Sampled(9, is_last=True)]])

    assert seq.finish is Finish.STOP


def test_an_error_that_is_the_requests_own_ends_it_as_invalid_and_keeps_its_blocks_in_the_cache() -> None:
    bench = Bench()
    seq, again = (bench.sequence(prompt_of(9)) for _ in range(2))
    bench.add(seq)
    bench.step()
    bench.scheduler.commit(bench.scheduler.schedule(), [[Sampled(0, error="A limit.", is_at_fault=True)]])
    bench.add(again)
    bench.step()

    assert (seq.finish, seq.error) == (Finish.INVALID, "A limit.")
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("length", [4, 5, 8])
def test_a_sequence_for_which_no_token_was_chosen_is_computed_again(length: int) -> None:
    bench = Bench()
    late, other = bench.sequence(prompt_of(length), max_tokens=5), bench.sequence(prompt_of(3), max_tokens=9)
    bench.add(late, other)
    for _ in range(4):
        step = bench.scheduler.schedule()
        assert [chunk.seq for chunk in step.chunks] == [late, other]
        sampled = bench.runner.launch(step)()
        bench.scheduler.commit(step, [[], sampled[1]])
        bench.pool.check(bench.scheduler.sequences())
        assert late.num_uncomputed_tokens == 1
    bench.drain()

    assert [make_output(seq) for seq in (late, other)] == [expected(late), expected(other)]


def test_choices_of_one_prompt_hold_its_blocks_once() -> None:
    """What `n: 8` does: the first choice computes the prompt, the others are submitted at its first token."""
    bench = Bench(num_blocks=64, block_size=4, max_num_seqs=8, max_batched_tokens=64)
    prompt = prompt_of(40)  # ten blocks, the last of which is computed by each for its logits
    bench.add(bench.sequence(prompt, max_tokens=4))
    bench.step()
    held_by_one = bench.pool.num_blocks - bench.pool.num_free
    others = [bench.sequence(prompt, max_tokens=4) for _ in range(7)]
    bench.add(*others)
    bench.step()

    assert held_by_one == 10
    assert bench.pool.num_blocks - bench.pool.num_free == 9 + 2 + 7  # the first one has come a block further
    assert {other.num_cached_tokens for other in others} == {36}
    bench.drain()
    assert [make_output(other) for other in others] == [expected(other) for other in others]
