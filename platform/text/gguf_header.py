"""The header of a GGUF file: metadata and tensor directory, without touching the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package
reads the same, but makes numpy views of every string: seconds for a vocabulary of 50,000, which every process would pay
at start. Not a reader of weights.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.base.errors import ConfigError

Scalar = int | float | bool | str

_STRING: Final = 8
_ARRAY: Final = 9
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
MAX_DIMENSIONS = 4
"""Dimensions that a tensor can have, GGML_MAX_DIMS of ggml.h."""


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings in the file's own form. As a list, a vocabulary takes six times as much memory, and most
    readers of a header do not need it."""

    data: bytes
    """The strings one after the other, each with its length (8 bytes) before it."""

    def decoded(self) -> list[Scalar]:
        data, at, unpack = self.data, 0, _U64.unpack_from
        found: list[Scalar] = []
        while at < len(data):
            start = at + 8
            at = start + unpack(data, at)[0]
            found.append(data[start:at].decode("utf-8", "surrogateescape"))
        return found


Value = Scalar | list[Scalar] | Strings


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Fastest-varying dimension first, as in the file."""
    ggml_type: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    """Where the header (with its padding) ends and the tensors begin, in bytes."""

    def text(self, key: str) -> str | None:
        """A string of the metadata; None where it is absent. ConfigError where it has another type."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise ConfigError(f"the GGUF metadata {key} should be a string, not {type(value).__name__}")

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"the GGUF metadata {key} should be an integer, not {type(value).__name__}")

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise ConfigError(f"the GGUF metadata {key} should be a boolean, not {type(value).__name__}")

    def texts(self, key: str) -> list[str]:
        return [item for item in self._array(key) if isinstance(item, str)]

    def integers(self, key: str) -> list[int]:
        return [item for item in self._array(key) if isinstance(item, int)]

    def floats(self, key: str) -> list[float]:
        return [item for item in self._array(key) if isinstance(item, float)]

    def _array(self, key: str) -> list[Scalar]:
        value = self.metadata.get(key, [])
        if isinstance(value, Strings):
            return value.decoded()
        if isinstance(value, list):
            return value
        raise ConfigError(f"the GGUF metadata {key} should be an array, not {type(value).__name__}")


class _Cursor:
    """Reads the format's primitives one after the other. Running off the end is a struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.at)[0]
        self.at += 4
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.at)[0]
        self.at += 8
        return value

    def text(self) -> str:
        size = self.u64()
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error("a string reaches behind the end of the file")
        return self.data[start : self.at].decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> Strings:
        """`count` strings; unrolled, since a vocabulary has 50,000 to 300,000 of them."""
        data, at, unpack, size = self.data, self.at, _U64.unpack_from, len(self.data)
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
            if at > size:
                break
        if at > size:
            raise struct.error("a string reaches behind the end of the file")
        start, self.at = self.at, at
        return Strings(data[start:at])

    def shape(self) -> tuple[int, ...]:
        """Sizes of a tensor's dimensions, of which ggml has 4 at most."""
        count = self.u32()
        if not 0 < count <= MAX_DIMENSIONS:
            raise struct.error(f"a tensor has {count} dimensions")
        return tuple(self.u64() for _ in range(count))

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.u32(), self.u64()
            return self.strings(count) if item == _STRING else self.scalars(item, count)
        return self.scalars(kind, 1)[0]

    def scalars(self, kind: int, count: int) -> list[Scalar]:
        if kind not in _FORMATS:
            raise struct.error(f"a value of unsupported type {kind}")
        layout = f"<{count}{_FORMATS[kind]}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return list(values)


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ConfigError when the file is not a GGUF of version 2 or 3, is cut short, or is one part of several."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data), path)
    except (OSError, ValueError) as error:  # mmap: an empty file is a ValueError
        raise ConfigError(f"can't read {path}: {error}") from error
    except (struct.error, IndexError) as error:
        raise ConfigError(f"{path} is not a complete GGUF file: {error}") from error


def _parse(cursor: _Cursor, path: Path) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file: it does not begin with GGUF")
    cursor.at = 4
    version = cursor.u32()
    if version not in (2, 3):
        raise ConfigError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.u32())
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(
            f"{path} is one of {parts} parts; merge them into one file first (llama.cpp's gguf-split --merge)"
        )
    directory = [(cursor.text(), cursor.shape(), cursor.u32(), cursor.u64()) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path} has general.alignment {alignment!r}; it must be a positive integer")
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = tuple(TensorInfo(name, shape, kind, data_offset + offset) for name, shape, kind, offset in directory)
    return GgufHeader(metadata, tensors, data_offset)
