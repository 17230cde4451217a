from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from penstock.perf.model import step_time_s
from penstock.wire.frames import Stairs, StepCosts
from penstock.workers.config import EngineConfig, SpeculationConfig, TimedConfig
from penstock.workers.engine.probe import (
    BUDGET_S,
    DECODE_REPEATS,
    LEAST_ROW_POINTS,
    MOST_WRITTEN_BYTES,
    REPEATS,
    ROW_COUNTS,
    measure,
    measure_rows,
    plan_points,
)
from penstock.workers.engine.sequence import Sequence, Step
from penstock.workers.engine.timed import TimedRunner

TRUTH = StepCosts(
    base_s=0.004,
    row_s=0.0005,
    prefill_token_s=0.00005,
    attention_s=1e-8,
    kv_token_s=2e-7,
    sampled_row_s=0.0003,
)
CONFIG = EngineConfig(block_size=16, max_num_seqs=16, max_batched_tokens=256)


@dataclass
class ModelledRunner:
    """Takes the time the model says, `slowness` times."""

    num_blocks: int = 2048
    max_model_len: int = 4096
    stairs: Stairs | None = None
    slowness: float = 1.0
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    forgotten: list[Sequence] = field(default_factory=list)

    def launch(self, step: Step) -> Callable[[], object]:
        self.compute(step)
        return lambda: None

    def compute(self, step: Step) -> None:
        shape = step.shape
        self.steps.append(step)
        self.now += self.slowness * step_time_s(
            TRUTH,
            rows=shape.rows,
            prefill_tokens=shape.prefill_tokens,
            query_context=shape.query_context,
            kv_tokens=shape.kv_tokens,
            sampled_rows=shape.sampled_rows,
        )

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)

    def clock(self) -> float:
        return self.now


