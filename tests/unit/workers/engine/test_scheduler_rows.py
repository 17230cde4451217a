"""Rows that give way: those of the class batch to others, those of a flood to tenants below their share."""

import pytest

from penstock.wire.frames import Finish, StepCosts
from penstock.workers.engine.prompt_budget import BATCH_PROMPT_S
from penstock.workers.engine.scheduler import MAX_PARTIAL
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of


def test_batch_rows_wait_behind_others_and_lose_their_places_and_blocks_to_them() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=2)
    batch = [bench.sequence(prompt_of(8, first=first), max_tokens=9) for first in range(3)]
    for seq in batch:
        seq.is_batch, seq.weight = True, 0.1
    bench.add(*batch)
    assert [chunk.seq for chunk in bench.step().chunks] == batch[:2]
    urgent = bench.sequence(prompt_of(30, first=5), max_tokens=2)
    bench.add(urgent)
    step = bench.step()

    assert (step.preempted, [chunk.seq for chunk in step.chunks]) == ([batch[1]], [urgent, batch[0]])
    assert bench.scheduler.running == [urgent, batch[0]]
    assert list(bench.scheduler.waiting) == [batch[1], batch[2]]
    bench.drain()
    assert [make_output(seq) for seq in (*batch, urgent)] == [expected(seq) for seq in (*batch, urgent)]


def test_what_a_running_sequence_holds_of_its_prompt_counts_when_batch_rows_are_to_make_room() -> None:
    bench = Bench(num_blocks=9, max_batched_tokens=64)
    holds, batch = bench.sequence(prompt_of(24), max_tokens=12), bench.sequence(prompt_of(7, first=1), max_tokens=5)
    batch.is_batch, batch.weight = True, 0.1
    bench.add(holds, batch)
    bench.step()
    urgent = bench.sequence(prompt_of(31), max_tokens=1)  # 8 blocks, of which 6 are held
    bench.add(urgent)

    step = bench.step()

    assert (step.preempted, [chunk.seq for chunk in step.chunks]) == ([batch], [holds, urgent])
    bench.drain()
    assert [make_output(seq) for seq in (holds, batch, urgent)] == [expected(seq) for seq in (holds, batch, urgent)]


def test_batch_rows_are_not_preempted_where_that_gives_no_room() -> None:
    """What they hold of the prompt has to be held all the same."""
    bench = Bench(num_blocks=8, max_batched_tokens=64)
    other, batch = bench.sequence(prompt_of(15, first=1), max_tokens=9), bench.sequence(prompt_of(8), max_tokens=4)
    batch.is_batch = True
    bench.add(other, batch)
    bench.step()
    urgent = bench.sequence(prompt_of(17), max_tokens=1)  # 5 blocks; 1 is free, 3 are of the batch row, 2 both's
    bench.add(urgent)

    assert not bench.step().preempted
    bench.drain()
    assert [make_output(seq) for seq in (other, batch, urgent)] == [expected(seq) for seq in (other, batch, urgent)]


def test_prompts_of_the_class_batch_in_part_keep_no_other_prompt_waiting() -> None:
    bench = Bench(max_batched_tokens=16)
    batch = [bench.sequence(prompt_of(60, first=first)) for first in range(MAX_PARTIAL)]
    for seq in batch:
        seq.is_batch = True
    bench.add(*batch)
    bench.step()
    urgent = bench.sequence(prompt_of(40, first=9))
    bench.add(urgent)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [
        (batch[0], 1),
        (batch[1], 1),
        (urgent, 14),
    ]
    bench.drain()


