"""Recorded steps that are no plain decode steps beside the same steps launched one by one, by the same kernels: prompts
beside decode rows, drafts that are verified, adapters; and what adapters cost, beside the same step without. Llama-3.1-
8B's shape with random weights, each row with 1,024 tokens of context.

Steps a second, of whole steps but for the choice of tokens: what a step is made of goes to the GPU, where block tables
and tables of adapters are, and its largest logits come back.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.rows import Rows
from bench.gpu.steps.decode import check, with_tables_kept
from bench.gpu.steps.shapes import (
    BLOCK_SIZE,
    MOST_DIFFERENCE,
    VARIANTS,
    Bench,
    Variant,
    bench_for,
    make_cache,
    make_weights,
    median_s,
    packed,
)
from bench.gpu.steps.sizes import decode_bytes, weight_bytes
from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.lora import FUSED, AdapterRows, LoraAdapter, LowRank, Part, make_adapter
from penstock.workers.compute.models.llama import Llama, largest
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.models.replay import Recorded, Replay, sizes, token_sizes
from penstock.workers.compute.weights import layout, parameter_shapes

CONTEXT, CHECKED_CONTEXT = 1024, 40
RANK = 16
NUM_ADAPTERS = 8


class Kind(NamedTuple):
    name: str
    num_rows: int
    """Sequences with one new token."""
    news: tuple[int, ...] = ()
    """New tokens of each other sequence."""
    num_adapters: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_rows + sum(self.news)


KINDS = (
    Kind("64 tokens, a prompt beside 32 rows", 32, (32,)),
    Kind("256 tokens, two prompts beside 64 rows", 64, (96, 96)),
    Kind("500 tokens, two prompts beside 64 rows", 64, (218, 218)),
    Kind("4 drafts verified, 1 sequence", 0, (5,)),
    Kind("4 drafts verified, 8 sequences", 0, (5,) * 8),
    Kind("1 row, an adapter", 1, (), 1),
    *(Kind(f"{count} rows, 8 adapters", count, (), NUM_ADAPTERS) for count in (8, 64, 256)),
    Kind("64 tokens, a prompt beside 32 rows, 8 adapters", 32, (32,), NUM_ADAPTERS),
)
CHECKED = (Kind("a prompt beside a row", 1, (9,)), Kind("drafts", 0, (3,) * 2), Kind("2 adapters", 2, (), 2))


def add_rows(rows: Rows, bench: Bench, variant: Variant, kinds: Sequence[Kind], context: int) -> None:
    """A row for each kind. Raises RuntimeError where the logits differ."""
    held = sum(weight_bytes(bench, variant))
    fitting = []
    for kind in kinds:
        if held + decode_bytes(bench, variant, kind.num_rows + len(kind.news), context) <= bench.room_bytes:
            fitting.append(kind)
        else:
            rows.add(f"{variant.name}, {kind.name}: does not fit")
    if not fitting:
        return
    kinds = fitting
    weights = make_weights(bench, is_quantized=variant.is_quantized)
    model = Llama(bench.config, {name: packed(weight, bench) for name, weight in weights.items()}, context, 1, False)
    most = max(kind.num_rows + len(kind.news) for kind in kinds)
    cache = make_cache(bench, most * -(-context // BLOCK_SIZE), variant.kv_dtype)
    tokens = token_sizes(max(kind.num_tokens for kind in kinds))
    replay = Replay(model, cache, Recorded(sizes(most), tokens, NUM_ADAPTERS, RANK), context)
    adapters = [make_random_adapter(bench) for _ in range(NUM_ADAPTERS)]
    for kind in kinds:
        batch = with_tables_kept(batch_of(kind, context, bench.config.vocab_size), replay)
        adapter_rows = deal(adapters[: kind.num_adapters], kind.num_tokens)
        one_by_one, recorded = steps_of(replay, batch, adapter_rows)
        check(variant, recorded().cpu(), one_by_one().cpu(), MOST_DIFFERENCE[bench.dtype])
        ours_s, rival_s = (median_s(fetching(step), bench.repeats, bench.device) for step in (recorded, one_by_one))
        rows.add(
            f"{variant.name}, {kind.name}: recorded (ours), one by one (rival)", 1 / ours_s, 1 / rival_s, "steps/s"
        )
        if adapter_rows:
            plain, _ = steps_of(replay, batch, ())
            plain_s = median_s(fetching(plain), bench.repeats, bench.device)
            rows.add(f"{variant.name}, {kind.name}: with (ours), without (rival)", 1 / ours_s, 1 / plain_s, "steps/s")


def steps_of(
    replay: Replay, batch: Batch, adapter_rows: Sequence[AdapterRows]
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What computes a step's logits as it comes, and from recordings."""

    def one_by_one() -> Tensor:
        return replay.model.on_device(step_of(batch, replay.segments(batch, adapter_rows) or ()), replay.cache)

    def recorded() -> Tensor:
        return replay.on_device(batch, adapter_rows)

    assert replay.covers(batch, adapter_rows)
    return one_by_one, recorded


def fetching(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: largest(step()).cpu()


def batch_of(kind: Kind, context: int, vocab_size: int) -> Batch:
    """The step on the host; the blocks of its sequences lie scattered."""
    news = torch.tensor([1] * kind.num_rows + list(kind.news))
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(len(news) * blocks).view(len(news), blocks).int()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0)))
    places = [torch.arange(context - new, context) for new in news.tolist()]
    slots = [
        own[place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
        for own, place in zip(tables, places, strict=True)
    ]
    contexts = torch.full((len(news),), context).int()
    attention = AttentionBatch(starts.int(), contexts, tables, torch.cat(slots))
    token_ids = torch.randint(vocab_size, (kind.num_tokens,))
    return Batch(token_ids, torch.cat(places), attention, starts[1:] - 1, list(range(len(news))))


def make_random_adapter(bench: Bench) -> LoraAdapter:
    """An adapter of every matrix, each as one module."""
    shapes = parameter_shapes(layout(bench.config))

    def matrix(layer: int, name: str) -> LowRank:
        outputs, inputs = shapes[f"layers.{layer}.{name}"]
        a = torch.randn(RANK, inputs, dtype=bench.dtype, device=bench.device).mul_(inputs**-0.5)
        b = torch.randn(outputs, RANK, dtype=bench.dtype, device=bench.device).mul_(0.1)
        return LowRank(a, [Part(0, outputs, b)])

    layers = [{name: matrix(layer, name) for name in FUSED} for layer in range(bench.config.num_layers)]
    return make_adapter("random", layers, 0, bench.device)


def deal(adapters: Sequence[LoraAdapter], num_tokens: int) -> list[AdapterRows]:
    """The adapters by turns to the tokens of a step."""
    return [
        AdapterRows(adapter, torch.arange(first, num_tokens, len(adapters))) for first, adapter in enumerate(adapters)
    ]


def run(rows: Rows, name: str, *, is_check: bool) -> bool:
    """name: of the variant."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    kinds, context = (CHECKED, CHECKED_CONTEXT) if is_check else (KINDS, CONTEXT)
    with torch.inference_mode():
        add_rows(rows, bench_for(is_check=is_check), variant, kinds, context)
    return True
