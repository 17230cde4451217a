"""Random steps from recordings against the same steps as they come: prompts, drafts and decode rows side by side, with
adapters and without. On a GPU the recordings are CUDA graphs."""

import gc
import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Batch, build_batch
from penstock.workers.compute.lora import (
    FUSED,
    AdapterRows,
    LoraAdapter,
    LowRank,
    Part,
    build_segments,
    group_rows_by_adapter,
    make_adapter,
)
from penstock.workers.compute.models.capture import Compute
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.replay import Recorded, Replay, token_sizes
from penstock.workers.compute.triton.staging import send_once
from penstock.workers.compute.weights import layout, parameter_shapes
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE, NAN, planned
from tests.gpu.test_model import BLOCK_SIZE, CONFIG, NUM_BLOCKS, Harness

VOCAB = 90
TOKENS = (16, 24, 40)
RECORDED = Recorded((1, 2, 4), TOKENS, num_adapters=2, max_rank=64)
TOLERANCE = 2e-3
NUM_SEQS, MAX_TOKENS = 4, 90
RANKS = (1, 5, 16, 17, 64)


class PoisonedReplay(Replay):
    """Begins each step with NaN in whatever goes from piece to piece."""

    def _run_mixed(self, batch: Batch, adapter_rows: Seq[AdapterRows]) -> Tensor:
        for recordings in self._mixed.values():
            for part in recordings[-1].activations:
                part.fill_(NAN)
        return super()._run_mixed(batch, adapter_rows)


