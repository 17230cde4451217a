"""The probe at start: measures a runner's step costs by made-up sequences over a small grid, which shows every
coefficient.

Not a benchmark, and nothing of it stays: it runs before the engine's first step, in blocks that nobody holds and nobody
publishes. Steady decoding alone can't tell the cost of a row from that of its context, so rows, prefill and context
vary independently.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.unused_pages import release_unused
from penstock.perf.fit import StepSample, fit
from penstock.wire.frames import SamplingParams, Stairs, StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.row_times import RowTimes
from penstock.workers.engine.sequence import Chunk, Resident, Sequence, Step
from penstock.workers.engine.timed import TimedRunner

BUDGET_S = 4.0
"""The probe stops after the step that exceeds this; the points that matter most come first. Writing what the steps read
does not count."""
LEAST_POINTS = 4
"""Points that are measured in any case: without one of them a fit would charge what a step takes to whatever it saw
least of, a context token for example."""
REPEATS, DECODE_REPEATS = 2, 5
"""Times each point is measured, and each that only decodes, which is soon done and easily disturbed; the fastest
counts."""
CONTEXT = 1024
"""Context tokens of the long decode rows and chunks, as far as the cache holds them."""
MOST_WRITTEN_BYTES = 512 * 2**20
"""Most of a cache of a given size that is written, and stays resident: what a CPU replica has by default. Contexts are
shorter where they would take more, so that no step reads a block twice and finds it in a cache of the CPU."""

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95)
"""Parameters that stand for all which take more than the largest logit: most of such requests have these. On a CPU
penalties and log probabilities cost more, for their tokens are chosen outside the step."""

LEAST_TOKEN = 0.5
"""What a draft's token costs at the least, of what a sequence's row does: both are computed alike, and where others
compute meanwhile, drafts can look as if they cost nothing."""
DRAFT_CONTEXT = 8
"""Context tokens of rows that speculate."""
FEW = 8
"""Rows of steps that stand for those of a batch."""
ROW_COUNTS = (1, 8, 2, 4, 12, 9, 16, 24)
"""Rows whose steps are measured where drafts are weighed by them, those that matter most first: products take rows side
by side up to eight, or a few more, and each costs more from some number on."""
ROWS_BUDGET_S, LEAST_ROW_POINTS = 2.0, 2
"""No step of those begins later, but for the first ones: without them there is no line."""


class Probed(Protocol):
    """The part of `penstock.workers.engine.runner.Runner` that the probe needs."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def stairs(self) -> Stairs | None: ...
    def launch(self, step: Step) -> Callable[[], object]: ...
    def forget(self, seq: Sequence) -> None: ...


class Point(NamedTuple):
    """A step to measure: `rows` sequences that decode behind `context` tokens, and a chunk of `prefill` tokens behind
    `prefill_context`."""

    rows: int
    context: int
    prefill: int = 0
    prefill_context: int = 0
    drafts: int = 0
    """Places for draft tokens behind each decoding row."""
    needs_sampling: bool = False
    """Whether tokens are drawn by `SAMPLED`, not by the largest logit."""


