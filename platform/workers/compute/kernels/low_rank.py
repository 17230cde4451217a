"""Adapters as the decoder's kernels read them (cpp/decoder/low_rank.hpp): all matrices of one in one piece of memory,
in bfloat16 or, beside a quantized model, in 8 bits, whatever they were in before."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.kernels.arena import ALIGNMENT, Arena

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_PANEL, _BLOCK = 16, 32
_MOST_MODULES = 3
"""Modules in one matrix of the model, at most."""
_LARGEST = 127

Floats = npt.NDArray[np.float32]


class Module(NamedTuple):
    """What an adapter adds to one module of a matrix of the model: to outputs [start, end)."""

    start: int
    end: int
    a: Tensor
    """[rank, K]."""
    b: Tensor
    """[end - start, rank], with the scaling in it."""
    factor: Tensor | None = None
    """float32 [end - start], of the base product (DoRA); None: one."""


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("start", "end", "first", "pairs")),
        ("b", _P),
        ("factor", _P),
    )


class _LowRank(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("rank", "num_parts")),
        *((name, _P) for name in ("a", "scales")),
        ("parts", _Part * _MOST_MODULES),
    )


class PackedAdapter:
    """An adapter in the kernels' form; keeps its memory."""

    def __init__(self, layers: Sequence[Sequence[Sequence[Module]]], bits: int = 16) -> None:
        """layers: of each layer, for each matrix of the model in the kernels' order (`AdaptedMatrix` of decoder.hpp),
        the modules that are adapted, ascending. bits: of an element, 16 or 8."""
        matrices = [modules for layer in layers for modules in layer]
        self._bits = bits
        self.nbytes = sum(module_bytes(module, bits) for modules in matrices for module in modules)
        self._memory = Arena().cut(self.nbytes)
        self._structs = (_LowRank * len(matrices))()
        self.address = ctypes.addressof(self._structs)
        self.num_layers = len(layers)
        taken = 0
        for struct, modules in zip(self._structs, matrices, strict=True):
            taken = self._fill(struct, modules, taken)
        assert taken == self.nbytes
        self.widest_rank = max(int(struct.rank) for struct in self._structs)
        """Rank of all modules of a matrix together, each an even number, at most."""

    def _fill(self, struct: _LowRank, modules: Sequence[Module], taken: int) -> int:
        """Write a matrix's modules from byte `taken` on; returns the first byte behind them."""
        struct.num_parts = len(modules)
        # a's of all parts lie one behind the other, as if they were one matrix, and so do their scales
        of_a = [_pack_a(module.a, self._bits) for module in modules]
        for place, (module, packed) in enumerate(zip(modules, of_a, strict=True)):
            address, taken = self._write(packed.numbers, taken)
            if place == 0:
                struct.a = address
            pairs = _even(len(module.a)) // 2
            struct.parts[place] = _Part(module.start, module.end, struct.rank, pairs)
            struct.rank += 2 * pairs
        if modules and self._bits == 8:
            scales = torch.cat([packed.scales for packed in of_a])
            struct.scales = self._write(scales, taken)[0]
            taken += sum(_aligned(packed.scales.nbytes) for packed in of_a)
        for part, module in zip(struct.parts, modules, strict=False):
            part.b, taken = self._write(_packed_b(module.b, self._bits), taken)
            if module.factor is not None:
                part.factor, taken = self._write(module.factor, taken)
        return taken

    def _write(self, content: Tensor, taken: int) -> tuple[int, int]:
        """Copy to byte `taken`; returns the address, and the first byte behind it."""
        place = self._memory[taken : taken + content.nbytes]
        place.copy_(content.contiguous().view(-1).view(torch.uint8))
        return place.data_ptr(), taken + _aligned(content.nbytes)


class AdapterTable(NamedTuple):
    """The adapters of a step."""

    adapters: Sequence[PackedAdapter]
    adapter_of: Tensor
    """int32 [T]: each token's place in `adapters`; -1: none."""

    @property
    def widest_rank(self) -> int:
        return max(adapter.widest_rank for adapter in self.adapters)


def module_bytes(module: Module, bits: int = 16) -> int:
    (rank, inputs), outputs = module.a.shape, len(module.b)
    return packed_bytes(rank, outputs, inputs, bits, has_factor=module.factor is not None)


def packed_bytes(rank: int, outputs: int, inputs: int, bits: int = 16, *, has_factor: bool = False) -> int:
    """Bytes that one module of an adapter takes."""
    ranks, panels = _even(rank), -(-outputs // _PANEL)
    of_a = ranks * -(-inputs // _BLOCK) * _BLOCK * bits // 8
    of_b = panels * _PANEL * ranks * bits // 8
    if bits == 8:
        of_a += _aligned(ranks * torch.float32.itemsize)
        of_b = _aligned(of_b + panels * _PANEL * torch.bfloat16.itemsize)
    return of_a + of_b + (_aligned(outputs * torch.float32.itemsize) if has_factor else 0)


class _PackedA(NamedTuple):
    numbers: Tensor
    scales: Tensor
    """float32 [rank, made even]; of bfloat16 none."""


def _pack_a(a: Tensor, bits: int) -> _PackedA:
    """Columns i and 16 + i of a block of 32 side by side, bfloat16 [rank, blocks, 16, 2]; of 8 bits the columns in
    order, int8 [rank, blocks, 32], with a scale for each rank."""
    rank, columns = a.shape
    padded = functional.pad(a, (0, -columns % _BLOCK, 0, rank % 2))
    if bits == 16:
        return _PackedA(padded.bfloat16().view(len(padded), -1, 2, _PANEL).transpose(2, 3), torch.empty(0))
    numbers = padded.float().numpy()
    scales = np.abs(numbers).max(1) / _LARGEST
    return _PackedA(_divided(numbers, scales), torch.from_numpy(scales))


def _packed_b(b: Tensor, bits: int) -> Tensor:
    """Panels of 16 outputs, [panels, pairs of ranks, 16, 2]: bfloat16; or int8, and in front of each panel a bfloat16
    scale for each output, all in bytes, [panels, bytes]."""
    outputs, rank = b.shape
    padded = functional.pad(b, (0, rank % 2, 0, -outputs % _PANEL))
    shape = -1, _PANEL, padded.shape[1] // 2, 2
    if bits == 16:
        return padded.bfloat16().view(shape).transpose(1, 2)
    numbers = padded.float().numpy()
    scales = torch.from_numpy(np.abs(numbers).max(1) / _LARGEST).bfloat16()
    steps = _divided(numbers, scales.float().numpy()).view(shape).transpose(1, 2)
    return torch.cat((scales.view(-1, _PANEL).view(torch.uint8), steps.flatten(1).view(torch.uint8)), dim=1)


def _divided(rows: Floats, scales: Floats) -> Tensor:
    """Rows in steps of their scales, int8. In numpy: torch would wait for its threads, which an engine at work keeps
    from their cores, at every matrix."""
    steps = rows / np.where(scales > 0, scales, 1)[:, None]
    return torch.from_numpy(np.rint(steps).clip(-_LARGEST, _LARGEST).astype(np.int8))


def _even(rank: int) -> int:
    return rank + rank % 2


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
