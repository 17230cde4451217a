"""What a step of Llama-3.1-8B launches, counted without a GPU: the model's tensors have no memory, and kernels are
counted instead of launched. docs/gpu.md has the counts, and what follows from them."""

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
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.operators import Operators, TorchOperators
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

    def _operators(self, positions: Tensor, batch: AttentionBatch) -> Operators:
        return TorchOperators(self.config, self.rope, positions, batch, exact=False)


class Launches(TorchDispatchMode):
    """Names of torch's operators that are kernels on a GPU: those that write, views and allocations are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
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
    launches = Launches()

    def count(kernel: Any, grid: Any) -> Any:
        return lambda *_, **__: launches.names.append(kernel.__name__)

    with patch.context() as context, torch.inference_mode(), launches:
        context.setattr(KernelInterface, "__getitem__", count)
        model.compute(places, places, cache, batch, places)
    kv_bytes = num_rows * blocks * KvCache.block_bytes(config, BLOCK_SIZE, torch.bfloat16)
    num_weights = sum(weight.shape.numel() for name, weight in weights.items() if name != "embed")
    return Counts(launches.names, read_bytes(weights) + kv_bytes, read_bytes(weights), num_weights)


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
