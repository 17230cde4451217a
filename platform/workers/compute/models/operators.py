"""What a decoder layer computes between its matrix products: norms, rotation, storing of keys and values, the gate.

`TorchOperators` has it in torch's operators, for CPUs and for exact mode; on GPUs it is that of `gpu_operators`. Both
round at the same places, which are those of transformers: norms, RoPE and silu are computed in float32, and whatever is
an operator's result there is rounded to the model's dtype.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.attention import AttentionBatch, write_kv
from penstock.workers.compute.kernels.cache_layout import CacheLayout
from penstock.workers.compute.model_config import ModelConfig

Norms = tuple[Tensor, Tensor]
"""Weights of the norms of queries and keys, [head_dim] each."""


class Operators(Protocol):
    """Operators of one step of T tokens. Tensors have the model's dtype and are contiguous."""

    @property
    def takes_parts(self) -> bool:
        """Whether `added`, `qkv` and `gate_up` may be parts of them, float32 with a dimension of parts before the
        others, whose sum, in order, is rounded to the model's dtype."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """`rms_norm` of x [T, hidden_size]."""

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        """Adds `added` to x, in place; `rms_norm` of the sum."""

    def rotate_and_store(
        self, qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor, layout: CacheLayout
    ) -> Tensor:
        """Queries of qkv [T, heads, head_dim], normed and rotated: [T, num_heads, head_dim]. The keys likewise, and the
        values, are written to their slots of a layer's cache."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """`gated` of [T, 2 * intermediate_size], or of its parts."""


class TorchOperators:
    takes_parts = False

    def __init__(
        self, config: ModelConfig, rope: tuple[Tensor, Tensor], positions: Tensor, batch: AttentionBatch, exact: bool
    ) -> None:
        """rope: as of `models.rope.rope_tables`. positions: int64 [T]. exact: a row's result has the same bits
        whatever other rows are there."""
        self._config = config
        self._cos, self._sin = (table[positions] for table in rope)
        self._batch = batch
        self._exact = exact

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._by_row(lambda rows: rms_norm(rows, weight, self._config.rms_norm_eps), x)

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        x += added
        return self.norm(x, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor, layout: CacheLayout
    ) -> Tensor:
        num_heads = self._config.num_heads
        num_rotated = num_heads + self._config.num_kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if norms is not None:
            q_norm, k_norm = norms
            qk = torch.cat((self.norm(qk[:, :num_heads], q_norm), self.norm(qk[:, num_heads:], k_norm)), dim=1)
        qk = rotate(qk, self._cos, self._sin)
        is_planned = self._batch.plan is not None
        write_kv(qk[:, num_heads:], v, keys, values, self._batch.slot_mapping, layout, is_planned=is_planned)
        return qk[:, :num_heads]

    def gate(self, gate_up: Tensor) -> Tensor:
        return self._by_row(gated, gate_up)

    def _by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x); in exact mode row by row, so that shapes, and with them vector tails and summation orders, are
        always the same."""
        if not self._exact or len(x) < 2:
            return function(x)
        return torch.cat([function(x[row : row + 1]) for row in range(len(x))])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019); the root in float32."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al. 2021), halves form, of x [T, heads, head_dim] by rows [T, 1, head_dim] of
    `models.rope.rope_tables`; computed in float32."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped * sin).to(x.dtype)
