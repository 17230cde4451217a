"""A decode step in eager torch, to compare ours with: dequantize and multiply, fused attention over the gathered
context."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.steps.shapes import Bench, TorchMatrix, Weight
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.models.operators import gated, rms_norm, rotate
from penstock.workers.compute.quant.quantized import QuantizedTensor


class TorchStep:
    """A decode step in eager torch, over the same weights and the same cache, which it only reads: the token's own key
    and value are ours already."""

    def __init__(
        self, bench: Bench, weights: Mapping[str, Weight], cache: KvCache, batch: Batch, rope: tuple[Tensor, Tensor]
    ) -> None:
        self._bench, self._weights, self._cache = bench, weights, cache
        self._ids, self._tables = batch.token_ids.to(bench.device), batch.attention.block_tables.long().to(bench.device)
        self._context = int(batch.attention.context_len[0])
        self._cos, self._sin = (table[batch.positions.to(bench.device)] for table in rope)

    def logits(self) -> Tensor:
        """Logits of the step, float32 [batch, vocab_size]."""
        config = self._bench.config
        x = self._rows("embed", self._ids)
        for index in range(config.num_layers):
            x = x + self._attention(index, self._norm(x, f"layers.{index}.input_norm"))
            inner = gated(self._times(self._norm(x, f"layers.{index}.post_norm"), f"layers.{index}.gate_up"))
            x = x + self._times(inner, f"layers.{index}.down")
        return self._times(self._norm(x, "norm"), "lm_head").float()

    def best(self) -> Tensor:
        """Best token of each sequence, on the host."""
        return self.logits().argmax(1).cpu()

    def _attention(self, index: int, x: Tensor) -> Tensor:
        config = self._bench.config
        heads = self._times(x, f"layers.{index}.qkv").view(len(x), -1, config.head_dim)
        q = rotate(heads[:, : config.num_heads], self._cos, self._sin)
        keys, values = (self._gathered(index, which) for which in (0, 1))
        out = functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        return self._times(out.flatten(1), f"layers.{index}.o")

    def _gathered(self, index: int, which: int) -> Tensor:
        """Keys or values of the context, gathered from their blocks: [batch, num_kv_heads, context, head_dim]."""
        cache, scales = self._cache.layers[index][which], self._cache.layouts[index].scales
        if scales is None:
            found = cache[self._tables].to(self._bench.dtype)
        else:
            found = cache.view(torch.uint8)[self._tables].view(cache.dtype).to(self._bench.dtype) * scales[which][
                self._tables
            ][..., None].to(self._bench.dtype)
        return found.transpose(1, 2).flatten(2, 3)[:, :, : self._context]

    def _times(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        return functional.linear(x, weight if isinstance(weight, Tensor) else weight.dense)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        weight = self._weights[name]
        if isinstance(weight, Tensor):
            return weight[ids]
        return TorchMatrix(
            QuantizedTensor(weight.groups.q[ids], weight.groups.scale[ids], None, weight.groups.group_size),
            weight.dtype,
        ).dense

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor)
        return rms_norm(x, weight, self._bench.config.rms_norm_eps)
