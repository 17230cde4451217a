"""What one rank holds (`shares`) of weights, of which it reads nothing else, and of adapters, which are small: they are
read whole and cut.
"""

import torch
from torch import Tensor

from penstock.workers.compute.lora import FUSED, LoraAdapter, LowRank, Part, make_adapter
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.parallel.shares import Share
from penstock.workers.compute.weights import Take, Taken


def take_own(share: Share, whole: ModelConfig) -> Take:
    """What a rank reads of each parameter of a checkpoint."""

    def take(name: str) -> Taken | None:
        return Taken(share.rows_of(name, whole), share.columns_of(name, whole)) if share.has(name) else None

    return take


def cut_adapter(adapter: LoraAdapter, whole: ModelConfig, share: Share, device: torch.device) -> LoraAdapter:
    """The rank's part of an adapter of the whole model, on the rank's device: B of matrices that are cut by rows, A of
    those that are cut by columns. The other one is whole."""
    layers = [
        {name: _cut_low_rank(name, low_rank, whole, share) for name, low_rank in layer.items()}
        for layer in adapter.layers
    ]
    num_bytes = sum(tensor.nbytes for layer in layers for low_rank in layer.values() for tensor in low_rank.tensors)
    return make_adapter(adapter.digest, layers, num_bytes, device)


def _cut_low_rank(name: str, low_rank: LowRank, whole: ModelConfig, share: Share) -> LowRank:
    rows, columns = share.rows_of(name, whole), share.columns_of(name, whole)
    if rows is None:
        a = low_rank.a if columns is None else low_rank.a[:, columns.start : columns.stop]
        return LowRank(_copied(a), [part._replace(b=_copied(part.b)) for part in low_rank.parts])
    assert len(rows) == len(FUSED[name])
    parts: list[Part] = []
    for part in low_rank.parts:
        # modules lie in the whole matrix as in the rank's: one range of rows each
        own = next(own for own in rows if part.start <= own.start and own.stop <= part.end)
        start = sum(len(before) for before in rows[: rows.index(own)])
        b = part.b[own.start - part.start : own.stop - part.start]
        parts.append(Part(start, start + len(own), _copied(b)))
    return LowRank(_copied(low_rank.a), parts)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
