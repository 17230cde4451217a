"""Files of text: plain, or JSON lines of which each holds a text, as prompts and calibration texts come; gzip by their
names."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.base.errors import ConfigError

FIELDS = ("prompt", "text", "question", "turns")
"""Fields of a JSON line that may hold its text; the first that is there counts."""


def read_file(path: Path) -> str:
    """The whole file. Raises ConfigError."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def read_lines(path: Path) -> Iterator[list[str]]:
    """The text of each JSON line, or its texts, where it has turns. Raises ConfigError that names file and line."""
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if line.strip():
            yield _texts_of(path, number, line)


def _texts_of(path: Path, number: int, line: str) -> list[str]:
    try:
        row = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    found = next((row[name] for name in FIELDS if name in row), None)
    texts = found if isinstance(found, list) else [found]
    if not texts or not all(isinstance(item, str) for item in texts):
        raise ConfigError(f"{path}, line {number}: none of the fields {', '.join(FIELDS)} holds text")
    return list(map(str, texts))
