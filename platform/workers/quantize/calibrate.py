"""Quantizes a model layer by layer, by the inputs that its layers get from calibration text. The forward pass is in
float32, dense, without a cache.

Only one layer is in memory at a time: a few times its weights, the hidden states of the texts before it, and a square
matrix for the inputs of each of its linear layers. A linear layer's columns are scaled by folding the inverse into what
is before it: norms for qkv and gate_up, the rows of `up` for down, those of `v` for o (only where every query head has
a value head of its own).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.operators import gated, rms_norm, rotate
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.weights import ROPE_FACTORS
from penstock.workers.quantize.search import clip_groups, find_scales

Weights = dict[str, Tensor]
"""Parameters in float32, as `penstock.workers.compute.weights.load_weights` names them; those of one layer without its
prefix."""
Load = Callable[[str], Weights]
"""Reads the parameters whose names begin with a prefix."""
LINEAR = ("qkv", "o", "gate_up", "down")


class InputStats:
    """The inputs of a linear layer: magnitudes and Gram matrix, summed over the calibration text."""

    def __init__(self, columns: int) -> None:
        self.gram = torch.zeros(columns, columns)
        self._sum = torch.zeros(columns)
        self._count = 0

    def add(self, x: Tensor) -> None:
        """x: [T, K]."""
        self.gram.addmm_(x.t(), x)
        self._sum += x.abs().sum(0)
        self._count += len(x)

    @property
    def magnitude(self) -> Tensor:
        return self._sum / max(1, self._count)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    index: int
    matrices: dict[str, QuantizedTensor]
    """The linear layers' matrices, by the last part of the parameter's name."""
    dense: Weights
    """The layer's other parameters, with the scales folded in."""


def quantize_awq(
    load: Load, config: ModelConfig, texts: list[Tensor], group_size: int, first: int = 0
) -> Iterator[QuantizedLayer]:
    """Layers from `first` on, one after the other; those before it are only read through. texts: int64 token ids, each
    a sequence."""
    rope = rope_tables(inverse_frequencies(config, load(ROPE_FACTORS).get(ROPE_FACTORS)), max(map(len, texts)))
    hidden = _embed(load, texts)
    for index in range(config.num_layers):
        layer = DenseLayer(load(f"layers.{index}."), config, index, rope)
        stats = {name: InputStats(layer.get(name).shape[1]) for name in LINEAR} if index >= first else {}
        for place, x in enumerate(hidden):
            hidden[place] = layer.forward(x, stats)
        if index >= first:
            layer.fold(stats, group_size)
            yield layer.quantized(stats, group_size)


def _embed(load: Load, texts: list[Tensor]) -> list[Tensor]:
    table = load("embed")["embed"]
    return [table[text] for text in texts]


class DenseLayer:
    """One layer in float32, whose columns can be scaled without changing what it computes."""

    def __init__(self, weights: Weights, config: ModelConfig, index: int, rope: tuple[Tensor, Tensor]) -> None:
        """weights: the layer's parameters in float32, by their full names (`layers.3.qkv`). rope: tables of cosines and
        sines."""
        self._weights = {name.removeprefix(f"layers.{index}."): value for name, value in weights.items()}
        self._config = config
        self._index = index
        self._cos, self._sin = rope
        self._scales: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        return self._weights[name]

    def quantized(self, stats: dict[str, InputStats], group_size: int) -> QuantizedLayer:
        matrices = {
            name: clip_groups(self.get(name), self.scale_gram(name, stats[name]), group_size) for name in LINEAR
        }
        return QuantizedLayer(
            self._index, matrices, {name: value for name, value in self._weights.items() if name not in LINEAR}
        )

    def scale_gram(self, name: str, stats: InputStats) -> Tensor:
        """Gram matrix of the inputs as they are once the scales are folded in."""
        scales = self._scales.get(name)
        return stats.gram if scales is None else stats.gram / scales[:, None] / scales[None, :]

    def forward(self, x: Tensor, stats: dict[str, InputStats]) -> Tensor:
        """x [T, hidden] of one sequence through the layer. stats: the inputs of the linear layers that it names are
        added to it."""
        x = x + self._linear("o", self._run_attention(self._norm(x, "input_norm"), stats), stats)
        gate_up = self._linear("gate_up", self._norm(x, "post_norm"), stats)
        return x + self._linear("down", gated(gate_up), stats)

    def _run_attention(self, x: Tensor, stats: dict[str, InputStats]) -> Tensor:
        config, count = self._config, len(x)
        qkv = self._linear("qkv", x, stats).view(count, -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if config.has_qk_norm:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        q, k = rotate(q, self._cos[:count], self._sin[:count]), rotate(k, self._cos[:count], self._sin[:count])
        shared = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).reshape(count, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.get(name), self._config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor, stats: dict[str, InputStats]) -> Tensor:
        if name in stats:
            stats[name].add(x)
        return functional.linear(x, self.get(name), self._weights.get(f"{name}_bias"))

    def fold(self, stats: dict[str, InputStats], group_size: int) -> None:
        """Find the scales of every linear layer and move them into what is before it; what the layer computes does not
        change."""
        for name in LINEAR:
            if name == "o" and self._config.num_heads != self._config.num_kv_heads:
                continue
            scales = find_scales(self.get(name), stats[name].magnitude, stats[name].gram, group_size)
            self._scales[name] = scales
            self._weights[name] = self.get(name) * scales
            self._divide_before(name, scales)

    def _divide_before(self, name: str, scales: Tensor) -> None:
        if name in ("qkv", "gate_up"):
            norm = "input_norm" if name == "qkv" else "post_norm"
            self._weights[norm] = self.get(norm) / scales
            return
        # the last rows of the matrix before it: `v` of qkv, `up` of gate_up
        source = "qkv" if name == "o" else "gate_up"
        rows = slice(len(self.get(source)) - len(scales), None)
        for part in (source, f"{source}_bias"):
            values = self._weights.get(part)
            if values is not None:
                values = values.clone()
                values[rows] /= scales[:, None] if values.dim() == 2 else scales
                self._weights[part] = values