def measure(runner: Probed, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> StepCosts:
    """Step costs of a runner, in BUDGET_S, the time of writing and a step at most, or as long as the LEAST_POINTS take;
    those of a timed runner are known."""
    if isinstance(runner, TimedRunner):
        return runner.costs
    num_blocks = count_blocks(config, runner.num_blocks)
    until_s = clock() + BUDGET_S
    best: dict[Point, StepSample] = {}
    points = list(plan_points(config, num_blocks, runner.max_model_len, runner.stairs))
    written: set[int] = set()
    decoding = [point for point in points if not point.prefill]
    for index, point in enumerate([points[0], *points * REPEATS, *decoding * (DECODE_REPEATS - REPEATS)]):
        if config.device == "cpu":
            begin_s = clock()
            _write(runner, _make_chunks(point, num_blocks, config.block_size), num_blocks, config.block_size, written)
            until_s += clock() - begin_s
        sample = _run(runner, point, num_blocks, config.block_size, clock)
        if not index:
            continue  # it has built and warmed what the others only use
        best[point] = min(best.get(point, sample), sample, key=lambda sample: sample.seconds)
        if clock() > until_s and len(best) >= LEAST_POINTS:
            break
    release_unused()  # of what sampling and large steps have touched, before the fit touches more
    costs = fit(list(best.values()), runner.stairs)
    release_unused()
    if config.speculation.method == "none":
        return costs
    return msgspec.structs.replace(costs, draft_token_s=max(costs.draft_token_s, LEAST_TOKEN * costs.row_s))


def measure_rows(
    runner: Probed, config: EngineConfig, costs: StepCosts, clock: Callable[[], float] = time.perf_counter
) -> RowTimes | None:
    """What steps of few rows take, and a drafter's drafts beside them. costs: as just measured. Returns None where the
    longest sequences or the fewest rows allow nothing that could be told apart, or in a timed runner."""
    most, rows = config.speculation.max_draft_tokens, config.token_budget // 2
    longest = min(runner.max_model_len, runner.num_blocks * config.block_size) - 1
    num_blocks = count_blocks(config, runner.num_blocks)
    if isinstance(runner, TimedRunner) or rows < 2 or longest <= DRAFT_CONTEXT + most + 1:
        return None
    few = min(config.max_num_seqs, rows, FEW)
    plain = [Point(count, 1) for count in ROW_COUNTS if count <= rows]
    drafted = [Point(count, DRAFT_CONTEXT, drafts=length) for count, length in ((1, 1), (1, most), (few, 1))]
    until_s = clock() + ROWS_BUDGET_S
    best: dict[Point, StepSample] = {}
    for point in [*plain[:2], *drafted, *plain[2:]] * DECODE_REPEATS:
        if clock() > until_s and len(best) >= LEAST_ROW_POINTS:
            break
        sample = _run(runner, point, num_blocks, config.block_size, clock)
        best[point] = min(best.get(point, sample), sample, key=lambda sample: sample.seconds)
    steps = sorted((point.rows, best[point].seconds) for point in plain if point in best)
    rising = accumulate((seconds for _, seconds in steps), max)
    times = RowTimes(costs, tuple(zip((count for count, _ in steps), rising, strict=True)))
    if not all(point in best for point in drafted):
        made_token_s = max(0.0, costs.draft_token_s - costs.row_s)
        return dataclasses.replace(times, round_s=costs.draft_round_s, made_token_s=made_token_s)
    one_s, most_s, few_s = (_made_s(times, best[point], point.rows) for point in drafted)
    token_s = max(0.0, few_s - one_s) / max(1, few - 1)
    each_s = min(max(0.0, most_s - one_s) / (most - 1) if most > 1 else token_s, one_s)
    token_s = min(token_s, each_s)
    return dataclasses.replace(times, call_s=one_s - each_s, round_s=each_s - token_s, made_token_s=token_s)


def _made_s(times: RowTimes, sample: StepSample, rows: int) -> float:
    """Seconds of a step with drafts that are not its tokens'."""
    return max(0.0, sample.seconds - times.step_s(rows + sample.draft_tokens))


def count_blocks(config: EngineConfig, num_blocks: int) -> int:
    """Blocks that the probe uses of a cache of `num_blocks`: all where they need not be written, or where the cache was
    to take what is left."""
    size = config.kv_memory_bytes
    if config.device != "cpu" or size == "auto" or size <= MOST_WRITTEN_BYTES:
        return num_blocks
    return max(1, num_blocks * MOST_WRITTEN_BYTES // size)


def plan_points(
    config: EngineConfig, num_blocks: int, max_model_len: int, stairs: Stairs | None = None
) -> Iterator[Point]:
    """Points that fit the runner, those that matter most first; no step has more than `max_num_seqs` sequences.
    num_blocks: that contexts may take."""
    rows = config.max_num_seqs
    longest = min(max_model_len, num_blocks * config.block_size) - 1
    chunk = max(2, min(config.token_budget, longest // 2))
    piece = max(2, chunk // 4)  # of a CPU's 512 tokens 128: fewer take longer each, with activations: auto
    few = min(rows, FEW)
    context, shared = (
        max(1, min(CONTEXT, longest - chunk, num_blocks // count * config.block_size - 1)) for count in (few, rows)
    )
    yield Point(1, 1)
    yield Point(few, 1)
    yield Point(few, context)
    yield Point(0, 0, piece)
    yield Point(few, 1, needs_sampling=True)
    if stairs is not None:
        yield from _plan_stair_points(stairs, rows, chunk)
    yield from _plan_draft_points(config, few, context)
    yield Point(0, 0, piece, context)
    yield Point(1, context)
    yield Point(1, 1, needs_sampling=True)
    yield Point(rows, 1)
    yield Point(rows, shared)
    yield Point(0, 0, chunk)  # of a slow model as long as all before it, and then the last one
    yield Point(min(few, rows - 1), context, chunk // 2 + 1, context)


def _plan_stair_points(stairs: Stairs, rows: int, chunk: int) -> Iterator[Point]:
    """Points that show what a device takes that replays recorded steps: one that is not recorded and computes least,
    one by each recording of decode steps."""
    least = max(2, stairs.recorded_tokens + 1)
    for prefill in sorted({least, 2 * least}):
        if prefill <= chunk:
            yield Point(0, 0, prefill)
    for place, _ in stairs.cliffs:
        if place < min(rows, stairs.recorded_rows):
            yield Point(place, 1)
        elif place <= min(chunk, stairs.recorded_tokens):
            yield Point(0, 0, place)


def _plan_draft_points(config: EngineConfig, few: int, context: int) -> Iterator[Point]:
    """Points with drafts: their contexts are short, but long enough that a look-up finds something in tokens that are
    all the same."""
    speculation = config.speculation
    if speculation.method == "none" or context <= DRAFT_CONTEXT + speculation.max_draft_tokens:
        return
    most = speculation.max_draft_tokens
    yield Point(1, DRAFT_CONTEXT, drafts=most)
    # how many rounds, and how many tokens, can be told apart only where both vary. Not `most` for many rows: products
    # of so many get dear by themselves, and what that takes would count as tokens'
    few = min(few, config.token_budget // 2)
    if few > 1:
        yield Point(few, DRAFT_CONTEXT, drafts=1)


def _make_chunks(point: Point, num_blocks: int, block_size: int) -> list[Chunk]:
    blocks = count()
    sampling = SAMPLED if point.needs_sampling else GREEDY
    chunks = [
        make_chunk(point.context, 1, blocks, num_blocks, block_size, point.drafts, sampling) for _ in range(point.rows)
    ]
    if point.prefill:
        chunks.append(make_chunk(point.prefill_context, point.prefill, blocks, num_blocks, block_size))
    return chunks


def _run(runner: Probed, point: Point, num_blocks: int, block_size: int, clock: Callable[[], float]) -> StepSample:
    """Measure one point once."""
    chunks = _make_chunks(point, num_blocks, block_size)
    step = Step(chunks, [])
    if point.drafts:
        runner.launch(step)()  # a drafter that sees a sequence for the first time has all of it to catch up with
    begin_s = clock()
    runner.launch(step)()
    seconds = clock() - begin_s
    for chunk in chunks:
        runner.forget(chunk.seq)
    shape = step.shape
    return StepSample(
        shape.rows,
        shape.prefill_tokens,
        shape.query_context,
        shape.kv_tokens,
        shape.draft_tokens,
        max(seconds, 1e-6),
        shape.draft_rounds,
        shape.sampled_rows,
    )


def _write(runner: Probed, chunks: list[Chunk], num_blocks: int, block_size: int, written: set[int]) -> None:
    """Copy a computed block to those of the chunks that nobody has written: on a CPU they are all one page of zeros,
    which is read from a cache and not from memory. A GPU's cache is there from the beginning. written: blocks that hold
    something."""
    wanted = {block for chunk in chunks for block in chunk.seq.block_table} - written
    if not wanted:
        return
    first = make_chunk(0, block_size, count(), num_blocks, block_size)
    (block,) = first.seq.block_table
    if block not in written:
        runner.launch(Step([first], []))()
    if wanted - {block}:
        runner.launch(Step([first], [], [(block, other) for other in sorted(wanted - {block})]))()
        release_unused()  # of what copying has touched
    runner.forget(first.seq)
    written |= wanted


def make_chunk(
    context: int,
    num_tokens: int,
    blocks: Iterator[int],
    num_blocks: int,
    block_size: int,
    max_drafts: int = 0,
    sampling: SamplingParams = GREEDY,
    lora: Resident | None = None,
) -> Chunk:
    """The last `num_tokens` tokens of a made-up sequence, with an adapter or without, its blocks taken in turn; those
    of a small cache are used twice."""
    length = context + num_tokens
    table = [next(blocks) % num_blocks for _ in range(-(-(length + max_drafts) // block_size))]
    seq = Sequence(
        "probe",
        [0] * length,
        sampling,
        length,
        [],
        b"",
        0.0,
        block_table=table,
        num_computed_tokens=context,
        lora=lora,
    )
    return Chunk(seq, context, num_tokens, max_drafts)
