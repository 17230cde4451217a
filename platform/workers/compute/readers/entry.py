"""A tensor of a checkpoint that has not been read yet."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.compute.quant.quantized import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a matrix of small integers is copied into the normal form, undequantized."""

    bits: int
    group_size: int
    copy_groups: Callable[[QuantizedTensor], None]
    """Into rows of the normal form, of the entry's shape."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Its shape, rows first, and how to copy it into a tensor of that shape."""

    shape: tuple[int, ...]
    copy_into: Callable[[Tensor], None]
    quantized: Quantized | None = None
    """None: it is not, or in a way that the normal form can't hold."""


def quantized_entry(rows: int, columns: int, quantized: Quantized) -> Entry:
    """Of a matrix that is dequantized through its normal form."""

    def copy_into(out: Tensor) -> None:
        whole = QuantizedTensor.empty(rows, columns, quantized.group_size, quantized.bits)
        quantized.copy_groups(whole)
        out.copy_(whole.dequantized())

    return Entry((rows, columns), copy_into, quantized)