def test_prompts_of_the_class_batch_take_little_of_a_step_beside_others_and_all_of_it_alone() -> None:
    bench = Bench(max_batched_tokens=64, costs=StepCosts(base_s=0.01, prefill_token_s=BATCH_PROMPT_S / 10))
    other = bench.sequence(prompt_of(4), max_tokens=4)
    batch = [bench.sequence(prompt_of(40, first=first), max_tokens=1) for first in range(1, 4)]
    for seq in batch:
        seq.is_batch = True
    bench.add(other)
    bench.step()
    bench.add(*batch)
    beside = [[chunk.num_tokens for chunk in bench.step().chunks] for _ in range(2)]
    bench.step()
    assert other.finish is not None
    left = sum(seq.num_uncomputed_tokens for seq in batch)

    assert [chunks[0] for chunks in beside] == [1, 1]
    assert all(10 <= sum(chunks[1:]) <= 10 + len(batch) for chunks in beside)
    assert sum(chunk.num_tokens for chunk in bench.step().chunks) == min(64, left)
    bench.drain()
    assert [make_output(seq) for seq in (other, *batch)] == [expected(seq) for seq in (other, *batch)]


def test_a_prompt_of_another_class_shares_its_step_with_little_of_batch_prompts() -> None:
    bench = Bench(max_batched_tokens=64, costs=StepCosts(base_s=0.01, prefill_token_s=BATCH_PROMPT_S / 10))
    urgent, batch = bench.sequence(prompt_of(20)), bench.sequence(prompt_of(40, first=1))
    batch.is_batch = True
    bench.add(urgent, batch)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(urgent, 20), (batch, 10)]
    bench.drain()


def test_nobody_waits_for_a_prefix_that_a_batch_row_computes_but_batch_rows() -> None:
    """A published prefix is computed for all tenants, and batch rows proceed slowly while others are there."""
    bench = Bench(max_batched_tokens=16)
    batch, urgent, late = (bench.sequence(prompt_of(40)) for _ in range(3))
    batch.is_batch = late.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(urgent, late)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(batch, 1), (urgent, 15)]
    bench.drain()
    assert [make_output(seq) for seq in (batch, urgent, late)] == [expected(seq) for seq in (batch, urgent, late)]


def test_a_batch_row_is_preempted_before_a_newer_one_of_another_class() -> None:
    bench = Bench(num_blocks=6)
    batch, first, second = (bench.sequence(prompt_of(7, first=number), max_tokens=14) for number in range(3))
    batch.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(first, second)
    bench.drain()

    assert batch.num_preemptions > 0
    assert first.num_preemptions == 0
    assert [make_output(seq) for seq in (batch, first, second)] == [expected(seq) for seq in (batch, first, second)]


def test_a_batch_prompt_takes_what_the_others_leave_of_the_budget() -> None:
    bench = Bench(max_batched_tokens=16)
    batch, urgent = bench.sequence(prompt_of(60)), bench.sequence(prompt_of(40, first=1))
    batch.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(urgent)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(batch, 1), (urgent, 15)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(urgent, 16)]
    bench.drain()


def test_batch_rows_of_a_gateway_that_knows_no_weights_all_give_way() -> None:
    bench = Bench(max_num_seqs=2)
    batch = [bench.sequence(prompt_of(8, first=first), max_tokens=9) for first in range(2)]
    urgent = [bench.sequence(prompt_of(8, first=first), max_tokens=2) for first in range(5, 7)]
    for seq in (*batch, *urgent):
        seq.weight = 0.0
    for seq in batch:
        seq.is_batch = True
    bench.add(*batch)
    bench.step()
    bench.add(*urgent)

    assert bench.step().preempted == batch[::-1]
    bench.drain()


@pytest.mark.parametrize("max_num_seqs", [22, 1])
def test_batch_rows_give_way_and_do_not_starve_under_a_load_that_never_ends(max_num_seqs: int) -> None:
    bench = Bench(num_blocks=400, max_num_seqs=max_num_seqs, max_batched_tokens=64)
    batch = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant="night") for first in range(4)]
    for seq in batch:
        seq.is_batch, seq.weight = True, 0.1
    bench.add(*batch)
    rows = []
    for number in range(150 if max_num_seqs > 1 else 600):
        while len(bench.scheduler.waiting) < 8:
            bench.add(bench.sequence(prompt_of(6, first=number % 30), max_tokens=10, tenant="day"))
        rows.append(sum(chunk.seq.tenant == "night" for chunk in bench.step().chunks))

    assert all(seq.finish is Finish.LENGTH for seq in batch)
    assert sum(rows[20:]) < 0.2 * max_num_seqs * len(rows), "the others have the most of the rows"


