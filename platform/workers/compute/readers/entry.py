"""A tensor of a checkpoint that has not been read yet, whole or a part of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor, cut_group_size


class Window(NamedTuple):
    """Rows and columns of a matrix, or elements of a vector."""

    rows: range
    columns: range | None = None
    """None: it is a vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows),) if self.columns is None else (len(self.rows), len(self.columns))

    def widen(self, row_unit: int, column_unit: int, shape: tuple[int, ...]) -> "Window":
        """The smallest window of a matrix [N, K] around this one whose borders are multiples of the units, or the
        matrix's own."""
        assert self.columns is not None
        return Window(_widen(self.rows, row_unit, shape[0]), _widen(self.columns, column_unit, shape[1]))


def _widen(part: range, unit: int, count: int) -> range:
    return range(part.start // unit * unit, min(count, -(-part.stop // unit) * unit))


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a matrix of small integers is copied into the normal form, undequantized."""

    bits: int
    group_size: int
    copy_groups: Callable[[QuantizedTensor, Window], None]
    """Copies a window of the matrix into the normal form, which has its shape. Its borders are multiples of the
    units."""
    row_unit: int
    """Rows that the format stores together."""
    column_unit: int
    """Columns that the format stores together: groups, where a row has several."""

    def copy(self, out: QuantizedTensor, window: Window, shape: tuple[int, ...]) -> None:
        """Copy a window of the matrix, which has the shape [N, K], into `out`, whose groups are those of
        `cut_group_size`."""
        wide = window.widen(self.row_unit, self.column_unit, shape)
        if wide == window:
            self.copy_groups(out, window)
            return
        assert wide.columns is not None
        assert window.columns is not None
        size = cut_group_size(self.group_size, wide.columns, shape[1])
        around = QuantizedTensor.empty(len(wide.rows), len(wide.columns), size, self.bits, out.q.device)
        self.copy_groups(around, wide)
        first, left = window.rows.start - wide.rows.start, window.columns.start - wide.columns.start
        rows = around.rows(first, first + len(window.rows))
        out.copy_(rows.columns(left, left + len(window.columns)))


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: its shape, rows first, and how to copy a window of it into a tensor of the window's
    shape, on any device."""

    shape: tuple[int, ...]
    copy_into: Callable[[Tensor, Window], None]
    quantized: Quantized | None = None
    """How the tensor is copied into the normal form; None if it is not quantized, or in a way that the normal form
    can't hold."""
    copy_float8: Callable[[Float8Tensor, Window], None] | None = None
    """Copies a window of a matrix of 8-bit floats, that is to be multiplied with activations of 8 bits, as it is
    stored."""


def quantized_entry(rows: int, columns: int, quantized: Quantized) -> Entry:
    """An entry of a quantized matrix, which `copy_into` dequantizes through the normal form."""

    def copy_into(out: Tensor, window: Window) -> None:
        assert window.columns is not None
        size = cut_group_size(quantized.group_size, window.columns, columns)
        part = QuantizedTensor.empty(len(window.rows), len(window.columns), size, quantized.bits, out.device)
        quantized.copy(part, window, (rows, columns))
        out.copy_(part.dequantize())

    return Entry((rows, columns), copy_into, quantized)


def float8_entry(
    rows: int, columns: int, copy_float8: Callable[[Float8Tensor, Window], None], *, rounds_activations: bool
) -> Entry:
    """An entry of a matrix of 8-bit floats, which `copy_into` dequantizes. rounds_activations: whether the checkpoint
    was made for activations of 8 bits."""

    def copy_into(out: Tensor, window: Window) -> None:
        assert window.columns is not None
        part = Float8Tensor.empty(len(window.rows), len(window.columns), out.device)
        copy_float8(part, window)
        out.copy_(part.dequantize_in(out.dtype))

    return Entry((rows, columns), copy_into, copy_float8=copy_float8 if rounds_activations else None)
