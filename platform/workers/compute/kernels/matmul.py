"""Products with packed matrices: C ABI of cpp/linear/linear.cpp, and the matrices that Python makes for it. Shapes and
types are checked here, because C can't."""

import ctypes
import enum
import math

import torch
from torch import Tensor

from penstock.workers.compute.kernels.arena import Arena

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

BLOCK_K = 32
"""Columns that a group is a multiple of."""
_LARGEST = 2.0**15
"""Scales and offsets are kept in float16, in a unit of which they are no more than so many."""


class Kind(enum.IntEnum):
    """Elements of a packed matrix."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


class Rounding(enum.IntEnum):
    """What activations are rounded to before they are multiplied with a quantized matrix. From level AVX2 on one term
    has a path of its own; below, it means two. OUTLIERS: one term, and a second one for the four neighbouring columns
    of each 32 that have the largest activation, so that its neighbours keep their digits; two terms below level
    VNNI."""

    TWO_TERMS = 0
    NONE = 1
    ONE_TERM = 2
    OUTLIERS = 3


OUTLIER_ROWS = 4
"""Rows at the most whose products have OUTLIERS in a decoder's step without a short prompt; of more, ONE_TERM
(decoder_matmul.hpp)."""


class Level(enum.IntEnum):
    """Instructions that the kernels multiply with: VNNI is AVX-512 with VNNI, AVX512 has BF16 besides, AMX has tiles of
    bf16; EMULATED_AMX computes these tiles in C++, for tests."""

    PORTABLE = 0
    AVX2 = 1
    VNNI = 2
    AVX512 = 3
    AMX = 4
    EMULATED_AMX = 5


class _Struct(ctypes.Structure):
    """`Matrix` of linear.hpp."""

    _fields_ = (
        ("kind", _I32),
        ("n", _I32),
        ("k", _I32),
        ("group", _I32),
        ("has_zero", _I32),
        ("unit", _F32),
        ("data", _P),
    )


class PackedMatrix:
    """A matrix [N, K] as the kernels read it. Its memory lives as long as this object."""

    def __init__(self, struct: _Struct, data: Tensor) -> None:
        self._struct = struct
        self._data = data
        struct.data = data.data_ptr()

    @property
    def shape(self) -> tuple[int, int]:
        return self._struct.n, self._struct.k

    @property
    def kind(self) -> Kind:
        return Kind(self._struct.kind)

    @property
    def group_size(self) -> int:
        """Columns of a group; 0 for bfloat16."""
        return int(self._struct.group)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @property
    def handle(self) -> int:
        """Address of the C struct `Matrix`."""
        return ctypes.addressof(self._struct)


class MatmulKernels:
    """The functions of a loaded library that pack matrices and multiply with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._arena = Arena()
        self._level, self._set_level, self._bytes = (
            library.penstock_level,
            library.penstock_set_level,
            library.penstock_matrix_bytes,
        )
        self._pack, self._read_rows, self._multiply = (
            library.penstock_pack,
            library.penstock_read_rows,
            library.penstock_multiply,
        )
        self._level.restype, self._level.argtypes = _I32, []
        self._set_level.restype, self._set_level.argtypes = _I32, [_I32]
        self._bytes.restype, self._bytes.argtypes = _I64, [_P]
        self._pack.restype, self._pack.argtypes = None, [_P, _P, _P, _P, _P]
        self._read_rows.restype, self._read_rows.argtypes = None, [_P, _P, _I64, _P]
        self._multiply.restype, self._multiply.argtypes = _I32, [_P, _P, _I64, _I32, _P, _I32, _I32]

    def level(self) -> Level:
        """The level in use: the CPU's best, unless `set_level` has set another."""
        return Level(self._level())

    def set_level(self, level: Level | None) -> bool:
        """Set the level of the whole process; None sets the CPU's best. Returns False, and changes nothing, if the CPU
        does not have that level."""
        return bool(self._set_level(-1 if level is None else level))

    def pack_bf16(self, weight: Tensor) -> PackedMatrix:
        """Pack a matrix for the kernels, without quantizing it. weight: bfloat16 [N, K]."""
        assert weight.dtype == torch.bfloat16
        rows, columns = weight.shape
        weight = weight.contiguous()
        packed = self._allocate(_Struct(Kind.BF16, rows, columns))
        self._pack(packed.handle, packed._struct.data, weight.data_ptr(), None, None)
        return packed

    def pack_int8(self, q: Tensor, scale: Tensor, group_size: int) -> PackedMatrix:
        """q * scale: q int8 [N, K], scale float32 [N, G]. group_size: one for which `is_group` holds."""
        assert q.dtype == torch.int8
        rows, columns = q.shape
        q, scale = q.contiguous(), scale.float().contiguous()
        assert scale.shape == (rows, -(-columns // group_size))
        packed = self._allocate(_Struct(Kind.INT8, rows, columns, _round_up(group_size), 0, 1.0))
        self._pack(packed.handle, packed._struct.data, q.data_ptr(), scale.data_ptr(), None)
        return packed

    def pack_int4(self, q: Tensor, scale: Tensor, offset: Tensor, group_size: int) -> PackedMatrix:
        """q * scale + offset: q uint8 [N, K], 0 to 15; scale, offset float32 [N, G], kept in float16 (offsets that are
        integers times the scale, exactly)."""
        assert q.dtype == torch.uint8
        rows, columns = q.shape
        assert scale.shape == offset.shape == (rows, -(-columns // group_size))
        unit = _unit(scale, offset)
        zero = torch.where(scale == 0, 0.0, -offset / scale)
        is_zero_kept = (
            bool(torch.equal(zero.round(), zero) and zero.abs().max() <= 1024 and torch.equal(-zero * scale, offset))
            if len(zero)
            else True
        )
        q, scale = q.contiguous(), (scale / unit).half().contiguous()
        second = (zero if is_zero_kept else offset / unit).half().contiguous()
        packed = self._allocate(_Struct(Kind.INT4, rows, columns, _round_up(group_size), is_zero_kept, unit))
        self._pack(packed.handle, packed._struct.data, q.data_ptr(), scale.data_ptr(), second.data_ptr())
        return packed

    def read_rows(self, matrix: PackedMatrix, rows: Tensor) -> Tensor:
        """Rows by number, int64 [R], dequantized: float32 [R, K]. Raises IndexError."""
        num_rows, columns = matrix.shape
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of a matrix that has {num_rows}")
        rows = rows.contiguous()
        out = torch.empty(len(rows), columns)
        self._read_rows(matrix.handle, rows.data_ptr(), len(rows), out.data_ptr())
        return out

    def multiply(self, x: Tensor, matrix: PackedMatrix, rounding: Rounding, threads: int) -> Tensor:
        """x [T, K], float32 or bfloat16, times the transpose: float32 [T, N]. Raises MemoryError."""
        num_rows, columns = matrix.shape
        assert x.shape[1] == columns
        x = x.float()
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), num_rows)
        if self._multiply(matrix.handle, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), rounding, threads) != 0:
            raise MemoryError("no memory for the activations of a product")
        return out

    def _allocate(self, struct: _Struct) -> PackedMatrix:
        return PackedMatrix(struct, self._arena.cut(self._bytes(ctypes.addressof(struct))))


def is_group(group_size: int, columns: int) -> bool:
    """Whether the kernels take groups of so many of so many columns."""
    return group_size % BLOCK_K == 0 or group_size >= columns


def _round_up(group_size: int) -> int:
    """A group of all columns may be any size; what it has behind them is padding."""
    return -(-group_size // BLOCK_K) * BLOCK_K


def _unit(scale: Tensor, offset: Tensor) -> float:
    """A power of two in which scales and offsets fit float16, the largest of them near its upper end."""
    largest = max((float(values.abs().max()) for values in (scale, offset) if values.numel()), default=0.0)
    if not 0 < largest < math.inf:
        return 1.0
    return math.ldexp(1.0, math.frexp(largest / _LARGEST)[1])
