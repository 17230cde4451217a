"""Numbered lines of a trace or corpus: plain or gzip, as JSON or comma-separated fields. Whatever can't be read is a
TraceInvalid that names file and line.

None of the published CSV files quotes a field, so a line is split at its commas and nothing else.
"""

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeVar

import msgspec

from penstock_loadtest.errors import TraceInvalid

MAX_TOKENS: Final = 10_000_000
"""More tokens than this in one request are a mistake of the file, not a length."""

_GZIP: Final = b"\x1f\x8b"
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

T = TypeVar("T")


class Fields(NamedTuple):
    number: int  # of the line, from 1
    values: list[str]  # of the wanted columns, in that order; "" for an optional one that the file lacks


def make_line_error(path: Path, number: int, problem: str) -> TraceInvalid:
    return TraceInvalid(f"{path}, line {number}: {problem}.")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. Raises TraceInvalid when the file is not there, or
    damaged."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                stripped = line.strip()
                if stripped:
                    yield number, stripped
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise make_line_error(path, number + 1, f"the gzip data are damaged or cut short ({error})") from None
    except OSError as error:
        raise TraceInvalid(f"{path} can't be read: {error.strerror}.") from None


def read_json(path: Path, decoder: msgspec.json.Decoder[T]) -> Iterator[tuple[int, T]]:
    """The JSON value of every line. Raises TraceInvalid."""
    for number, line in read_lines(path):
        try:
            value = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise make_line_error(path, number, str(error)) from None
        yield number, value


def read_header(path: Path) -> list[str]:
    """Names of the columns in the first line. Raises TraceInvalid when there is none."""
    for _, line in read_lines(path):
        return _split(line.removeprefix(b"\xef\xbb\xbf"))
    raise TraceInvalid(f"{path} is empty.")


def read_csv(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Fields]:
    """The wanted columns, by name, of every line after the header; others are passed over.

    Raises TraceInvalid when the header lacks one, or a line has more or fewer fields than the header.
    """
    header = read_header(path)
    missing = [name for name in required if name not in header]
    if missing:
        raise make_line_error(path, 1, f"the header lacks {', '.join(missing)}; it reads {','.join(header)!r}")
    places = [header.index(name) if name in header else None for name in (*required, *optional)]
    lines = read_lines(path)
    next(lines)
    for number, line in lines:
        fields = _split(line)
        if len(fields) != len(header):
            raise make_line_error(path, number, f"{len(fields)} fields where the header has {len(header)}")
        yield Fields(number, ["" if place is None else fields[place] for place in places])


def to_number(text: str, name: str) -> float:
    """A finite number that is not negative; ValueError with a sentence otherwise."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {text!r}, not a number of 0 or more")
    return value


def to_whole(text: str, name: str) -> int:
    """A whole number up to MAX_TOKENS, which some files write as 12.0; ValueError with a sentence otherwise."""
    value = to_number(text, name)
    if value > MAX_TOKENS or value != int(value):
        raise ValueError(f"{name} is {text!r}, not a whole number up to {MAX_TOKENS:,}")
    return int(value)


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if is_gzip else path.open("rb")


def _split(line: bytes) -> list[str]:
    return [field.strip() for field in line.decode("utf-8", "replace").split(",")]