def draw_adapter(draw: random.Random, rank: int) -> LoraAdapter:
    """Every module has the rank; one matrix of a layer is missing."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    shapes = parameter_shapes(layout(CONFIG))
    heads, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    inner, hidden = CONFIG.intermediate_size, CONFIG.hidden_size
    widths = {"qkv": (heads, kv, kv), "o": (hidden,), "gate_up": (inner, inner), "down": (hidden,)}
    missing = draw.randrange(CONFIG.num_layers), draw.choice(tuple(FUSED))

    def matrix(index: int, name: str) -> LowRank:
        columns, start, parts = shapes[f"layers.{index}.{name}"][1], 0, []
        for width in widths[name]:
            b = torch.randn(width, rank, generator=generator).to(DEVICE)
            parts.append(Part(start, start + width, b / rank))
            start += width
        return LowRank(0.1 * torch.randn(rank * len(parts), columns, generator=generator).to(DEVICE), parts)

    layers = [
        {name: matrix(index, name) for name in FUSED if (index, name) != missing} for index in range(CONFIG.num_layers)
    ]
    return make_adapter("a", layers, 0, DEVICE)


class Load:
    """Sequences that grow by random steps, and lose their blocks now and then."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.adapters: list[LoraAdapter | None] = [None, *(draw_adapter(self.draw, rank) for rank in RANKS[:3])]
        self.texts = [[self.draw.randrange(VOCAB) for _ in range(MAX_TOKENS)] for _ in range(NUM_SEQS)]
        self.seqs = [self.sequence(number) for number in range(NUM_SEQS)]

    def sequence(self, number: int) -> Sequence:
        seq = Sequence(f"{number}", self.texts[number], SamplingParams(max_tokens=1), 1, [], b"", 0.0)
        self.place(seq, number)
        return seq

    def place(self, seq: Sequence, number: int) -> None:
        """Blocks of its own, in another order than before; nothing is computed."""
        each = NUM_BLOCKS // NUM_SEQS
        seq.block_table = self.draw.sample(range(each * number, each * (number + 1)), -(-MAX_TOKENS // BLOCK_SIZE))
        seq.num_computed_tokens = 0

    def replace_adapter(self) -> None:
        """Unload one that a sequence may have had, and load another in its place."""
        place = self.draw.randrange(1, len(self.adapters))
        going = self.adapters[place]
        for seq in self.seqs:
            seq.lora = None if seq.lora is going else seq.lora
        del going
        self.adapters[place] = None
        gc.collect()
        self.adapters[place] = draw_adapter(self.draw, self.draw.choice(RANKS))

    def step(self, most: int, *, has_adapters: bool) -> Step:
        chunks = []
        for number, seq in enumerate(self.seqs):
            if seq.num_computed_tokens > MAX_TOKENS - 8 or self.draw.random() < 0.1:
                seq.num_preemptions += 1
                self.place(seq, number)
            kind, start = self.draw.choice(("row", "draft", "piece", "none")), seq.num_computed_tokens
            room = min(most - sum(chunk.num_tokens + len(chunk.draft or ()) for chunk in chunks), MAX_TOKENS - start)
            if kind == "none" or room < 5:
                continue
            seq.lora = self.draw.choice(self.adapters) if has_adapters else None
            count = self.draw.randint(2, min(room, 30)) if kind == "piece" else 1
            draft = [self.draw.randrange(VOCAB) for _ in range(self.draw.randint(1, 4))] if kind == "draft" else None
            seq.token_ids = self.texts[number][: start + count]
            chunks.append(Chunk(seq, start, count, 4, draft))
        return Step(chunks, [])


def with_rows(batch: Batch, draw: random.Random) -> Batch:
    """The batch with some rows whose logits are wanted, in any order."""
    rows = draw.sample(range(len(batch.token_ids)), draw.randint(0, min(9, len(batch.token_ids))))
    return replace(batch, rows=torch.tensor(rows, dtype=torch.int64), sampled=[])


def with_before(batch: Batch, draw: random.Random) -> Batch:
    """The batch with tokens that only the step before has."""
    token_ids, chosen = batch.token_ids.clone(), torch.randint(VOCAB, (7,))
    for place in draw.sample(range(len(token_ids)), draw.randint(1, len(token_ids))):
        row = draw.randrange(7)
        chosen[row], token_ids[place] = batch.token_ids[place], -1 - row
    kept = [int(token) if token >= 0 else int(chosen[-1 - token]) for token in token_ids]
    return replace(batch, token_ids=torch.where(torch.tensor(kept) == batch.token_ids, token_ids, batch.token_ids),
                   before=chosen.double().to(DEVICE))  # fmt: skip


def as_it_comes(harness: Harness, batch: Batch, adapter_rows: Seq[AdapterRows], rows: Tensor) -> Tensor:
    """Logits by the same kernels, without recordings; the batch brings its tables."""
    placed: object = ()
    adapters = build_segments(adapter_rows, len(batch.token_ids)) if adapter_rows else None
    if adapters is not None:
        placed = adapters.placed(*send_once([adapters.rows.numpy(), adapters.tiles.numpy()], DEVICE))
    attention = planned(batch.attention, BLOCK_SIZE)
    step = ModelStep(batch.token_ids.to(DEVICE), batch.positions.to(DEVICE), attention, rows.to(DEVICE))
    return harness.model.compute(step._replace(adapter_rows=placed), harness.cache).cpu()


def check_caches(eager: Harness, replaying: Harness) -> None:
    for one, other in zip(eager.cache.layers, replaying.cache.layers, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize(("seed", "is_quantized"), [(0, False), (1, True)])
def test_recorded_steps_of_any_mixture_have_the_logits_and_write_the_cache_of_steps_as_they_come(
    seed: int, is_quantized: bool
) -> None:
    """Also with adapters that take each other's slots, with tokens of the step before, and behind lost blocks."""
    eager, replaying = (Harness(torch.float32, DEVICE, is_planned=True, is_quantized=is_quantized) for _ in range(2))
    replay = PoisonedReplay(replaying.model, replaying.cache, RECORDED, max_context=MAX_TOKENS)
    load, sizes = Load(seed), set[int]()

    with torch.inference_mode():
        for number in range(11):
            if number % 5 == 4:
                load.replace_adapter()
            step = load.step(TOKENS[-1], has_adapters=number % 2 == 1)
            if not step.chunks:
                continue
            tables = replay.tables if number % 7 else None
            known = with_rows(build_batch(step, BLOCK_SIZE, tables), load.draw)
            adapter_rows = group_rows_by_adapter(step.chunks)
            batch = with_before(known, load.draw) if number % 3 == 0 else known
            if len(adapter_rows) > RECORDED.num_adapters:
                assert not replay.covers(batch, adapter_rows)
                replay.tables.clear()
                continue
            assert replay.covers(batch, adapter_rows)
            found = replay.on_device(batch, adapter_rows).cpu()
            own = build_batch(step, BLOCK_SIZE)
            expected = as_it_comes(eager, own, adapter_rows, known.rows)
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
            sizes.add(len(batch.token_ids))
            for chunk in step.chunks:
                chunk.seq.num_computed_tokens = chunk.end

    check_caches(eager, replaying)
    assert len(sizes) > 4


@pytest.mark.parametrize("size", TOKENS)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_step_that_fills_its_recording_has_the_bits_of_the_step_as_it_comes(size: int, has_adapter: bool) -> None:
    eager, replaying = (Harness(torch.float32, DEVICE, is_planned=True) for _ in range(2))
    replay = PoisonedReplay(replaying.model, replaying.cache, RECORDED, max_context=MAX_TOKENS)
    load = Load(3)
    load.seqs[0].lora = load.adapters[3] if has_adapter else None
    load.seqs[2].token_ids = load.texts[2][:1]
    drafting = Chunk(load.seqs[2], 0, 1, 4, [1] * 4)
    step = Step([Chunk(load.seqs[0], 0, size - 6), Chunk(load.seqs[1], 0, 1), drafting], [])
    batch, adapter_rows = build_batch(step, BLOCK_SIZE), group_rows_by_adapter(step.chunks)
    rows = torch.arange(size)

    with torch.inference_mode():
        found = replay.on_device(replace(batch, rows=rows), adapter_rows).cpu()
        expected = as_it_comes(eager, batch, adapter_rows, rows)

    assert torch.equal(found, expected)
    for one, other in zip(eager.cache.layers, replaying.cache.layers, strict=True):
        assert all(
            torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0)) for ours, theirs in zip(one, other, strict=True)
        )


class CountingRecorder:
    """Calls what is recorded, and counts."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.ran: list[int] = []
        """Numbers of recordings, in the order in which they were made."""

    def record(self, compute: Compute) -> Compute:
        number = self.num_recorded
        self.num_recorded += 1

        def run() -> None:
            self.ran.append(number)
            compute()

        return run


def test_a_step_runs_the_pieces_of_the_smallest_recording_that_holds_it() -> None:
    """The largest of each kind is recorded first, whole steps behind those in pieces."""
    harness, recorder = Harness(torch.float32, DEVICE, is_planned=True), CountingRecorder()
    recorded = Recorded((1, 2), (16, 24))
    replay = Replay(harness.model, harness.cache, recorded, max_context=MAX_TOKENS, recorder=recorder)
    pieces, load = CONFIG.num_layers + 1, Load(1)

    def ran(*counts: int) -> list[int]:
        recorder.ran = []
        for seq, text, count in zip(load.seqs, load.texts, counts, strict=False):
            seq.token_ids = text[:count]
        chunks = [Chunk(seq, 0, count) for seq, count in zip(load.seqs, counts, strict=False)]
        with torch.inference_mode():
            replay.on_device(build_batch(Step(chunks, []), BLOCK_SIZE))
        return recorder.ran

    assert recorder.num_recorded == 2 * pieces + 2
    assert ran(10, 6) == list(range(pieces, 2 * pieces))
    assert ran(3) == list(range(pieces, 2 * pieces))
    assert ran(10, 7) == list(range(pieces))
    assert ran(24) == list(range(pieces))
    assert ran(1, 1) == [2 * pieces]
    assert ran(1) == [2 * pieces + 1]


def test_what_no_recording_holds_is_not_covered() -> None:
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    load = Load(2)
    makers: dict[bool, Callable[[], Replay]] = {
        has_adapters: lambda recorded=recorded: Replay(harness.model, harness.cache, recorded, max_context=MAX_TOKENS)
        for has_adapters, recorded in ((True, RECORDED), (False, Recorded((1, 2), (16,))))
    }
    with_adapters, without = makers[True](), makers[False]()
    prompts = {count: build_batch(Step([Chunk(load.seqs[0], 0, count)], []), BLOCK_SIZE) for count in (16, 17, 41)}
    rows = [AdapterRows(adapter, None) for adapter in load.adapters if adapter is not None]
    wide = AdapterRows(draw_adapter(load.draw, 65), None)
    many = build_batch(Step([Chunk(seq, 0, 2) for seq in load.seqs[:3]], []), BLOCK_SIZE)

    assert without.covers(prompts[16])
    assert not without.covers(prompts[17])
    assert not without.covers(prompts[16], rows[:1])
    assert not without.covers(many), "more sequences than the tables have rows"
    assert with_adapters.covers(many, rows[:2])
    assert not with_adapters.covers(many, rows[:3])
    assert not with_adapters.covers(many, [wide])
    assert not with_adapters.covers(prompts[41])


def test_rows_that_are_not_those_of_the_tokens_in_order_are_no_decode_step() -> None:
    """A prompt of one token that is scored beside a row that samples is such a step."""
    eager, replaying = (Harness(torch.float32, DEVICE, is_planned=True) for _ in range(2))
    replay = Replay(replaying.model, replaying.cache, RECORDED, max_context=MAX_TOKENS)
    batch = build_batch(Step([Chunk(seq, 0, 1) for seq in Load(5).seqs[:2]], []), BLOCK_SIZE)
    rows = torch.tensor([1, 0])

    with torch.inference_mode():
        found = replay.on_device(replace(batch, rows=rows)).cpu()
        expected = as_it_comes(eager, batch, [], rows)

    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert not torch.allclose(found[0], found[1], atol=0.1)


def test_a_step_that_sends_more_than_has_room_beside_its_numbers_is_right() -> None:
    eager, replaying = (Harness(torch.float32, DEVICE, is_planned=True) for _ in range(2))
    recorded = Recorded((1,), (1,), num_adapters=1, max_rank=64)
    replay = Replay(replaying.model, replaying.cache, recorded, max_context=MAX_TOKENS)
    load = Load(6)
    seq = load.seqs[0]
    for harness in (eager, replaying):
        whole = build_batch(Step([Chunk(seq, 0, 80)], []), BLOCK_SIZE)
        with torch.inference_mode():
            as_it_comes(harness, whole, [], whole.rows)
    seq.lora, seq.num_computed_tokens = load.adapters[2], 80
    step = Step([Chunk(seq, 80, 1)], [])
    batch, adapter_rows = build_batch(step, BLOCK_SIZE, replay.tables), group_rows_by_adapter(step.chunks)
    rows = torch.zeros(120, dtype=torch.int64)

    with torch.inference_mode():
        found = replay.on_device(replace(batch, rows=rows), adapter_rows).cpu()
        expected = as_it_comes(eager, build_batch(step, BLOCK_SIZE), adapter_rows, rows)

    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_are_filled_up_by_less_than_a_third() -> None:
    sizes = token_sizes(10**6)

    assert (sizes[0], sizes[-1]) == (16, 512)
    assert all(larger <= 4 / 3 * (smaller + 1) for smaller, larger in itertools.pairwise(sizes))
    assert token_sizes(16) == [16]
    assert token_sizes(17) == [16, 20]
    assert token_sizes(100)[-2:] == [80, 104]
