"""`Operators` of a step on a GPU: each is one launch of `penstock.workers.compute.triton.glue`.

Imported only where there is a GPU, or Triton's interpreter in its place.
"""

import torch
from torch import Tensor

from penstock.workers.compute.kernels.cache_layout import CacheLayout
from penstock.workers.compute.models.operators import Norms
from penstock.workers.compute.triton.glue import add_norm, gate, norm, rotate_and_store


class GpuOperators:
    def __init__(
        self,
        eps: float,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slot_mapping: Tensor,
        dtype: torch.dtype,
        *,
        takes_parts: bool,
        queries: Tensor | None = None,
    ) -> None:
        """eps: of norms. rope: as of `models.rope.rope_tables`. positions, slot_mapping: int64 [T]; less than 0 is
        nowhere. All on the GPU. dtype: the model's. takes_parts: see `Operators`. queries: memory that queries of
        every layer are written to, [T, num_heads, head_dim]; None: new memory for each."""
        self._eps = eps
        self._rope = rope
        self._positions = positions
        self._slot_mapping = slot_mapping
        self._dtype = dtype
        self._queries = queries
        self.takes_parts = takes_parts

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        return add_norm(x, added, weight, self._eps)

    def rotate_and_store(
        self, qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor, layout: CacheLayout
    ) -> Tensor:
        return rotate_and_store(
            qkv, norms, self._eps, self._rope, self._positions, self._slot_mapping, keys, values, self._dtype,
            layout.scales, self._queries,
        )  # fmt: skip

    def gate(self, gate_up: Tensor) -> Tensor:
        return gate(gate_up, self._dtype)
