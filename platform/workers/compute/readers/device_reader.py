"""Tensors of safetensors files, straight to a device: threads read ranges of a file into pinned memory and copy them
on from there, many at a time, so that neither the page cache nor the bus waits for one thread.

A file's header was checked by the safetensors library when it was opened; here only the places of tensors are taken
from it (8 bytes of length, then JSON; https://github.com/huggingface/safetensors#format).
"""

import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch
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


class TensorView(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class TensorFile(Protocol):
    """What is used of safetensors.safe_open, whose methods have no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> TensorView: ...
    def get_tensor(self, name: str) -> Tensor: ...


class DeviceReader:
    """Threads with pinned memory, for tensors on one device. A context manager; one tensor at a time."""

    def __init__(self, device: torch.device, threads: int = THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self._chunk_bytes = chunk_bytes
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, path: Path, file: int, span: Span) -> Tensor:
        """A tensor of an open file, in memory of its own on the device. Raises ConfigError where the file ends
        early or can't be read."""
        target = torch.empty(span.size, dtype=torch.uint8, device=self.device)
        # memory that the device may still be using for something that was freed meanwhile
        is_free = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        waiting = [
            self._threads.submit(self._copy, file, span.start, target, start, is_free)
            for start in range(0, span.size, self._chunk_bytes)
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

    def _copy(self, file: int, offset: int, target: Tensor, start: int, is_free: torch.cuda.Event | None) -> None:
        """Copy a chunk of the bytes from `offset` on in a file to the same place of the target."""
        size = min(self._chunk_bytes, len(target) - start)
        if self.device.type != "cuda":
            _read_whole(file, offset + start, target[start : start + size])
            return
        pinned, stream = self._pinned()
        _read_whole(file, offset + start, pinned[:size])
        with torch.cuda.stream(stream), torch.inference_mode():
            if is_free is not None:
                stream.wait_event(is_free)
            target[start : start + size].copy_(pinned[:size], non_blocking=True)
        stream.synchronize()

    def _pinned(self) -> tuple[Tensor, torch.cuda.Stream]:
        """The thread's own memory and stream."""
        if not hasattr(self._own, "pinned"):
            self._own.pinned = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True)
            self._own.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._own.pinned, self._own.stream


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
        return self._opened.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, on the device. Raises ConfigError."""
        return self._reader.read(self._path, self._file, self._spans[name])


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


def _read_whole(file: int, offset: int, target: Tensor) -> None:
    """Fills the target, uint8 on the host, with the bytes of a file from `offset` on."""
    memory = target.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset + done)
        if not count:
            raise _EndsEarly(f"it ends before byte {offset + len(memory)}")
        done += count
