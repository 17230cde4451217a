"""What a step of Llama-3.1-8B launches, counted without a GPU: the model's tensors have no memory, and kernels are
counted instead of launched. docs/gpu.md has the counts, and what follows from them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from bench.gpu.steps.shapes import BLOCK_SIZE, LLAMA_8B, Bench, make_weights, packed, read_bytes
from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.lora import AdapterRows, LowRank, Part, make_adapter
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep, step_of
from penstock.workers.compute.models.operators import Operators, TorchOperators
from penstock.workers.compute.models.replay import Recorded, Replay, sizes, token_sizes
from penstock.workers.compute.triton.attention.plan import Plan, Rows

PAGE = Path(__file__).resolve().parents[5] / "docs" / "gpu.md"
META = torch.device("meta")
CONTEXT = 1024
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second of the SXM parts, by NVIDIA's data sheets."""
BANDWIDTH_SHARE, PEAK_SHARE = 0.8, 0.6
PEAK = 989e12
"""Operations a second of both, dense bfloat16, by the same sheets."""
LAUNCH_S = 3e-6


class TorchLlama(Llama):
    """The model with torch's operators between its products, on a GPU too."""

    def _operators(self, positions: Tensor, batch: AttentionBatch, queries: Tensor | None = None) -> Operators:
        return TorchOperators(self.config, self.rope, positions, batch, exact=False)


