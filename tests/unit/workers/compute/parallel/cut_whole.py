"""A rank's parameters cut out of whole ones: the oracle of what a rank reads."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.parallel.shares import Share
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor

Parameter = Tensor | QuantizedTensor | Float8Tensor


def cut_weights(
    weights: Iterable[tuple[str, Parameter]], whole: ModelConfig, share: Share
) -> Iterator[tuple[str, Parameter]]:
    """The rank's part of each parameter, as it comes; parameters of which the rank has nothing are left out."""
    for name, weight in weights:
        if share.has(name):
            yield name, cut_weight(name, weight, whole, share)


def cut_weight(name: str, weight: Parameter, whole: ModelConfig, share: Share) -> Parameter:
    """The rank's part of a parameter."""
    rows, columns = share.rows_of(name, whole), share.columns_of(name, whole)
    if rows is not None:
        return _cut_rows(weight, rows)
    return weight if columns is None else _cut_columns(weight, columns)


def _cut_rows(weight: Parameter, rows: list[range]) -> Parameter:
    if isinstance(weight, Tensor):
        return _join_rows(weight, rows)
    if isinstance(weight, Float8Tensor):
        q = _join_rows(weight.q.view(torch.uint8), rows)
        return Float8Tensor(q.view(torch.float8_e4m3fn), _join_rows(weight.scale, rows))
    return QuantizedTensor(
        _join_rows(weight.q, rows),
        _join_rows(weight.scale, rows),
        None if weight.offset is None else _join_rows(weight.offset, rows),
        weight.group_size,
    )


def _join_rows(tensor: Tensor, rows: list[range]) -> Tensor:
    return torch.cat([tensor[part.start : part.stop] for part in rows])


def _cut_columns(weight: Parameter, columns: range) -> Parameter:
    if isinstance(weight, Tensor):
        return _columns(weight, columns)
    if isinstance(weight, Float8Tensor):
        return Float8Tensor(_columns(weight.q.view(torch.uint8), columns).view(torch.float8_e4m3fn), weight.scale)
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
