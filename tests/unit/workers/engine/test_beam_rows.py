"""Beam searches through the scheduler: beams hold blocks together until they write, and find what they find alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.engine.isolation import run_apart
from penstock.workers.engine.sequence import Sampled, SeqOutput, Sequence, Step
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of
from tests.unit.workers.paged_hash import make_sequence, search


def beams(bench: Bench, prompt: list[int], num_beams: int = 3, max_tokens: int = 6, **sampling: object) -> Sequence:
    params = SamplingParams(max_tokens, num_beams=num_beams, num_returned=num_beams, **sampling)  # type: ignore[arg-type]
    return make_sequence(bench.hasher, prompt, params)


def take_step(bench: Bench) -> tuple[Step, list[SeqOutput]]:
    """Schedule, run, commit."""
    step = bench.scheduler.schedule()
    bench.runner.poison(bench.pool)
    outputs = bench.scheduler.commit(step, bench.runner.launch(step)())
    bench.pool.check(bench.scheduler.sequences())
    return step, outputs


def run(bench: Bench) -> dict[Sequence, SeqOutput]:
    """All to their ends; the last output of each sequence."""
    found: dict[Sequence, SeqOutput] = {}
    while bench.scheduler.has_work:
        step, outputs = take_step(bench)
        assert step.chunks, "there is work and the step is empty"
        assert len(step.chunks) <= bench.max_num_seqs
        assert step.num_tokens <= bench.max_batched_tokens
        found |= {output.seq: output for output in outputs}
    assert bench.pool.num_free == bench.pool.num_blocks
    return found


def answers(output: SeqOutput) -> list[list[int]]:
    assert output.beams is not None
    return [beam.token_ids for beam in output.beams]


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 17])
def test_a_search_in_blocks_finds_what_it_finds_alone(num_beams: int, length: int) -> None:
    bench = Bench(max_batched_tokens=8)
    params = SamplingParams(9, num_beams=num_beams, num_returned=num_beams)
    seq, plain = beams(bench, prompt_of(length), num_beams, 9), bench.sequence(prompt_of(6, first=3), max_tokens=9)
    bench.add(seq, plain)
    found = run(bench)

    assert answers(found[seq]) == search(prompt_of(length), params)
    assert make_output(plain) == expected(plain)
    assert found[seq].num_beam_tokens >= num_beams * max(map(len, answers(found[seq])))


def test_each_step_of_a_search_tells_what_was_computed_so_far() -> None:
    bench = Bench()
    seq = beams(bench, prompt_of(5), num_beams=3, max_tokens=6, ignore_eos=True)
    bench.add(seq)

    told = [output for _ in range(6) for output in take_step(bench)[1]]

    assert [output.num_beam_tokens for output in told] == [3 * count for count in range(1, 7)]
    assert [output.finish is None for output in told] == [True] * 5 + [False]


def test_beams_hold_the_prompt_once_and_copy_only_what_they_write_to() -> None:
    bench = Bench(num_blocks=64, block_size=4, max_batched_tokens=64)
    seq = beams(bench, prompt_of(42), num_beams=4, max_tokens=8, ignore_eos=True)  # ten full blocks, and one half full
    bench.add(seq)
    take_step(bench)
    held_before = bench.pool.num_blocks - bench.pool.num_free
    step = bench.scheduler.schedule()
    held = bench.pool.num_blocks - bench.pool.num_free
    bench.scheduler.commit(step, bench.runner.launch(step)())

    assert held_before == 11  # four beams, and nothing is copied yet
    assert len(step.chunks) == 4
    assert len(step.copies) == 3  # the last one that holds the half full block writes to it
    assert held == 10 + 4
    run(bench)


def test_a_search_takes_rows_for_all_its_beams_or_waits() -> None:
    bench = Bench(max_num_seqs=4)
    first, second = beams(bench, prompt_of(5), 3, 5), beams(bench, prompt_of(6, first=2), 3, 5)
    short = bench.sequence(prompt_of(4, first=9), max_tokens=3)
    bench.add(first, second, short)
    take_step(bench)

    assert bench.scheduler.running == [first, short]
    assert list(bench.scheduler.waiting) == [second]
    found = run(bench)
    params = SamplingParams(5, num_beams=3, num_returned=3)
    assert answers(found[second]) == search(prompt_of(6, first=2), params)


def test_a_search_that_could_never_run_is_refused() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=4)
    wide, long = beams(bench, prompt_of(4), num_beams=5), beams(bench, prompt_of(4), num_beams=4, max_tokens=9)

    assert not bench.scheduler.add(wide)
    assert not bench.scheduler.add(long)
    assert (wide.finish, long.finish) == (Finish.REFUSED, Finish.REFUSED)
    assert "5 beams" in (wide.error or "")
    assert "17 blocks" in (long.error or "")


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_preempted_searches_find_the_same(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=rng.randrange(22, 40), max_num_seqs=6, max_batched_tokens=rng.choice([8, 32]))
    searches, plain = [], []
    for number in range(6):
        prompt = prompt_of(rng.randrange(1, 20), first=rng.randrange(3))
        if number % 2:
            searches.append(beams(bench, prompt, rng.randrange(1, 4), rng.randrange(1, 12)))
        else:
            plain.append(bench.sequence(prompt, rng.randrange(1, 14)))
    for seq in (*plain, *searches):
        bench.scheduler.add(seq)
    found = run(bench)

    assert [make_output(seq) for seq in plain] == [expected(seq) for seq in plain]
    for seq in searches:
        if seq.finish is Finish.REFUSED:
            continue
        params = SamplingParams(
            seq.sampling.max_tokens, num_beams=seq.sampling.num_beams, num_returned=seq.sampling.num_beams
        )
        assert answers(found[seq]) == search(seq.token_ids, params)


def test_a_search_goes_on_when_its_step_is_computed_in_parts() -> None:
    bench = Bench(num_blocks=64, max_batched_tokens=64)
    seq = beams(bench, prompt_of(6), 4, 7)
    bench.add(seq)
    found: dict[Sequence, SeqOutput] = {}

    def run_one(part: Step) -> list[list[Sampled]] | None:
        return bench.runner.launch(part)() if len(part.chunks) == 1 else None

    while bench.scheduler.has_work:
        step = bench.scheduler.schedule()
        for output in bench.scheduler.commit(step, run_apart(step, run_one)):
            found[output.seq] = output

    assert answers(found[seq]) == search(prompt_of(6), SamplingParams(7, num_beams=4, num_returned=4))


def test_one_beam_that_can_not_be_computed_ends_its_search_alone() -> None:
    bench = Bench()
    seq, plain = beams(bench, prompt_of(6)), bench.sequence(prompt_of(5, first=1))
    bench.add(seq, plain)
    take_step(bench)
    step = bench.scheduler.schedule()
    sampled = bench.runner.launch(step)()
    sampled[next(index for index, chunk in enumerate(step.chunks) if chunk.seq.leader is seq)] = [
        Sampled(0, error="broken")
    ]
    outputs = bench.scheduler.commit(step, sampled)

    assert (seq.finish, seq.error) == (Finish.ERROR, "broken")
    assert [output.seq for output in outputs if output.finish is Finish.ERROR] == [seq]
    bench.pool.check(bench.scheduler.sequences())
    bench.drain()
    assert make_output(plain) == expected(plain)


def test_an_aborted_search_frees_the_blocks_of_all_its_beams() -> None:
    bench = Bench()
    seq = beams(bench, prompt_of(6))
    bench.add(seq)
    take_step(bench)
    bench.scheduler.schedule()
    bench.scheduler.finish(seq, Finish.ABORT)

    assert bench.pool.num_free == bench.pool.num_blocks
    bench.pool.check([])
