"""The kernels' C ABI, as Python calls it. Pointers come from tensors; shapes and types are checked here, once, because
C can't."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.compute.kernels.cache_layout import PLAIN, CacheLayout, cache_code
from penstock.workers.compute.kernels.choice import ChoiceKernels
from penstock.workers.compute.kernels.decoder import Activations, Decoder, Parameters
from penstock.workers.compute.kernels.matmul import MatmulKernels

ABI = 12
"""penstock_kernels_abi() of paged_attention.cpp."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Library:
    """A loaded library of kernels. Raises OSError if `path` is no such library, or one of another ABI."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "penstock_kernels_abi") or library.penstock_kernels_abi() != ABI:
            raise OSError(f"{path} is not a kernel library of ABI {ABI}")
        self.path = path
        self._paged_attention, self._write_kv, self._supports = (
            library.penstock_attend,
            library.penstock_write_kv,
            library.penstock_supports,
        )
        self._paged_attention.restype = _I32
        self._paged_attention.argtypes = [_P, _I32, _I64, *[_P] * 5, _I64, _I32, _P, _P, _P, *[_I64] * 6, _F32, _I32]
        self._write_kv.restype = None
        self._write_kv.argtypes = [_P, _P, _I32, _I64, _I64, *[_P] * 4, _I64, _I32, _P, *[_I64] * 4]
        self._supports.restype = _I32
        self._supports.argtypes = [_I64, _I64]
        self.matmul = MatmulKernels(library)
        self._library = library

    def is_supported(self, num_heads: int, k_cache: Tensor, dtype: torch.dtype) -> bool:
        """Whether `attend` and `write_kv` cover this cache layout, head count and type of q, k and v."""
        _, num_kv_heads, _, head_dim = k_cache.shape
        return bool(
            dtype in _DTYPES
            and k_cache.dtype in (*_DTYPES, torch.int8)
            and self._supports(head_dim, num_heads // num_kv_heads)
        )

    def covers(self, head_dim: int, group: int) -> bool:
        """Whether attention has kernels for heads of this size, `group` query heads to a kv head."""
        return bool(self._supports(head_dim, group))

    def decoder(self, parameters: Parameters, threads: int, activations: Activations) -> Decoder:
        """A decoder of this library for one model: computes a whole step in one call, with `threads` CPU threads."""
        return Decoder(self._library, parameters, threads, activations)

    def chooser(self) -> ChoiceKernels:
        """What chooses tokens, for one thread at a time."""
        return ChoiceKernels(self._library)

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layout: CacheLayout = PLAIN
    ) -> None:
        """k, v [T, num_kv_heads, head_dim] into their slots; see attention.write_kv."""
        num_tokens, num_kv_heads, head_dim = k.shape
        _, cache_heads, block_size, cache_dim = k_cache.shape
        assert (num_kv_heads, head_dim) == (cache_heads, cache_dim)
        assert k.shape == v.shape
        assert k.dtype == v.dtype
        assert k_cache.shape == v_cache.shape
        assert k_cache.stride(0) == v_cache.stride(0)
        assert slot_mapping.dtype == torch.int64
        assert len(slot_mapping) == num_tokens
        k, v, slot_mapping = _pack(k), _pack(v), slot_mapping.contiguous()
        self._write_kv(
            k.data_ptr(), v.data_ptr(), _DTYPES[k.dtype], k.stride(0), v.stride(0), _cache(k_cache), _cache(v_cache),
            *_scales(layout, k_cache), k_cache.stride(0), cache_code(k_cache, layout), slot_mapping.data_ptr(),
            num_tokens, num_kv_heads, block_size, head_dim,
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_tables: Tensor,
        scale: float,
        threads: int,
        layout: CacheLayout = PLAIN,
    ) -> Tensor:
        """q [T, num_heads, head_dim] over the cache; see attention.attend. Raises MemoryError."""
        _, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, cache_dim = k_cache.shape
        assert head_dim == cache_dim
        assert num_heads % num_kv_heads == 0
        assert k_cache.shape == v_cache.shape
        assert k_cache.stride(0) == v_cache.stride(0)
        assert query_start.dtype == context_len.dtype == block_tables.dtype == torch.int32
        assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
        assert len(query_start) == len(context_len) + 1 == len(block_tables) + 1
        q, query_start, context_len = _pack(q), query_start.contiguous(), context_len.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        code = self._paged_attention(
            q.data_ptr(), _DTYPES[q.dtype], q.stride(0), out.data_ptr(), _cache(k_cache), _cache(v_cache),
            *_scales(layout, k_cache), k_cache.stride(0), cache_code(k_cache, layout), query_start.data_ptr(),
            context_len.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), len(context_len), num_heads,
            num_kv_heads, block_size, head_dim, scale, threads,
        )  # fmt: skip
        if code == 1:
            raise MemoryError("no memory for the partial results of attention")
        assert code == 0, (
            f"the attention kernel does not cover {num_heads} heads of {head_dim} "
            f"in groups of {num_heads // num_kv_heads}"
        )
        return out


def _pack(x: Tensor) -> Tensor:
    """The tensor itself if the last two of its three dimensions lie side by side, as in a slice of a fused
    projection."""
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (x.stride(1) == dim or heads == 1) else x.contiguous()


def _cache(x: Tensor) -> int:
    """Address of a cache, whose blocks may lie apart from each other."""
    assert not len(x) or x[0].is_contiguous()
    return x.data_ptr()


def _scales(layout: CacheLayout, cache: Tensor) -> tuple[int | None, int | None]:
    if layout.scales is None:
        return None, None
    assert all(part.dtype == torch.float32 and part.shape == cache.shape[:3] for part in layout.scales)
    return _cache(layout.scales[0]), _cache(layout.scales[1])
