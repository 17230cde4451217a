"""Adapters as the decoder's kernels read them (cpp/decoder/low_rank.hpp): all matrices of one in one piece of memory,
in bfloat16, whatever they were in before."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.kernels.arena import ALIGNMENT, Arena

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_PANEL, _BLOCK = 16, 32
_MOST_MODULES = 3
"""Modules in one matrix of the model, at most."""


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
    _fields_ = (("rank", _I64), ("num_parts", _I64), ("a", _P), ("parts", _Part * _MOST_MODULES))


class PackedAdapter:
    """An adapter in the kernels' form; keeps its memory."""

    def __init__(self, layers: Sequence[Sequence[Sequence[Module]]]) -> None:
        """layers: of each layer, for each matrix of the model in the kernels' order (`AdaptedMatrix` of decoder.hpp),
        the modules that are adapted, ascending."""
        matrices = [modules for layer in layers for modules in layer]
        self.nbytes = sum(module_bytes(module) for modules in matrices for module in modules)
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
        # a's of all parts lie one behind the other, as if they were one matrix
        for place, module in enumerate(modules):
            address, taken = self._write(_packed_a(module.a), taken)
            if place == 0:
                struct.a = address
            pairs = _even(len(module.a)) // 2
            struct.parts[place] = _Part(module.start, module.end, struct.rank, pairs)
            struct.rank += 2 * pairs
        for part, module in zip(struct.parts, modules, strict=False):
            part.b, taken = self._write(_packed_b(module.b), taken)
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


def module_bytes(module: Module) -> int:
    (rank, inputs), outputs = module.a.shape, len(module.b)
    return packed_bytes(rank, outputs, inputs, has_factor=module.factor is not None)


def packed_bytes(rank: int, outputs: int, inputs: int, *, has_factor: bool = False) -> int:
    """Bytes that one module of an adapter takes."""
    pairs = _even(rank) // 2
    of_a = 2 * pairs * -(-inputs // _BLOCK) * _BLOCK * torch.bfloat16.itemsize
    of_b = -(-outputs // _PANEL) * _PANEL * 2 * pairs * torch.bfloat16.itemsize
    return of_a + of_b + (_aligned(outputs * torch.float32.itemsize) if has_factor else 0)


def _packed_a(a: Tensor) -> Tensor:
    """bfloat16 [rank, blocks, 16, 2]: columns i and 16 + i of a block of 32 side by side."""
    rank, columns = a.shape
    padded = functional.pad(a.bfloat16(), (0, -columns % _BLOCK, 0, rank % 2))
    return padded.view(len(padded), -1, 2, _PANEL).transpose(2, 3)


def _packed_b(b: Tensor) -> Tensor:
    """bfloat16 [panels of 16 outputs, pairs of ranks, 16, 2]."""
    outputs, rank = b.shape
    padded = functional.pad(b.bfloat16(), (0, rank % 2, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // 2, 2).transpose(1, 2)


def _even(rank: int) -> int:
    return rank + rank % 2


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