def test_rows_of_many_batch_tenants_give_way_too() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=6, max_batched_tokens=64)
    batch = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant=f"night {first}") for first in range(6)]
    for number, seq in enumerate(batch):
        seq.is_batch, seq.weight, seq.arrival_s = True, 0.1, float(number)
    bench.add(*batch)
    bench.step()
    urgent = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant="day") for first in range(10, 15)]
    bench.add(*urgent)

    assert {chunk.seq for chunk in bench.step().chunks} == {batch[0], *urgent}
    bench.drain()


# rows of tenants


def test_a_row_of_a_flood_gives_way_in_the_next_step_and_goes_on_where_it_was() -> None:
    bench = Bench(max_num_seqs=4)
    flood = [bench.sequence(prompt_of(9, first=first), max_tokens=12, tenant="flood") for first in range(7)]
    bench.add(*flood)
    bench.step()
    light = bench.sequence(prompt_of(5, first=20), max_tokens=3, tenant="light")
    bench.add(light)
    step = bench.step()

    assert step.preempted == [flood[3]]
    assert {chunk.seq for chunk in step.chunks} == {*flood[:3], light}
    assert list(bench.scheduler.waiting) == flood[3:]
    bench.drain()
    assert [make_output(seq) for seq in (*flood, light)] == [expected(seq) for seq in (*flood, light)]
    assert max(seq.num_preemptions for seq in flood) == 1


def test_rows_of_tenants_settle_by_weight_and_none_is_taken_back() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=14, max_batched_tokens=64)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    for tenant, weight in weights.items():
        for number in range(20):
            seq = bench.sequence(prompt_of(4, first=number), max_tokens=40, tenant=tenant)
            seq.weight = weight
            bench.add(seq)
    counts = []
    for _ in range(20):
        step = bench.step()
        counts.append({tenant: sum(chunk.seq.tenant == tenant for chunk in step.chunks) for tenant in weights})

    rows = counts[-1]
    assert counts[0] == {"one": 14, "two": 0, "four": 0}, "the first to come have all"
    assert all(rows[v] / weights[v] <= (rows[w] + 1) / weights[w] for v in weights for w in weights if v != w)
    assert all(each == rows for each in counts[5:]), "nobody takes rows back and forth"


def test_the_newest_rows_of_a_flood_give_the_blocks_that_a_light_tenant_lacks() -> None:
    bench = Bench(num_blocks=12)
    flood = [bench.sequence(prompt_of(11, first=first), max_tokens=2, tenant="flood") for first in range(4)]
    for number, seq in enumerate(flood):
        seq.arrival_s = -float(number)
    bench.add(*flood)
    bench.step()
    light = bench.sequence(prompt_of(12, first=20), max_tokens=1, tenant="light")
    bench.add(light)
    step = bench.step()

    assert step.preempted == [flood[0]], "the newest by its arrival, not by its place"
    assert light in {chunk.seq for chunk in step.chunks}
    bench.drain()


def test_no_row_gives_way_where_all_that_may_are_not_enough() -> None:
    bench = Bench(num_blocks=12)
    stem = prompt_of(16, first=3)
    flood = [bench.sequence([*stem, first], max_tokens=6, tenant="flood") for first in range(4)]
    bench.add(*flood)
    while any(seq.num_computed_tokens < 17 for seq in flood):
        bench.step()
    light = bench.sequence(prompt_of(40, first=20), max_tokens=1, tenant="light")
    bench.add(light)

    assert bench.step().preempted == [], "the stem is shared, so three rows of it would free three blocks"
    bench.drain()
    assert make_output(light) == expected(light)


# invariants 2 and 3 over random schedules
