"""How prompts share the budget of a step, and who goes past whom."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.engine.bypasses import MAX_BYPASSES
from penstock.workers.engine.scheduler import MAX_PARTIAL
from penstock.workers.engine.sequence import Sequence, Status
from tests.unit.workers.engine.scheduler_bench import (
    Bench,
    expected,
    make_output,
    of_tenant,
    prompt_of,
)


def test_a_long_prompt_leaves_half_of_the_budget_to_others_and_takes_what_they_leave() -> None:
    bench = Bench(max_batched_tokens=16)
    long = bench.sequence(prompt_of(100), max_tokens=1)
    bench.add(long)
    alone = bench.step()
    short, another = bench.sequence(prompt_of(6, first=1)), bench.sequence(prompt_of(30, first=2))
    bench.add(short)
    beside_short = bench.step()
    bench.add(another)
    beside_another = bench.step()

    assert [(chunk.seq, chunk.num_tokens) for chunk in alone.chunks] == [(long, 16)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in beside_short.chunks] == [(long, 10), (short, 6)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in beside_another.chunks] == [(long, 8), (short, 1), (another, 7)]
    bench.drain()
    assert [make_output(seq) for seq in (long, short, another)] == [expected(seq) for seq in (long, short, another)]


def test_a_prompt_alone_is_computed_in_as_few_steps_as_the_budget_allows() -> None:
    bench = Bench(max_batched_tokens=16)
    bench.add(bench.sequence(prompt_of(100), max_tokens=1))

    assert bench.drain() == 7


def test_few_prompts_are_computed_in_part_at_once_and_short_ones_go_past_those_that_wait() -> None:
    bench = Bench(max_batched_tokens=16, num_blocks=200)
    longs = [bench.sequence(prompt_of(60, first=first)) for first in range(4)]
    short = bench.sequence(prompt_of(2, first=9))
    bench.add(*longs, short)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [
        (longs[0], 10),
        (longs[1], 4),
        (short, 2),
    ]
    finished = []
    while bench.scheduler.has_work:
        assert sum(seq.num_uncomputed_tokens > 1 for seq in bench.scheduler.running) <= MAX_PARTIAL
        finished += [chunk.seq for chunk in bench.step().chunks if chunk.seq.finish]
    assert [seq for seq in finished if seq is not short] == longs


def test_tenants_divide_the_budget_and_a_short_prompt_gets_all_it_lacks_beside_many_long_ones() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    longs = [of_tenant(bench, "flooder", prompt_of(60, first=first)) for first in range(8)]
    bench.add(*longs)
    bench.step()
    short = of_tenant(bench, "light", prompt_of(18, first=20))
    bench.add(short)
    beside = {id(chunk.seq): chunk.num_tokens for chunk in bench.step().chunks}

    assert beside[id(short)] == 18
    assert sum(beside.values()) == 40
    bench.drain()
    assert [make_output(seq) for seq in (*longs, short)] == [expected(seq) for seq in (*longs, short)]


def test_long_prompts_of_two_tenants_get_the_budget_by_their_weights() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    heavy, light = of_tenant(bench, "heavy", prompt_of(200), 3.0), of_tenant(bench, "light", prompt_of(200, first=7))
    bench.add(heavy, light)

    for _ in range(4):
        assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(heavy, 30), (light, 10)]


def test_the_long_prompts_of_one_tenant_keep_nobody_elses_from_being_admitted() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    bench.add(*(of_tenant(bench, "flooder", prompt_of(100, first=first)) for first in range(5)))
    bench.step()
    other = of_tenant(bench, "other", prompt_of(100, first=20))
    bench.add(other)

    assert other in [chunk.seq for chunk in bench.step().chunks]


def test_a_sequence_whose_blocks_are_not_free_is_overtaken_a_bounded_number_of_times() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=8)
    holder, big = bench.sequence(prompt_of(20), max_tokens=20), bench.sequence(prompt_of(30, first=1))
    bench.add(holder)
    bench.step()
    bench.add(big)
    smalls: list[Sequence] = []
    num_before: list[int] = []
    while big.status is Status.WAITING:
        num_before.append(sum(seq.finish is not None for seq in smalls))
        smalls.append(bench.sequence(prompt_of(2, first=len(smalls)), max_tokens=1))
        bench.add(smalls[-1])
        bench.step()
    bench.drain()

    assert num_before[-1] == MAX_BYPASSES
    assert make_output(big) == expected(big)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_no_stream_of_small_ones_starves_a_big_one(lengths: list[int], seed: int) -> None:
    bench = Bench(num_blocks=12, max_num_seqs=6, max_batched_tokens=12)
    chosen = random.Random(seed)
    big = bench.sequence(prompt_of(40, first=1), max_tokens=3)
    others: list[Sequence] = []
    num_steps = 0
    while big.finish is None:
        while len(bench.scheduler.waiting) < 4:
            others.append(bench.sequence(prompt_of(chosen.choice(lengths), first=len(others)), max_tokens=3))
            bench.add(others[-1])
            if len(others) == 3:
                bench.add(big)
        bench.step()
        num_steps += 1
        assert num_steps < 200, "it starves"
    bench.drain()

    assert [make_output(seq) for seq in others] == [expected(seq) for seq in others]