class Launches(TorchDispatchMode):
    """Names of torch's operators that are kernels on a GPU, or copies to it: those that write, views and allocations
    are none, nor is what happens on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(leaf.device != META for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)):
            return result
        before = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        is_made = any(_storage(leaf) not in before for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if func._schema.is_mutable or (is_made and "empty" not in str(func)):
            self.names.append(str(func))
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Counts(NamedTuple):
    names: list[str]
    num_bytes: int
    """Bytes of weights, keys and values that the step reads."""
    weights_bytes: int
    """Bytes of weights alone."""
    num_weights: int
    """Weights of its products."""


def counted(
    kind: type[Llama], num_rows: int, num_layers: int, patch: pytest.MonkeyPatch, *, is_quantized: bool = False
) -> Counts:
    """A decode step of so many rows, each of CONTEXT tokens: from token ids to logits."""
    config = replace(LLAMA_8B, num_layers=num_layers)
    bench = Bench(config, META, torch.bfloat16, 128, 0.0, 1, 1)
    with patch.context() as context:
        context.setattr(torch, "equal", lambda *_: True)  # scales lose nothing in 16 bits
        made = make_weights(bench, is_quantized=is_quantized)
        weights = {name: packed(weight, bench) for name, weight in made.items()}
    model = kind(config, weights, CONTEXT, threads=1, exact=False)
    blocks = CONTEXT // BLOCK_SIZE
    cache = KvCache(config, num_rows * blocks, BLOCK_SIZE, torch.bfloat16, META)
    order = torch.zeros(num_rows, dtype=torch.int32, device=META)
    places = torch.zeros(num_rows, dtype=torch.int64, device=META)
    tables = torch.zeros(num_rows, blocks, dtype=torch.int32, device=META)
    batch = AttentionBatch(order, order, tables, places, Plan(tables, Rows(order, order, order, CONTEXT)))
    names = launched(lambda: model.compute(ModelStep(places, places, batch, places), cache), patch)
    kv_bytes = num_rows * blocks * KvCache.block_bytes(config, BLOCK_SIZE, torch.bfloat16)
    num_weights = sum(weight.shape.numel() for name, weight in weights.items() if name != "embed")
    return Counts(names, read_bytes(weights) + kv_bytes, read_bytes(weights), num_weights)


def launched(compute: Callable[[], object], patch: pytest.MonkeyPatch) -> list[str]:
    """Names of what Python launches."""
    launches = Launches()

    def count(kernel: Any, grid: Any) -> Any:
        return lambda *_, **__: launches.names.append(kernel.__name__)

    with patch.context() as context, torch.inference_mode(), launches:
        context.setattr(KernelInterface, "__getitem__", count)
        compute()
    return launches.names


def in_a_layer(kind: type[Llama], num_rows: int, patch: pytest.MonkeyPatch, *, is_quantized: bool = False) -> int:
    two, one = (
        len(counted(kind, num_rows, num_layers, patch, is_quantized=is_quantized).names) for num_layers in (2, 1)
    )
    return two - one


@pytest.mark.parametrize("num_rows", [1, 256])
def test_a_dense_layer_is_ten_launches_and_four_of_them_lie_between_products_and_attention(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = counted(Llama, num_rows, 1, monkeypatch).names

    assert in_a_layer(Llama, num_rows, monkeypatch) == 10
    assert [names.count(name) for name in ("_add_norm", "_rotate_and_store", "_gate")] == [3, 1, 1]
    assert names.count("_attend_split") == names.count("_reduce") == 1


def test_the_torch_operators_of_a_norm_count_as_four() -> None:
    """Guards the counts: a norm that is one operator on a GPU is not to be counted by its parts."""
    launches = Launches()
    x, weight = (torch.zeros(*shape, dtype=torch.bfloat16, device=META) for shape in ((2, 64), (64,)))
    batch = AttentionBatch(x, x, x, x)
    operators = TorchOperators(LLAMA_8B, (x, x), torch.zeros(2, dtype=torch.int64, device=META), batch, exact=False)

    with torch.inference_mode(), launches:
        operators.norm(x, weight)

    assert len(launches.names) == 4, launches.names


def predicted_ms(counts: Counts, num_rows: int, bandwidth: float) -> float:
    """Time of a step: its bytes, or its operations where those take longer than the weights; and its launches."""
    reading_s = counts.num_bytes / (BANDWIDTH_SHARE * bandwidth)
    computing_s = 2 * counts.num_weights * num_rows / (PEAK_SHARE * PEAK)
    more_s = max(0.0, computing_s - counts.weights_bytes / (BANDWIDTH_SHARE * bandwidth))
    return 1e3 * (reading_s + more_s + LAUNCH_S * len(counts.names))


def test_docs_have_the_counts_and_what_follows_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for (name, is_quantized), num_rows in product((("bfloat16", False), ("4 bits", True)), (1, 256)):
        kinds = (TorchLlama, Llama)
        layers = [in_a_layer(kind, num_rows, monkeypatch, is_quantized=is_quantized) for kind in kinds]
        steps = [counted(kind, num_rows, LLAMA_8B.num_layers, monkeypatch, is_quantized=is_quantized) for kind in kinds]
        times = [
            f"{' / '.join(f'{predicted_ms(step, num_rows, bandwidth):.1f}' for step in steps)}"
            for bandwidth in BANDWIDTH.values()
        ]
        lines.append(
            f"| {name}, {num_rows} | {layers[0]} / {layers[1]} | {len(steps[0].names)} / {len(steps[1].names)} "
            f"| {steps[1].num_bytes / 1e9:.1f} | {' | '.join(times)} |"
        )
    table = "\n".join(lines)

    assert table in PAGE.read_text(encoding="utf-8"), f"docs/gpu.md should have\n{table}"


class StepKind(NamedTuple):
    name: str
    spans: tuple[tuple[int, int], ...]
    """Context and new tokens of each sequence."""
    num_adapters: int = 0


ROW = (CONTEXT, 1)
KINDS = (
    StepKind("64 tokens: 32 rows and a piece of a prompt", (ROW,) * 32 + ((200, 32),)),
    StepKind("256 tokens: 64 rows, and pieces of two prompts", (ROW,) * 64 + ((100, 96), (300, 96))),
    StepKind("4 drafts verified, 1 sequence", ((CONTEXT, 5),)),
    StepKind("4 drafts verified, 8 sequences", ((CONTEXT, 5),) * 8),
    StepKind("1 row with an adapter", (ROW,), 1),
    *(StepKind(f"{count} rows with 8 adapters", (ROW,) * count, 8) for count in (8, 64, 256)),
)


class OneLaunch:
    """Counts a recording as what it is on a GPU: one launch, whatever it holds."""

    def __init__(self, launches: list[str]) -> None:
        self._launches = launches

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._launches.append("recording")


def batch_of(kind: StepKind, replay: Replay) -> Batch:
    """The step on the host; its block tables are on the device already."""
    news = torch.tensor([new for _, new in kind.spans])
    contexts = torch.tensor([context for context, _ in kind.spans], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), news.cumsum(0))).int()
    num_tokens = int(news.sum())
    blocks = torch.zeros(len(kind.spans), CONTEXT // BLOCK_SIZE, dtype=torch.int32)
    tables = replay.tables.replace(blocks).unchanged()
    places = torch.zeros(num_tokens, dtype=torch.int64)
    attention = AttentionBatch(starts, contexts, blocks[:, :0], places, tables=tables)
    rows = starts[1:].long() - 1
    return Batch(places, places, attention, rows, list(range(len(rows))))


def test_docs_have_the_launches_of_recorded_steps_and_of_the_same_steps_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(LLAMA_8B, META, torch.bfloat16, 128, 0.0, 1, 1)
    model = Llama(LLAMA_8B, make_weights(bench, is_quantized=False), CONTEXT, threads=1, exact=False)
    cache = KvCache(LLAMA_8B, 1, BLOCK_SIZE, torch.bfloat16, META)
    recordings: list[str] = []
    recorded = Recorded(sizes(256), token_sizes(512), num_adapters=8, max_rank=32)
    replay = Replay(model, cache, recorded, CONTEXT, OneLaunch(recordings))
    a, b = torch.zeros(8, 4096, device=META), torch.zeros(4096, 8, device=META)
    with monkeypatch.context() as context:
        context.setattr(Tensor, "data_ptr", lambda _: 0)
        layers = [{"o": LowRank(a, [Part(0, 4096, b)])}]
        adapters = [make_adapter("a", layers * LLAMA_8B.num_layers, 0, META) for _ in range(8)]
    lines = []
    for kind in KINDS:
        batch = batch_of(kind, replay)
        owners = torch.arange(len(batch.token_ids)) % max(1, kind.num_adapters)
        adapter_rows = [
            AdapterRows(adapters[index], (owners == index).nonzero().flatten()) for index in range(kind.num_adapters)
        ]
        replay.segments(batch, adapter_rows)  # adapters of a step are in their slots since the one before
        step = step_of(batch, replay.segments(batch, adapter_rows) or ())
        as_it_comes = launched(lambda step=step: model.on_device(step, cache), monkeypatch)
        recordings.clear()
        assert replay.covers(batch, adapter_rows)
        beside = launched(lambda batch=batch, own=adapter_rows: replay.on_device(batch, own), monkeypatch)
        lines.append(f"| {kind.name} | {len(as_it_comes)} | {len(recordings) + len(beside)} |")
    table = "\n".join(lines)

    assert table in PAGE.read_text(encoding="utf-8"), f"docs/gpu.md should have\n{table}"
