"""Targets of seconds per token: how full a step is, which rows yield, who is admitted, and that the answers are the
same."""

import pytest

from penstock.perf.pace import LEAST_TOKENS, MAX_CREDIT, ROW_SHARE, SLACK
from penstock.wire.frames import StepCosts
from penstock.workers.engine.paced_steps import MAX_SKIPPED, MAX_SKIPPED_BATCH
from penstock.workers.engine.sequence import Sequence
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of

COSTS = StepCosts(base_s=0.010, row_s=0.001, prefill_token_s=0.001)
TPOT_S = 0.05
PACE_S = TPOT_S * (1 - SLACK)


def make_bench(costs: StepCosts = COSTS, max_num_seqs: int = 64, admission_lookahead: int | None = None) -> Bench:
    return Bench(
        num_blocks=4000,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=512,
        costs=costs,
        admission_lookahead=admission_lookahead,
    )


def answering(bench: Bench, count: int = 1, tpot_s: float | None = TPOT_S, *, is_batch: bool = False) -> list[Sequence]:
    """Sequences that decode, with the longest answers."""
    seqs = [bench.sequence(prompt_of(3, first=number), max_tokens=150) for number in range(count)]
    for seq in seqs:
        seq.tpot_s, seq.is_batch = tpot_s, is_batch
        if is_batch:
            seq.tenant, seq.weight = "batch", 0.1
    bench.add(*seqs)
    while any(not seq.num_output_tokens for seq in seqs):
        bench.step()
    return seqs


def test_a_long_prompt_comes_in_pieces_that_keep_the_answers_pace() -> None:
    bench = make_bench()
    (answer,) = answering(bench)
    prompt = bench.sequence(prompt_of(900, first=7))
    bench.add(prompt)

    steps, ends = 0, [bench.now]
    while not prompt.num_output_tokens:
        bench.step()
        steps += 1
        ends.append(bench.now)
        assert bench.now - ends[0] <= steps * PACE_S + 1e-9
        assert ends[-1] - ends[-2] <= (1 + MAX_CREDIT) * PACE_S
    assert ends[-1] - ends[0] >= 0.95 * steps * PACE_S  # and no time was given away
    bench.drain()
    assert make_output(prompt) == expected(prompt)
    assert make_output(answer) == expected(answer)


def test_without_a_target_a_long_prompt_fills_the_step() -> None:
    bench = make_bench()
    answering(bench, tpot_s=None)
    bench.add(bench.sequence(prompt_of(900, first=7)))

    assert bench.step().num_tokens == 512


def test_a_target_that_no_step_keeps_holds_nobody_back() -> None:
    bench = make_bench()
    answering(bench, tpot_s=0.011)  # a row alone takes as long
    bench.add(bench.sequence(prompt_of(900, first=7)))

    assert bench.step().num_tokens == 512


def test_a_longer_step_is_paid_from_what_quick_steps_have_left() -> None:
    bench = make_bench()
    (answer,) = answering(bench)
    for _ in range(20):
        bench.step()
    assert answer.paced_since_s is not None
    bench.add(bench.sequence(prompt_of(900, first=7)))
    begin_s = bench.now
    bench.step()

    assert bench.now - begin_s == pytest.approx((1 + MAX_CREDIT) * PACE_S, abs=0.001)


def test_a_debt_is_paid_back_by_shorter_steps() -> None:
    bench = make_bench()
    (answer,) = answering(bench)
    bench.step()
    bench.now += 0.06  # a step was longer than predicted
    bench.add(bench.sequence(prompt_of(900, first=7)))
    begin_s = bench.now
    lengths = []
    for _ in range(10):
        bench.step()
        lengths.append(bench.now - begin_s)
        begin_s = bench.now

    assert lengths[0] < 0.9 * PACE_S
    assert answer.paced_since_s is not None
    num_tokens = answer.num_output_tokens - answer.num_unpaced_tokens
    assert bench.now - answer.paced_since_s <= num_tokens * PACE_S + 1e-9


