"""Tensors of safetensors files, or parts of them, straight to a device: threads read ranges of a file into pinned
memory and copy them on from there, many at a time, so that neither the page cache nor the bus waits for one thread.

Whole rows of a tensor lie side by side and are read. For some of its columns the file is mapped for as long as the
tensor takes, and each row's part is copied out of it: a read for each row would take longer. For a tensor on the host,
threads write where it will be.

A file's header was checked by the safetensors library when it was opened; here only the places of tensors are taken
from it (8 bytes of length, then JSON; https://github.com/huggingface/safetensors#format).
"""

import json
import math
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.base.errors import ConfigError

THREADS = 8
CHUNK_BYTES = 8 << 20
"""Bytes that a thread reads at a time, into pinned memory of its own."""
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Types of tensors by the name that files have for them."""


class Span(NamedTuple):
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, start: int, end: int) -> "Span":
        """Rows [start, end)."""
        return Span(self.dtype, (end - start, *self.shape[1:]), self.start + start * self.row_bytes)


Slices = tuple[slice, ...]


class TensorView(Protocol):
    """A tensor of which parts can be read."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, part: Slices, /) -> Tensor: ...


Fill = Callable[[int, Tensor], None]
"""Fills memory of the host, uint8, with a tensor's bytes from a given one on."""


class TensorFile(Protocol):
    """What is used of safetensors.safe_open, whose methods have no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> TensorView: ...
    def get_tensor(self, name: str) -> Tensor: ...


class DeviceReader:
    """Threads with pinned memory, for tensors on one device. A context manager; one tensor at a time."""

    def __init__(self, device: torch.device, threads: int = THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = _numbered(device)
        self.num_bytes = 0
        """Bytes of files that have been read."""
        self._chunk_bytes = chunk_bytes
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="penstock-read", initializer=partial(_compute_on, self.device)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, path: Path, file: int, span: Span) -> Tensor:
        """A tensor of an open file, in memory of its own on the device. Raises ConfigError where the file ends
        early or can't be read."""

        def fill(start: int, out: Tensor) -> None:
            _read_whole(file, span.start + start, out)

        return self._gather(path, span, self._chunk_bytes, fill)

    def read_columns(self, path: Path, file: int, span: Span, columns: range) -> Tensor:
        """Columns of a matrix of an open file, likewise."""
        own = Span(span.dtype, (span.shape[0], len(columns)), span.start)
        itemsize = span.dtype.itemsize
        try:
            part = _map(file, span)[:, columns.start * itemsize : columns.stop * itemsize]
        except (OSError, ValueError) as error:
            raise ConfigError(f"can't read {path}: {error}") from error

        def fill(start: int, out: Tensor) -> None:
            rows = out.numpy().reshape(-1, own.row_bytes)
            first = start // own.row_bytes
            np.copyto(rows, part[first : first + len(rows)])

        return self._gather(path, own, max(1, self._chunk_bytes // own.row_bytes) * own.row_bytes, fill)

    def _gather(self, path: Path, span: Span, step: int, fill: Fill) -> Tensor:
        """A tensor whose bytes `fill` gives, `step` of them at a time."""
        self.num_bytes += span.size
        target = torch.empty(span.size, dtype=torch.uint8, device=self.device)
        # memory that the device may still be using for something that was freed meanwhile
        is_free = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        waiting = [
            self._threads.submit(self._copy, fill, target[start : start + step], start, is_free)
            for start in range(0, span.size, step)
        ]
        try:
            for chunk in waiting:
                chunk.result()
        except (OSError, _EndsEarly) as error:
            raise ConfigError(f"can't read {path}: {error}") from error
        finally:
            for chunk in waiting:
                if not chunk.cancel():
                    chunk.exception()
        return target.view(span.dtype).view(span.shape)

    def _copy(self, fill: Fill, target: Tensor, start: int, is_free: torch.cuda.Event | None) -> None:
        """Copy a tensor's bytes from `start` on, as many as the target has."""
        if self.device.type != "cuda":
            fill(start, target)
            return
        pinned, stream = self._pinned(len(target))
        fill(start, pinned)
        with torch.cuda.stream(stream), torch.inference_mode():
            if is_free is not None:
                stream.wait_event(is_free)
            target.copy_(pinned, non_blocking=True)
        stream.synchronize()

    def _pinned(self, size: int) -> tuple[Tensor, torch.cuda.Stream]:
        """`size` bytes of the thread's own memory, and its stream."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if not hasattr(self._own, "pinned") or len(self._own.pinned) < size:
            most = max(size, self._chunk_bytes)  # a row may be longer than a chunk
            self._own.pinned = torch.empty(most, dtype=torch.uint8, pin_memory=True)
        return self._own.pinned[:size], self._own.stream


class DeviceFile:
    """A safetensors file whose tensors come to a device. Used as `safetensors.safe_open` is, for as long as that is
    open; a context manager."""

    def __init__(self, path: Path, opened: TensorFile, reader: DeviceReader) -> None:
        """opened: the same file, checked. Raises OSError, ValueError."""
        self._path = path
        self._opened = opened
        self._reader = reader
        self._spans = read_spans(path)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def keys(self) -> list[str]:
        return self._opened.keys()

    def get_slice(self, name: str) -> TensorView:
        return _DeviceView(self._opened.get_slice(name), partial(self._read_part, name))

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, on the device. Raises ConfigError."""
        return self._reader.read(self._path, self._file, self._spans[name])

    def _read_part(self, name: str, part: Slices) -> Tensor:
        span = self._spans[name]
        rows, *columns = (range(*of.indices(count)) for of, count in zip(part, span.shape, strict=False))
        span = span.rows(rows.start, rows.stop)
        if not columns or len(columns[0]) == span.shape[1]:
            return self._reader.read(self._path, self._file, span)
        return self._reader.read_columns(self._path, self._file, span, columns[0])


class _DeviceView:
    """A tensor whose parts come to the device."""

    def __init__(self, opened: TensorView, read: Callable[[Slices], Tensor]) -> None:
        self._opened = opened
        self._read = read

    def get_dtype(self) -> str:
        return self._opened.get_dtype()

    def get_shape(self) -> list[int]:
        return self._opened.get_shape()

    def __getitem__(self, part: Slices) -> Tensor:
        """Rows, and columns, of a vector or a matrix. Raises ConfigError."""
        return self._read(part)


class _EndsEarly(Exception):
    """A file is shorter than its header says."""


def read_spans(path: Path) -> dict[str, Span]:
    """Places of a file's tensors by name, those of types that are known here. Raises OSError, ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: Span(TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in TYPES
    }


def _numbered(device: torch.device) -> torch.device:
    """The device; of GPUs the one that this thread computes on, where none is named."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _compute_on(device: torch.device) -> None:
    """A thread begins on the first GPU: what it takes without naming one would be taken there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _map(file: int, span: Span) -> NDArray[np.uint8]:
    """A matrix's bytes, uint8 [rows, bytes of a row], mapped for as long as the array is there. Raises OSError, and
    ValueError where the file ends early."""
    before = span.start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, before + span.size, access=mmap.ACCESS_READ, offset=span.start - before)
    return np.frombuffer(mapped, np.uint8, offset=before).reshape(span.shape[0], span.row_bytes)


def _read_whole(file: int, offset: int, target: Tensor) -> None:
    """Fills the target, uint8 on the host, with the bytes of a file from `offset` on."""
    memory = target.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset + done)
        if not count:
            raise _EndsEarly(f"it ends before byte {offset + len(memory)}")
        done += count
