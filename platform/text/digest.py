"""Identity of a checkpoint: equal digests mean equal weights, tokenizer and configuration, wherever the files lie.

Files up to `FULL_BYTES` are hashed whole. Of a larger one, the size, the directory of its tensors (the whole header,
which in a GGUF holds the tokenizer too) and windows of 4 KiB are hashed: the first, middle and last of every tensor,
and 1,024 more spread evenly. So a 16 GB checkpoint takes well under a second, any fine-tune that moved a tensor's ends
or middle differs, and only a change confined to bytes between the windows goes unseen.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

FULL_BYTES = 32 * 2**20
WINDOW_BYTES = 4096
NUM_WINDOWS = 1024
_FORMAT = b"penstock-model-1"
_LENGTH = struct.Struct("<Q")


class _SafetensorsEntry(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def checkpoint_digest(root: Path, files: Sequence[Path], headers: dict[Path, tuple[int, list[int]]]) -> str:
    """Hex digest over `files`, named relative to `root`.

    headers: of a large file, the size of its header and the offsets at which tensors start, both in bytes; only its
    windows and the header are read. Raises OSError.
    """
    state = hashlib.blake2b(digest_size=16, person=_FORMAT)
    for path in sorted(files):
        name = path.relative_to(root).as_posix().encode()
        size = path.stat().st_size
        state.update(struct.pack("<QQ", len(name), size) + name)
        if size <= FULL_BYTES:
            state.update(path.read_bytes())
        else:
            header_bytes, starts = headers.get(path, (0, []))
            for window in _windows(path, size, header_bytes, starts):
                state.update(window)
    return state.hexdigest()


def safetensors_layout(path: Path) -> tuple[int, list[int]]:
    """Header size and tensor offsets of a safetensors file (8 bytes of length, then JSON;
    https://github.com/huggingface/safetensors#format). Raises ValueError for a file that is none."""
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 0 < length <= os.fstat(file.fileno()).st_size - _LENGTH.size:
            raise ValueError(f"{path} is no whole safetensors file: its header is said to have {length} bytes")
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, _SafetensorsEntry])
    except RecursionError as error:
        raise ValueError(f"{path} is no safetensors file: its header is nested deeply") from error
    return 8 + length, [8 + length + entry.data_offsets[0] for name, entry in entries.items() if name != "__metadata__"]


def _windows(path: Path, size: int, header_bytes: int, starts: Iterable[int]) -> Iterable[bytes]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield os.pread(fd, header_bytes, 0)
        for offset in _offsets(size, header_bytes, starts):
            yield os.pread(fd, WINDOW_BYTES, offset)
    finally:
        os.close(fd)


def _offsets(size: int, header_bytes: int, starts: Iterable[int]) -> list[int]:
    """Where the windows begin, ascending."""
    bounds = [*sorted(starts), size]
    found = {header_bytes + (size - header_bytes) * i // NUM_WINDOWS for i in range(NUM_WINDOWS)}
    for start, end in pairwise(bounds):
        found |= {start, (start + end) // 2, max(start, end - WINDOW_BYTES)}
    return sorted(found)