def test_a_debt_that_cant_be_paid_back_is_forgiven() -> None:
    bench = make_bench()
    answering(bench)
    bench.now += 60.0
    bench.add(bench.sequence(prompt_of(900, first=7)))
    begin_s = bench.now
    bench.step()

    assert bench.now - begin_s == pytest.approx(PACE_S, abs=0.001)


def test_prompts_go_on_when_rows_take_all_the_time() -> None:
    bench = make_bench()
    answers = answering(bench, 30, tpot_s=None)
    prompt = bench.sequence(prompt_of(900, first=7))
    bench.add(prompt)
    bench.step()
    for seq in answers:
        seq.tpot_s = 0.02  # 30 rows take 40 ms
    bench.scheduler.has_targets = True
    before = prompt.num_computed_tokens
    bench.step()

    assert prompt.num_computed_tokens - before == LEAST_TOKENS
    bench.drain()
    assert make_output(prompt) == expected(prompt)


def test_batch_rows_yield_first_and_come_at_the_latest_after_the_bound() -> None:
    bench = make_bench()
    batch = answering(bench, 35, tpot_s=None, is_batch=True)
    standard = answering(bench, 20, tpot_s=None)
    fast = answering(bench, 5)

    counts = dict.fromkeys((*batch, *standard, *fast), 0)
    waits = {seq: [0] for seq in counts}
    for _ in range(60):
        chosen = {chunk.seq for chunk in bench.step().chunks}
        for seq in counts:
            counts[seq] += seq in chosen
            waits[seq].append(0 if seq in chosen else waits[seq][-1] + 1)

    assert all(counts[seq] == 60 for seq in fast)
    assert all(max(waits[seq]) <= MAX_SKIPPED for seq in standard)
    assert all(max(waits[seq]) <= MAX_SKIPPED_BATCH for seq in batch)
    assert min(counts[seq] for seq in standard) > max(counts[seq] for seq in batch)
    assert sum(counts[seq] for seq in batch) > 0
    bench.drain()
    assert all(make_output(seq) == expected(seq) for seq in counts)


def test_rows_of_a_looser_target_yield_and_keep_it() -> None:
    bench = make_bench()
    loose = answering(bench, 40, tpot_s=0.12)
    strict = answering(bench, 5)
    begin_s, before = bench.now, [seq.num_output_tokens for seq in loose]
    for _ in range(100):
        bench.step()

    assert bench.now - begin_s <= 100 * PACE_S
    for seq, num_before in zip(loose, before, strict=True):
        assert (bench.now - begin_s) / (seq.num_output_tokens - num_before) < 0.12
    assert all(seq.num_output_tokens > 100 for seq in strict)


def test_a_row_that_would_break_the_target_waits_in_the_queue() -> None:
    bench = make_bench()
    seqs = [bench.sequence(prompt_of(3, first=number), max_tokens=50) for number in range(60)]
    for seq in seqs:
        seq.tpot_s = TPOT_S
    bench.add(*seqs)
    for _ in range(20):
        bench.step()

    assert len(bench.scheduler.running) == int(ROW_SHARE * PACE_S / 0.001) - 10  # 10 ms, and 1 ms for each row
    assert bench.scheduler.num_places == len(bench.scheduler.running) + 5  # that wait for the next place
    bench.drain()
    assert all(make_output(seq) == expected(seq) for seq in seqs)


def test_batch_sequences_wait_for_time_beside_a_target_and_leave_the_replica_open() -> None:
    bench = make_bench()
    answering(bench, 20)
    batch = [bench.sequence(prompt_of(3, first=number), max_tokens=9) for number in range(30)]
    for seq in batch:
        seq.is_batch, seq.weight, seq.tenant = True, 0.1, "batch"
    bench.add(*batch)
    for _ in range(5):
        bench.step()

    assert bench.scheduler.waiting
    bench.drain()
    assert all(make_output(seq) == expected(seq) for seq in batch)


