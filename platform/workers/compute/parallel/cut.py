"""Weights and adapters cut down to what one rank holds (`shares`): copies, so that the whole can go.

A quantized matrix whose columns are cut inside a group gets smaller groups of the same scales, which loses nothing.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from penstock.workers.compute.lora import FUSED, LoraAdapter, LowRank, Part, make_adapter
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.parallel.shares import Share
from penstock.workers.compute.quant.quantized import QuantizedTensor


def cut_weights(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]], whole: ModelConfig, share: Share
) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """The rank's part of each parameter, as it comes; parameters of which the rank has nothing are left out."""
    for name, weight in weights:
        if share.has(name):
            yield name, cut_weight(name, weight, whole, share)


def cut_weight(
    name: str, weight: Tensor | QuantizedTensor, whole: ModelConfig, share: Share
) -> Tensor | QuantizedTensor:
    """The rank's part of a parameter."""
    rows, columns = share.rows_of(name, whole), share.columns_of(name, whole)
    if rows is not None:
        return _cut_rows(weight, rows)
    return weight if columns is None else _cut_columns(weight, columns)


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


def _cut_rows(weight: Tensor | QuantizedTensor, rows: list[range]) -> Tensor | QuantizedTensor:
    if isinstance(weight, Tensor):
        return _join_rows(weight, rows)
    return QuantizedTensor(
        _join_rows(weight.q, rows),
        _join_rows(weight.scale, rows),
        None if weight.offset is None else _join_rows(weight.offset, rows),
        weight.group_size,
    )


def _join_rows(tensor: Tensor, rows: list[range]) -> Tensor:
    return torch.cat([tensor[part.start : part.stop] for part in rows])


def _cut_columns(weight: Tensor | QuantizedTensor, columns: range) -> Tensor | QuantizedTensor:
    if isinstance(weight, Tensor):
        return _columns(weight, columns)
    if weight.scale.shape[1] == 1:
        return QuantizedTensor(_columns(weight.q, columns), weight.scale, weight.offset, len(columns))
    size = math.gcd(weight.group_size, columns.start)
    fine = weight if size == weight.group_size else weight.regroup(size)
    # the end may lie in a group too: the last one may be short, as the matrix's own may
    groups = range(columns.start // size, -(-columns.stop // size))
    return QuantizedTensor(
        _columns(fine.q, columns),
        _columns(fine.scale, groups),
        None if fine.offset is None else _columns(fine.offset, groups),
        min(size, len(columns)),
    )


def _columns(tensor: Tensor, columns: range) -> Tensor:
    return tensor[:, columns.start : columns.stop].clone(memory_format=torch.contiguous_format)
