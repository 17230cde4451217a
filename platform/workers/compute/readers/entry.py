"""A tensor of a checkpoint that has not been read yet."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a matrix of small integers is copied into the normal form, undequantized."""

    bits: int
    group_size: int
    copy_groups: Callable[[QuantizedTensor], None]
    """Copies the matrix into rows of the normal form, which have the entry's shape."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint: its shape, rows first, and how to copy it into a tensor of that shape, on any
    device."""

    shape: tuple[int, ...]
    copy_into: Callable[[Tensor], None]
    quantized: Quantized | None = None
    """How the tensor is copied into the normal form; None if it is not quantized, or in a way that the normal form
    can't hold."""
    copy_float8: Callable[[Float8Tensor], None] | None = None
    """Copies a matrix of 8-bit floats, that is to be multiplied with activations of 8 bits, as it is stored."""


def quantized_entry(rows: int, columns: int, quantized: Quantized) -> Entry:
    """An entry of a quantized matrix, which `copy_into` dequantizes through the normal form."""

    def copy_into(out: Tensor) -> None:
        whole = QuantizedTensor.empty(rows, columns, quantized.group_size, quantized.bits, out.device)
        quantized.copy_groups(whole)
        out.copy_(whole.dequantize())

    return Entry((rows, columns), copy_into, quantized)


def float8_entry(
    rows: int, columns: int, copy_float8: Callable[[Float8Tensor], None], *, rounds_activations: bool
) -> Entry:
    """An entry of a matrix of 8-bit floats, which `copy_into` dequantizes. rounds_activations: whether the checkpoint
    was made for activations of 8 bits."""

    def copy_into(out: Tensor) -> None:
        whole = Float8Tensor.empty(rows, columns, out.device)
        copy_float8(whole)
        out.copy_(whole.dequantize_in(out.dtype))

    return Entry((rows, columns), copy_into, copy_float8=copy_float8 if rounds_activations else None)
