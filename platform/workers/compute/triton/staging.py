"""Bringing what a step is made of to its device: arrays of the host side by side in one buffer of pinned memory, moved
in one copy that the host does not wait for.

Two buffers take turns: the host fills one while the device may still read the other, and an event says when it no
longer does. Where the device is the CPU, memory is ordinary and a copy is done at once; the rest is the same.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Arrays of a copy begin at multiples of so many bytes; kernels are compiled for 16."""
FIRST_BYTES = 2**18
"""Bytes of a buffer at first: a step of thousands of tokens. It grows with what is sent."""

Array = NDArray[np.number[Any]]
_TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Done(Protocol):
    """An event behind a copy; see `torch.cuda.Event`."""

    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None:
        """Wait until what was recorded is done; at once where nothing was."""


class _AtOnce:
    """The event of a copy that is done when it returns."""

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Buffer:
    """Memory of the host, and the event behind the copy that read it last."""

    def __init__(self, num_bytes: int, done: Done, *, is_pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.bytes: NDArray[np.uint8] = self.memory.numpy()
        self.done = done


class Staging:
    """Sends arrays to one device. One thread at a time."""

    def __init__(
        self, device: torch.device, *, is_beside: bool = False, make_done: Callable[[], Done] | None = None
    ) -> None:
        """is_beside: copies run beside what the device computes already, on a stream of their own; what is launched
        after them waits for them. make_done: makes the event of a buffer; None: the device's own."""
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if is_beside and self._is_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._make_done: Callable[[], Done] = make_done or (torch.cuda.Event if self._is_gpu else _AtOnce)
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0

    @property
    def device(self) -> torch.device:
        return self._device

    def send(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device, each with its type and shape. into: memory there, bytes enough for `lay_out`; None:
        new memory."""
        starts, total = lay_out(array.nbytes for array in arrays)
        buffer = self._take(total)
        for start, array in zip(starts, arrays, strict=True):
            if array.size:
                buffer.bytes[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        moved = self._copy(buffer, total, into)
        return [
            moved[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _take(self, num_bytes: int) -> _Buffer:
        """The buffer whose turn it is, when nothing reads it any more."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is not None:
            buffer.done.synchronize()
        if buffer is None or len(buffer.bytes) < num_bytes:
            size = max(num_bytes, FIRST_BYTES if buffer is None else 2 * len(buffer.bytes))
            buffer = self._buffers[self._turn] = _Buffer(size, self._make_done(), is_pinned=self._is_gpu)
        return buffer

    def _copy(self, buffer: _Buffer, total: int, into: Tensor | None) -> Tensor:
        caller = torch.cuda.current_stream(self._device) if self._is_gpu else None
        beside: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            beside = torch.cuda.stream(self._stream)
        with beside:
            moved = torch.empty(total, dtype=torch.uint8, device=self._device) if into is None else into[:total]
            moved.copy_(buffer.memory[:total], non_blocking=True)
            buffer.done.record(self._stream or caller)
        if self._stream is not None and caller is not None:
            caller.wait_stream(self._stream)
            moved.record_stream(caller)  # its memory is not given away before the caller's work is done
        return moved


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where arrays of so many bytes each begin, and the bytes of all."""
    *starts, total = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return starts, total


def send_once(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """`Staging.send` of what is not sent at every step."""
    return Staging(device).send(arrays)