def test_the_probe_finds_every_coefficient() -> None:
    runner = ModelledRunner()
    costs = measure(runner, CONFIG, runner.clock)

    for name in ("base_s", "row_s", "prefill_token_s", "attention_s", "kv_token_s", "sampled_row_s"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name


def test_every_step_of_the_probe_fits_the_runner_and_is_forgotten() -> None:
    runner = ModelledRunner(num_blocks=20, max_model_len=300)
    measure(runner, CONFIG, runner.clock)
    chunks = [chunk for step in runner.steps for chunk in step.chunks]

    for chunk in chunks:
        assert chunk.seq.num_tokens <= 300
        assert len(chunk.seq.block_table) * CONFIG.block_size >= chunk.end
        assert all(0 <= block < 20 for block in chunk.seq.block_table)
    assert all(step.num_tokens <= CONFIG.max_batched_tokens for step in runner.steps)
    assert {chunk.seq for chunk in chunks} == set(runner.forgotten)


def test_a_slow_runner_is_probed_for_a_bounded_time() -> None:
    runner = ModelledRunner(slowness=100)
    costs = measure(runner, CONFIG, runner.clock)

    longest = max(
        100 * step_time_s(TRUTH, rows=16, prefill_tokens=256, query_context=256 * 1500, kv_tokens=16 * 1024), 0
    )
    assert runner.now < BUDGET_S + 2 * longest
    assert costs.base_s > 0


@pytest.mark.parametrize("slowness", [1, 50, 100, 150, 200, 400, 1000])
def test_the_costs_of_a_slow_runner_hold_for_steps_that_the_probe_had_no_time_for(slowness: float) -> None:
    runner = ModelledRunner(slowness=slowness)
    costs = measure(runner, CONFIG, runner.clock)

    for rows, context, prefill in ((1, 1, 0), (3, 300, 0), (16, 700, 0), (12, 200, 0), (0, 0, 200), (12, 400, 100)):
        amounts = {
            "rows": rows,
            "prefill_tokens": prefill,
            "query_context": prefill * prefill / 2,
            "kv_tokens": rows * (context + 1),
        }
        assert step_time_s(costs, **amounts) == pytest.approx(slowness * step_time_s(TRUTH, **amounts), rel=0.3)


def test_the_fastest_of_the_repeats_counts() -> None:
    class Hiccup(ModelledRunner):
        def compute(self, step: Step) -> None:
            super().compute(step)
            if len(self.steps) == 4:
                self.now += 0.5

    runner = Hiccup()
    costs = measure(runner, CONFIG, runner.clock)

    num_writing = 1 + sum(bool(step.copies) for step in runner.steps)  # a block is computed, then copied
    points = list(plan_points(CONFIG, 2048, 4096))
    num_decoding = sum(not point.prefill for point in points)
    num_runs = REPEATS * (len(points) - num_decoding) + DECODE_REPEATS * num_decoding
    assert len(runner.steps) - num_writing == 1 + num_runs
    assert costs.base_s == pytest.approx(TRUTH.base_s, rel=0.05)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
def test_no_step_has_more_sequences_than_the_engine_runs(rows: int) -> None:
    points = list(plan_points(EngineConfig(max_num_seqs=rows, max_batched_tokens=64), 64, 200))

    assert max(point.rows + (point.prefill > 0) for point in points) == rows
    assert any(point.rows > 0 and point.prefill > 0 for point in points) == (rows > 1)


def test_a_timed_runner_is_taken_at_its_word() -> None:
    timed = TimedConfig(base_s=1000.0, row_s=0.5)

    assert measure(
        TimedRunner(EngineConfig(runner="timed", timed=timed)), EngineConfig(runner="timed", timed=timed)
    ) == StepCosts(base_s=1000.0, row_s=0.5)


def test_the_cost_of_a_draft_token_is_measured_where_drafts_are_made() -> None:
    class Drafting(ModelledRunner):
        def compute(self, step: Step) -> None:
            for chunk in step.chunks:
                chunk.draft = [0] * chunk.max_drafts
                assert len(chunk.seq.block_table) * CONFIG.block_size >= chunk.end + chunk.max_drafts
            super().compute(step)
            shape = step.shape
            beyond_s = 0.001 * max(0, shape.rows + shape.draft_tokens - 16)  # where products get dear
            self.now += 0.0003 * shape.draft_tokens + 0.0007 * shape.draft_rounds + beyond_s * bool(shape.draft_tokens)

    runner, plain = Drafting(), ModelledRunner()
    costs = measure(
        runner, structs.replace(CONFIG, speculation=SpeculationConfig(method="ngram", max_draft_tokens=5)), runner.clock
    )
    measure(plain, CONFIG, plain.clock)

    assert costs.draft_token_s == pytest.approx(0.0003, rel=0.05)
    assert costs.draft_round_s == pytest.approx(0.0007, rel=0.05)
    assert costs.row_s == pytest.approx(TRUTH.row_s, rel=0.05)
    assert all(step.num_tokens <= CONFIG.max_batched_tokens for step in runner.steps)
    assert {chunk.max_drafts for step in plain.steps for chunk in step.chunks} == {0}


def test_drafts_that_seem_to_cost_nothing_cost_half_of_a_row() -> None:
    class Drafting(ModelledRunner):
        def compute(self, step: Step) -> None:
            for chunk in step.chunks:
                chunk.draft = [0] * chunk.max_drafts
            super().compute(step)

    runner, speculation = Drafting(), SpeculationConfig(method="ngram", max_draft_tokens=5)
    costs = measure(runner, structs.replace(CONFIG, speculation=speculation), runner.clock)

    assert costs.draft_token_s == pytest.approx(TRUTH.row_s / 2, rel=0.05)


def test_every_context_is_written_before_it_is_read() -> None:
    runner = ModelledRunner()
    measure(runner, CONFIG, runner.clock)

    written: set[int] = set()
    for step in runner.steps:
        written.update(block for pair in step.copies for block in pair)
        for chunk in step.chunks:
            if not chunk.start:
                written.update(chunk.seq.block_table)
            else:
                assert written.issuperset(chunk.seq.block_table)


def test_writing_is_not_charged_to_the_probes_time() -> None:
    class SlowWriting(ModelledRunner):
        def compute(self, step: Step) -> None:
            super().compute(step)
            self.now += BUDGET_S * bool(step.copies)

    runner, quick = SlowWriting(), ModelledRunner()
    costs = measure(runner, CONFIG, runner.clock)

    assert runner.now > BUDGET_S
    assert costs.kv_token_s == pytest.approx(measure(quick, CONFIG, quick.clock).kv_token_s)
    assert len(runner.steps) == len(quick.steps)


def test_a_gpus_cache_is_not_written() -> None:
    runner = ModelledRunner()
    config = EngineConfig(block_size=16, max_num_seqs=16, max_batched_tokens=256, device="cuda")
    measure(runner, config, runner.clock)

    assert not any(step.copies for step in runner.steps)


def test_a_bounded_part_of_a_large_cache_is_written_and_shows_every_coefficient() -> None:
    block_bytes = 2 * 2**20  # of an 8B
    runner = ModelledRunner(num_blocks=8192)
    costs = measure(runner, structs.replace(CONFIG, kv_memory_bytes=8192 * block_bytes), runner.clock)
    touched = {block for step in runner.steps for chunk in step.chunks for block in chunk.seq.block_table}
    touched.update(block for step in runner.steps for pair in step.copies for block in pair)

    assert len(touched) * block_bytes <= MOST_WRITTEN_BYTES
    for name in ("base_s", "row_s", "prefill_token_s", "attention_s", "kv_token_s", "sampled_row_s"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    for step in runner.steps:
        if not step.shape.prefill_tokens:
            blocks = [block for chunk in step.chunks for block in chunk.seq.block_table]
            assert len(set(blocks)) == len(blocks), "a block is read twice"


class DraftingHead(ModelledRunner):
    """Rows beyond eight are dear; a draft takes a call, and each of its tokens a round and a row of it."""

    def compute(self, step: Step) -> None:
        for chunk in step.chunks:
            chunk.draft = [0] * chunk.max_drafts
        shape = step.shape
        num_tokens = shape.rows + shape.draft_tokens
        self.steps.append(step)
        self.now += self.slowness * (0.004 + 0.0002 * num_tokens + 0.001 * max(0, num_tokens - 8))
        if shape.draft_rounds:
            self.now += self.slowness * (0.0005 + shape.draft_rounds * (0.0001 + 0.00003 * shape.rows))


HEAD = structs.replace(CONFIG, speculation=SpeculationConfig(method="head", head="demo", max_draft_tokens=3))


def test_rows_and_what_drafts_take_beside_them_are_told_apart() -> None:
    runner = DraftingHead()
    times = measure_rows(runner, HEAD, TRUTH, runner.clock)

    assert times is not None
    assert [count for count, _ in times.steps] == sorted(ROW_COUNTS)
    assert times.step_s(8) == pytest.approx(0.0056)
    assert times.step_s(12) == pytest.approx(0.0104)
    assert times.call_s == pytest.approx(0.0005, rel=0.05)
    assert times.round_s == pytest.approx(0.0001, rel=0.05)
    assert times.made_token_s == pytest.approx(0.00003, rel=0.05)
    assert len(runner.steps) == DECODE_REPEATS * (len(ROW_COUNTS) + 3 * 2)


def test_a_slow_model_is_not_measured_for_long() -> None:
    runner = DraftingHead(slowness=500.0)
    times = measure_rows(runner, HEAD, TRUTH, runner.clock)

    assert times is not None
    assert len(times.steps) == LEAST_ROW_POINTS
    assert runner.now == pytest.approx(500 * (0.0042 + 0.0056))
    assert (times.call_s, times.round_s) == (0.0, TRUTH.draft_round_s), "what the probe says"


@pytest.mark.parametrize("slowness", [20.0, 60.0])
def test_what_drafts_take_is_measured_before_most_rows(slowness: float) -> None:
    runner = DraftingHead(slowness=slowness)
    times = measure_rows(runner, HEAD, TRUTH, runner.clock)

    assert times is not None
    assert times.call_s == pytest.approx(slowness * 0.0005, rel=0.3)


def test_a_head_of_one_token_has_its_price_for_each_sequence_too() -> None:
    runner = DraftingHead()
    one = structs.replace(HEAD, speculation=structs.replace(HEAD.speculation, max_draft_tokens=1))
    times = measure_rows(runner, one, TRUTH, runner.clock)

    assert times is not None
    assert times.made_token_s == pytest.approx(0.00003, rel=0.05)


def test_rows_are_not_measured_where_they_can_not_be_told_apart() -> None:
    assert measure_rows(DraftingHead(max_model_len=10), HEAD, TRUTH) is None
    timed = EngineConfig(runner="timed", timed=TimedConfig(base_s=1.0))
    assert measure_rows(TimedRunner(timed), timed, TRUTH) is None
