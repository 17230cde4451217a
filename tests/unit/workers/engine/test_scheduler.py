"""Chunks, prefixes, preemption and ends: what the scheduler does with any sequences."""

import pytest

from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.engine.sequence import Sampled
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of
from tests.unit.workers.paged_hash import EOS, make_sequence


def test_sequences_in_one_batch_say_what_they_say_alone() -> None:
    bench = Bench()
    sequences = [bench.sequence(prompt_of(length, first=length), max_tokens=9) for length in (1, 3, 4, 5, 17)]
    bench.add(*sequences)
    bench.drain()

    assert [make_output(seq) for seq in sequences] == [expected(seq) for seq in sequences]
    assert {seq.finish for seq in sequences} == {Finish.LENGTH}


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    bench = Bench(max_batched_tokens=8)
    short, long = bench.sequence(prompt_of(2), max_tokens=20), bench.sequence(prompt_of(30, first=1))
    bench.add(short)
    bench.step()
    bench.add(long)

    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 7]
    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 7]
    bench.drain()
    assert make_output(long) == expected(long)


def test_a_prefill_leaves_room_for_the_decoding_rows_behind_it() -> None:
    bench = Bench(max_batched_tokens=8)
    long, short = bench.sequence(prompt_of(40)), bench.sequence(prompt_of(2, first=1), max_tokens=9)
    bench.add(short)
    bench.step()
    bench.add(long)
    bench.step()
    bench.scheduler.running.reverse()  # now the prefill comes first

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(long, 7), (short, 1)]
    bench.drain()


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(18)))
    bench.drain()
    follower = bench.sequence([*prompt_of(16), 1, 2, 3])
    bench.add(follower)
    step = bench.step()

    assert (step.chunks[0].start, step.chunks[0].num_tokens) == (16, 3)
    assert follower.num_cached_tokens == 16
    bench.drain()
    assert make_output(follower) == expected(follower)


def test_the_last_token_is_computed_even_if_all_blocks_are_cached() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(16)))
    bench.drain()
    again = bench.sequence(prompt_of(16))
    bench.add(again)
    bench.drain()

    assert again.num_cached_tokens == 12
    assert make_output(again) == expected(again)


def test_another_tenant_does_not_hit_the_same_prompt() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(16), tenant="a"))
    bench.drain()
    other = bench.sequence(prompt_of(16), tenant="b")
    bench.add(other)
    bench.drain()

    assert other.num_cached_tokens == 0
    assert make_output(other) == expected(other)


def test_generated_blocks_are_cached_under_the_keys_a_gateway_makes() -> None:
    bench = Bench()
    first = bench.sequence(prompt_of(6), max_tokens=10)
    bench.add(first)
    bench.drain()
    second_turn = bench.sequence([*first.token_ids, 5, 6])
    bench.add(second_turn)
    bench.step()

    assert second_turn.num_cached_tokens == 12  # the KV of the last of 16 tokens was never computed
    bench.drain()
    assert make_output(second_turn) == expected(second_turn)


def test_a_sequence_without_keys_gets_those_of_its_chain() -> None:
    bench = Bench()
    bare = bench.sequence(prompt_of(9), has_keys=False)
    bench.add(bare)
    bench.drain()

    assert bare.block_keys == bench.sequence(bare.token_ids[:12]).block_keys
    assert bare.chain_key == bare.block_keys[-1]


def test_blocks_are_published_only_when_their_kv_is_written() -> None:
    bench = Bench(max_batched_tokens=8)
    seq = bench.sequence(prompt_of(20))
    bench.add(seq)
    step = bench.scheduler.schedule()

    assert bench.pool.cached_keys() == []
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert bench.pool.cached_keys() == seq.block_keys[:2]


def test_two_sequences_with_one_prompt_compute_it_once() -> None:
    bench = Bench()
    twins = [bench.sequence(prompt_of(17)) for _ in range(3)]
    bench.add(*twins)

    assert [chunk.seq for chunk in bench.step().chunks] == twins[:1]
    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 1, 1]
    assert [seq.num_cached_tokens for seq in twins] == [0, 16, 16]
    bench.drain()
    assert [make_output(seq) for seq in twins] == [expected(seq) for seq in twins]


def test_a_sequence_that_waits_for_a_prefix_does_not_hold_up_others() -> None:
    bench = Bench()
    first, twin, other = (
        bench.sequence(prompt_of(17)),
        bench.sequence(prompt_of(17)),
        bench.sequence(prompt_of(9, first=1)),
    )
    bench.add(first, twin, other)

    assert [chunk.seq for chunk in bench.step().chunks] == [first, other]
    assert list(bench.scheduler.waiting) == [twin]
    bench.drain()


def test_sequences_that_wait_for_a_prefix_keep_their_order() -> None:
    bench = Bench()
    first, second, third, fourth = (bench.sequence(prompt_of(17)) for _ in range(4))
    bench.add(first, second, third, fourth)
    bench.step()

    assert list(bench.scheduler.waiting) == [second, third, fourth]
    bench.drain()