def test_a_sequence_with_a_target_is_admitted_beside_rows_that_yield() -> None:
    bench = make_bench()
    answering(bench, 50, tpot_s=None, is_batch=True)
    seq = bench.sequence(prompt_of(3), max_tokens=50)
    seq.tpot_s = TPOT_S
    bench.add(seq)
    bench.step()
    begin_s = bench.now
    for _ in range(20):
        bench.step()

    assert seq.num_output_tokens >= 20
    assert bench.now - begin_s <= 20 * PACE_S


@pytest.mark.parametrize("is_batch", [False, True])
def test_an_idle_replica_without_lookahead_stays_open(is_batch: bool) -> None:
    bench = make_bench(max_num_seqs=2, admission_lookahead=0)
    answering(bench, 2)

    assert bench.scheduler.num_places == 2  # nobody waits behind full rows
    bench.drain()
    assert bench.scheduler.num_places == 1
    answering(bench, is_batch=is_batch)
    assert bench.scheduler.num_places == 2


def test_a_tenant_below_its_share_takes_rows_where_the_target_is_the_bound() -> None:
    bench = make_bench()
    flood = [bench.sequence(prompt_of(3, first=number), max_tokens=90) for number in range(60)]
    for seq in flood:
        seq.tpot_s, seq.tenant = TPOT_S, "flood"
    bench.add(*flood)
    for _ in range(20):
        bench.step()
    num_running = len(bench.scheduler.running)
    assert bench.scheduler.waiting, "the target is the bound"
    quiet = [bench.sequence(prompt_of(3, first=number), max_tokens=20) for number in range(5)]
    for seq in quiet:
        seq.tpot_s, seq.tenant = TPOT_S, "quiet"
    bench.add(*quiet)
    step = bench.step()

    assert [seq.tenant for seq in step.preempted] == ["flood"] * 5
    assert set(quiet) <= set(bench.scheduler.running)
    assert len(bench.scheduler.running) == num_running
    bench.drain()
    assert all(make_output(seq) == expected(seq) for seq in (*flood, *quiet))


@pytest.mark.parametrize("base_s", [0.030, 0.036, 0.040, 0.043])
def test_a_row_that_takes_nearly_all_of_the_pace_leaves_the_others_the_rest(base_s: float) -> None:
    row_s = 0.0002
    bench = make_bench(StepCosts(base_s=base_s, row_s=row_s, prefill_token_s=0.00001))
    seqs = [bench.sequence(prompt_of(3, first=number), max_tokens=50) for number in range(64)]
    for seq in seqs:
        seq.tpot_s = TPOT_S
    bench.add(*seqs)
    for _ in range(10):
        bench.step()

    num_running = len(bench.scheduler.running)
    assert num_running >= min(30, int((PACE_S - base_s - row_s) / row_s / 2))
    assert base_s + num_running * row_s <= PACE_S
    bench.drain()


@pytest.mark.parametrize("num_tokens", [4000, 20_000])
def test_a_context_too_long_for_its_target_runs_beside_others(num_tokens: int) -> None:
    costs = StepCosts(base_s=0.010, row_s=0.0005, prefill_token_s=0.00001, kv_token_s=1e-5)
    bench = Bench(num_blocks=9000, max_num_seqs=16, max_batched_tokens=30_000, costs=costs)
    short = answering(bench, 5)
    long = bench.sequence(prompt_of(num_tokens), max_tokens=30)
    long.tpot_s = TPOT_S
    bench.add(long)
    bench.step()
    assert bench.scheduler.running == [*short, long]
    while not long.num_output_tokens:
        bench.step()
    late = bench.sequence(prompt_of(3, first=9), max_tokens=60)
    late.tpot_s = TPOT_S
    bench.add(late)
    begin_s, before = bench.now, long.num_output_tokens
    for _ in range(40):
        bench.step()

    assert late.num_output_tokens
    assert (long.num_output_tokens - before) >= 40 // (MAX_SKIPPED + 1)
    if num_tokens == 4000:  # every fourth step of 50 ms leaves the others their pace
        assert bench.now - begin_s <= 40 * PACE_S
    bench.drain()
    assert make_output(long) == expected(long)
