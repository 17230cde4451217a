"""A batch's input, read once from end to end: where its lines are, and what is wrong with them.

Blocks, on a thread, and gives the event loop its turn between lines. Holds no text: of each line its place, and a
digest of its name while it reads. Bounded by the lines that a batch may have, blank ones included, and ended early by
whoever does not want it any more.
"""

import hashlib
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock.router.batches.batch_record import MAX_ERRORS
from penstock.router.batches.lines import BadLine, BatchLine, parse_line
from penstock.wire.batches import BatchError

TURN_S = 0.002
"""Time of work after which others get theirs."""
PAUSE_S = 0.0005


class ScannedInput(NamedTuple):
    """The places of an input's lines, or what is wrong with it."""

    path: Path
    endpoint: str
    starts: "array[int]"
    """Offsets of the lines, bytes; blank ones are left out."""
    max_line_bytes: int
    errors: list[BatchError]

    def read(self, number: int) -> BatchLine:
        """Line number `number`, from 0. Blocks. Raises OSError, and BadLine for a file that has been changed."""
        with self.path.open("rb") as file:
            file.seek(self.starts[number])
            return parse_line(file.readline(self.max_line_bytes), self.endpoint)


def scan(
    path: Path, endpoint: str, max_lines: int, max_line_bytes: int, is_over: Callable[[], bool] = lambda: False
) -> ScannedInput:
    """Look at every line. is_over: asked now and then on this thread; once it is true, the rest is not looked at.
    Raises OSError where there is no such file."""
    starts: array[int] = array("Q")
    errors: list[BatchError] = []
    names: set[bytes] = set()
    turn_began_s = time.monotonic()
    with path.open("rb") as file:
        number = start = 0
        while data := file.readline(max_line_bytes + 1):
            number += 1
            try:
                if _look(data, file, endpoint, max_line_bytes, names):
                    starts.append(start)
            except BadLine as error:
                errors.append(error.at(number))
            if len(starts) > max_lines or number > most_lines(max_lines):
                sentence = f"A batch may have {max_lines} lines, and about as many blank ones."
                errors.append(BatchError(code="too_many_lines", message=sentence, line=number))
                break
            if len(errors) >= MAX_ERRORS:
                break
            start = file.tell()
            if time.monotonic() - turn_began_s > TURN_S:
                if is_over():
                    break
                time.sleep(PAUSE_S)
                turn_began_s = time.monotonic()
    if not starts and not errors:
        errors.append(BatchError(code="empty_file", message="The file has no line."))
    return ScannedInput(path, endpoint, starts, max_line_bytes, errors)


def most_lines(max_lines: int) -> int:
    """Lines that a file may have, blank ones included, whose batch may have `max_lines`."""
    return 2 * max_lines + MAX_ERRORS


def _look(data: bytes, file: BinaryIO, endpoint: str, max_line_bytes: int, names: set[bytes]) -> bool:
    """Check one line; returns whether it is one, not blank. Raises BadLine."""
    if len(data) > max_line_bytes:
        while data and not data.endswith(b"\n"):
            data = file.readline(max_line_bytes)
        raise BadLine("line_too_long", f"A line may have {max_line_bytes} bytes.")
    if not data.strip():
        return False
    name = hashlib.blake2b(parse_line(data, endpoint).custom_id.encode(), digest_size=16).digest()
    if name in names:
        raise BadLine("duplicate_custom_id", "The 'custom_id' is that of a line before.", "custom_id")
    names.add(name)
    return True