def test_a_sequence_stops_waiting_for_a_prefix_whose_owner_is_gone() -> None:
    bench = Bench(max_batched_tokens=8)
    first, twin = bench.sequence(prompt_of(30)), bench.sequence(prompt_of(30))
    bench.add(first, twin)
    bench.step()
    bench.scheduler.finish(first, Finish.ABORT)

    assert [chunk.seq for chunk in bench.step().chunks] == [twin]
    bench.drain()
    assert make_output(twin) == expected(twin)


def test_the_newest_sequence_gives_way_and_starts_over() -> None:
    bench = Bench(num_blocks=6)
    old, new = bench.sequence(prompt_of(8), max_tokens=14), bench.sequence(prompt_of(8, first=1), max_tokens=8)
    bench.add(old, new)
    steps = []
    while not new.num_preemptions:
        steps.append(bench.step())

    assert steps[-1].preempted == [new]
    assert new.block_table == []
    assert list(bench.scheduler.waiting) == [new]
    bench.drain()
    assert [make_output(seq) for seq in (old, new)] == [expected(old), expected(new)]
    assert old.num_preemptions == 0


def test_a_preempted_sequence_goes_ahead_of_those_that_never_ran() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    old, new, later = (bench.sequence(prompt_of(8, first=first), max_tokens=12) for first in range(3))
    bench.add(old, new, later)
    while not new.num_preemptions:
        bench.step()

    assert list(bench.scheduler.waiting) == [new, later]
    assert new.num_cached_tokens == 0
    bench.drain()
    assert new.num_cached_tokens == 0  # of its first admission


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    bench = Bench()
    whole = bench.sequence(prompt_of(10), max_tokens=12)
    rest = bench.sequence(prompt_of(10), max_tokens=12, output=expected(whole)[:7])
    bench.add(rest)
    bench.drain()

    assert make_output(rest) == expected(whole)


def test_a_resumed_sequence_counts_only_prompt_tokens_as_cached() -> None:
    bench = Bench()
    whole = bench.sequence(prompt_of(6), max_tokens=12)
    bench.add(whole)
    bench.drain()
    rest = bench.sequence(prompt_of(6), max_tokens=20, output=make_output(whole))
    bench.add(rest)
    bench.drain()

    assert rest.num_cached_tokens == 6


def test_a_resumed_sequence_that_has_all_its_tokens_ends_at_once() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(4), max_tokens=2, output=[1, 2])

    assert not bench.scheduler.add(seq)
    assert (seq.finish, seq.error) == (Finish.LENGTH, None)


@pytest.mark.parametrize(
    ("bench", "length", "sentence"),
    [
        (
            Bench(num_blocks=2),
            8,
            "The sequence has 8 tokens; this replica holds at most 8, and one must be left for output.",
        ),
        (
            Bench(max_model_len=8),
            9,
            "The sequence has 9 tokens; this replica holds at most 8, and one must be left for output.",
        ),
        (Bench(), 0, "The sequence has no tokens."),
    ],
)
def test_a_sequence_that_can_never_fit_is_refused_with_a_sentence(bench: Bench, length: int, sentence: str) -> None:
    seq = bench.sequence(prompt_of(length))

    assert not bench.scheduler.add(seq)
    assert (seq.finish, seq.error) == (Finish.REFUSED, sentence)
    assert not bench.scheduler.has_work


def test_more_keys_than_full_blocks_are_refused() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(11))
    seq.block_keys.append(bytes(16))

    assert not bench.scheduler.add(seq)
    assert seq.error == "The sequence came with 3 block keys and has only 2 full blocks of 4 tokens."


def test_a_sequence_ends_when_its_context_is_full() -> None:
    bench = Bench(num_blocks=3)
    seq = bench.sequence(prompt_of(7), max_tokens=100)
    bench.add(seq)
    bench.drain()

    assert (seq.finish, seq.num_tokens) == (Finish.LENGTH, 12)
    assert make_output(seq) == expected(seq, max_len=12)


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (SamplingParams(max_tokens=500), Finish.STOP),
        (SamplingParams(max_tokens=20, ignore_eos=True), Finish.LENGTH),
        (SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=(EOS,)), Finish.STOP),
    ],
)
def test_a_sequence_ends_at_a_stop_token_or_at_its_length(sampling: SamplingParams, finish: Finish) -> None:
    bench = Bench(num_blocks=200)
    seq = make_sequence(bench.hasher, prompt_of(5), sampling)
    bench.add(seq)
    bench.drain()

    assert seq.finish is finish
    assert make_output(seq) == expected(seq)
    assert (make_output(seq)[-1] == EOS) is (finish is Finish.STOP)


def test_a_finished_sequence_can_not_be_finished_again() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5))
    bench.add(seq)
    bench.step()
    bench.scheduler.finish(seq, Finish.ABORT)
    bench.scheduler.finish(seq, Finish.ERROR, "late")

    assert (seq.finish, seq.error) == (Finish.ABORT, None)
    bench.drain()


def test_a_chunk_that_samples_nothing_has_no_output() -> None:
    bench = Bench(max_batched_tokens=8)
    seq = bench.sequence(prompt_of(12))
    bench.add(seq)
    first = bench.scheduler.schedule()

    assert bench.scheduler.commit(first, [[]]) == []
    second = bench.scheduler.schedule()
    (output,) = bench.scheduler.commit(second, [[Sampled(9)]])
    assert (output.seq, output.token_ids, output.logprobs, output.finish) == (seq, [9], None, None)


# drafts
