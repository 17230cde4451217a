"""Matrices of small integers, in groups along the input: w[n, k] = q[n, k] * scale[n, g] + offset[n, g], g = k //
group_size.

`QuantizedTensor` is the normal form that every quantized format is read into, without loss:

| format | q | scale | offset | group_size |
|---|---|---|---|---|
| AutoAWQ: (q - zero) * scale | uint8, 0 to 15 | scale | -zero * scale | 32, 64, 128, ... |
| compressed-tensors with zero points: (q - zero) * scale | uint8, 0 to 15 | scale | -zero * scale | likewise |
| compressed-tensors, symmetric: (q - 8) * scale | uint8, 0 to 15 | scale | -8 * scale | likewise |
| GGUF Q4_0: (q - 8) * d | uint8, 0 to 15 | d | -8 * d | 32 |
| GGUF Q4_1: q * d + m | uint8, 0 to 15 | d | m | 32 |
| GGUF Q8_0: q * d; compressed-tensors in 8 bits, symmetric | int8, -128 to 127 | d | None | 32; any |

Products of a scale in float16 or bfloat16 and 4 bits are exact in float32, so an integer zero point can be had back
from an offset (`zero`).

`TorchQuantizedMatrix` is what torch's layers compute with: in bfloat16 our kernels or, where there are none, torch's
int4 operator, both of which read packed weights; in other dtypes the operator is slower than dense products by tens of
times, so the weights are dequantized once.

Decisions: docs/decisions/quantization.md
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.matmul import Level, MatmulKernels, PackedMatrix, Rounding, is_group

LEAST_SCALE = 2.0**-20
"""Smallest scale of a group that is rounded; float16, which keeps scales, has four bits left there."""
_OUT_MULTIPLE = 16
"""Output rows that the operator packs together; it takes matrices of a multiple of them."""
_OPERATOR_GROUPS = (128, 64, 32)
CHUNK_ELEMENTS = 1 << 20
"""Elements dequantized at once in float32, at most (of a matrix with longer rows, one row)."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The normal form. Contiguous as read; views of its rows are not copies."""

    q: Tensor
    """[N, K]: uint8, 0 to 15, or int8."""
    scale: Tensor
    """float32 [N, G]. May be 0 (a group of equal weights) or negative (GGUF's Q4_0)."""
    offset: Tensor | None
    """float32 [N, G]; None for int8: no offset anywhere."""
    group_size: int
    """Columns of a group; the last one may be short: G = ceil(K / group_size)."""

    @staticmethod
    def empty(
        rows: int, columns: int, group_size: int, bits: int = 4, device: torch.device | None = None
    ) -> "QuantizedTensor":
        """A matrix of zeros. bits: 4 or 8."""
        count = -(-columns // group_size)
        q = torch.zeros(rows, columns, dtype=torch.uint8 if bits == 4 else torch.int8, device=device)
        scale = torch.zeros(rows, count, device=device)
        return QuantizedTensor(q, scale, torch.zeros_like(scale) if bits == 4 else None, group_size)

    @property
    def bits(self) -> int:
        return 4 if self.q.dtype == torch.uint8 else 8

    @property
    def zero(self) -> Tensor:
        """float32 [N, G]: the q of weight 0, an integer if the format has zero points; 0 where the scale is."""
        if self.offset is None:
            return torch.zeros_like(self.scale)
        return torch.where(self.scale == 0, 0.0, -self.offset / self.scale)

    def rows(self, start: int, end: int) -> "QuantizedTensor":
        """Rows [start, end), as a view."""
        return QuantizedTensor(
            self.q[start:end],
            self.scale[start:end],
            None if self.offset is None else self.offset[start:end],
            self.group_size,
        )

    def columns(self, start: int, end: int) -> "QuantizedTensor":
        """Columns [start, end), as a copy, in groups of `cut_group_size`: the same numbers."""
        columns = range(start, end)
        size = cut_group_size(self.group_size, columns, self.q.shape[1])
        if self.scale.shape[1] == 1:
            return QuantizedTensor(_copy_columns(self.q, columns), self.scale, self.offset, size)
        fine = self.regroup(math.gcd(self.group_size, start))
        groups = range(start // fine.group_size, -(-end // fine.group_size))
        return QuantizedTensor(
            _copy_columns(fine.q, columns),
            _copy_columns(fine.scale, groups),
            None if fine.offset is None else _copy_columns(fine.offset, groups),
            size,
        )

    def copy_(self, other: "QuantizedTensor") -> None:
        """Copy another of the same shape and form into this one."""
        self.q.copy_(other.q)
        self.scale.copy_(other.scale)
        if self.offset is not None and other.offset is not None:
            self.offset.copy_(other.offset)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        scaled = self.q.float() * self._spread(self.scale)
        return scaled if self.offset is None else scaled + self._spread(self.offset)

    def dequantize_in(self, dtype: torch.dtype) -> Tensor:
        """[N, K], some rows at a time."""
        rows, columns = self.q.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.q.device)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            out[start : start + step] = self.rows(start, start + step).dequantize()
        return out

    def regroup(self, group_size: int) -> "QuantizedTensor":
        """The same matrix in smaller groups, of a size that divides its own (or, where a row is one group, its
        columns)."""
        if group_size == self.group_size:
            return self
        count = -(-self.q.shape[1] // group_size)
        scale, offset = (
            None
            if values is None
            else values.repeat_interleave(self.group_size // group_size, dim=1)[:, :count].contiguous()
            for values in (self.scale, self.offset)
        )
        assert scale is not None
        return QuantizedTensor(self.q, scale, offset, group_size)

    def _spread(self, values: Tensor) -> Tensor:
        """[N, G] to [N, K]."""
        return values.repeat_interleave(self.group_size, dim=1)[:, : self.q.shape[1]]


def cut_group_size(group_size: int, columns: range, count: int) -> int:
    """Size of the groups of some columns of a matrix that has `count` and groups of `group_size`: one that cuts none of
    them but the last, which may be short."""
    if len(columns) == count:
        return group_size
    return len(columns) if group_size >= count else min(math.gcd(group_size, columns.start), len(columns))


def _copy_columns(tensor: Tensor, columns: range) -> Tensor:
    return tensor[:, columns.start : columns.stop].clone(memory_format=torch.contiguous_format)


def quantize(weight: Tensor, group_size: int) -> QuantizedTensor:
    """Round to nearest: per row and group the range of the weights, zero included, in 15 equal steps. weight: [N, K],
    any float."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % group_size)).view(rows, -1, group_size)
    scale, zero = lattice(padded.amin(-1), padded.amax(-1))
    q = (padded / scale[..., None]).round().add(zero[..., None]).clamp(0, 15)
    return QuantizedTensor(q.view(rows, -1)[:, :columns].to(torch.uint8).contiguous(), scale, -zero * scale, group_size)


def quantize_int8(weight: Tensor, group_size: int) -> QuantizedTensor:
    """Round to nearest in -127 to 127, symmetric, per row and group; scales as float16 would keep them. weight: [N, K],
    any float."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % group_size)).view(rows, -1, group_size)
    scale = (padded.abs().amax(-1) / 127).clamp(min=LEAST_SCALE).half().float()
    q = (padded / scale[..., None]).round().clamp(-127, 127)
    return QuantizedTensor(q.view(rows, -1)[:, :columns].to(torch.int8).contiguous(), scale, None, group_size)


def lattice(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scale and zero point, 0 to 15, of groups whose weights are between `low` and `high`."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    # a float16 scale is what the checkpoint keeps: round to it first, so that what is rounded is what will be read
    scale = ((high - low) / 15).clamp(min=LEAST_SCALE).half().float()
    return scale, (-low / scale).round().clamp(0, 15)


class TorchQuantizedMatrix:
    """A quantized [N, K] matrix of 4 or 8 bits on the CPU, as torch's layers multiply with it: for activations of one
    dtype, which are not rounded."""

    def __init__(self, quantized: QuantizedTensor, dtype: torch.dtype) -> None:
        self.shape = quantized.q.shape
        self.dtype = dtype
        self._dense: Tensor | None = None
        self._for_operator: _OperatorForm | None = None
        kernels = (
            load_kernels() if dtype == torch.bfloat16 and is_group(quantized.group_size, quantized.q.shape[1]) else None
        )
        self._matmul = kernels.matmul if kernels is not None and kernels.matmul.level() > Level.PORTABLE else None
        if self._matmul is not None:
            self._packed = _pack(quantized, self._matmul)
            return
        group_size = _operator_group(quantized)
        if dtype != torch.bfloat16 or group_size is None or quantized.offset is None:
            self._dense = quantized.dequantize().to(dtype)
        else:
            self._for_operator = _OperatorForm(quantized, group_size)

    @property
    def nbytes(self) -> int:
        if self._matmul is not None:
            return self._packed.nbytes
        form = self._for_operator
        if form is not None:
            return form.packed.nbytes + form.scales.nbytes
        return 0 if self._dense is None else self._dense.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, K] times the transpose: [T, N] in x's dtype."""
        if self._matmul is not None:
            return self._matmul.multiply(x, self._packed, Rounding.NONE, torch.get_num_threads()).to(x.dtype)
        form = self._for_operator
        if form is None:
            assert self._dense is not None
            return functional.linear(x, self._dense)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), form.packed, form.group_size, form.scales
        )
        return product

    def dense_rows(self, start: int, end: int) -> Tensor:
        """Rows, dequantized: float32 [end - start, K]."""
        if self._matmul is not None:
            return self._matmul.read_rows(self._packed, torch.arange(start, end))
        # the operator has no way to read them but to multiply with them
        dense = self.multiply(torch.eye(self.shape[1], dtype=self.dtype)).T if self._dense is None else self._dense
        return dense[start:end].float()


class _OperatorForm:
    """The matrix as torch's int4 operator takes it: (q - 8) * scale + offset, scales and offsets [G, N, 2] in
    bfloat16."""

    def __init__(self, quantized: QuantizedTensor, group_size: int) -> None:
        self.group_size = group_size
        fine = quantized.regroup(group_size)
        assert fine.offset is not None
        self.scales = (
            torch.stack((fine.scale, fine.offset + 8 * fine.scale), dim=-1).transpose(0, 1).contiguous().bfloat16()
        )
        self.packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantized.q.int(), 8)


def _pack(quantized: QuantizedTensor, matmul: MatmulKernels) -> PackedMatrix:
    if quantized.offset is None:
        return matmul.pack_int8(quantized.q, quantized.scale, quantized.group_size)
    return matmul.pack_int4(quantized.q, quantized.scale, quantized.offset, quantized.group_size)


Matrix = Tensor | TorchQuantizedMatrix
"""[N, K], dense or quantized."""


def _operator_group(quantized: QuantizedTensor) -> int | None:
    """Group size for torch's operator: the matrix's own, or a smaller one that divides it and the columns. Returns None
    if the operator can't take the matrix."""
    rows, columns = quantized.q.shape
    if rows % _OUT_MULTIPLE:
        return None
    return next((size for size in _OPERATOR_GROUPS if quantized.group_size % size == 0 and columns % size == 0), None)
