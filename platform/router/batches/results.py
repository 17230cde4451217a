"""Results of a batch's lines on the disk: appended while it runs, and put together when it ends.

One file for each taking of the batch, so that no gateway appends behind what another one left half written. Each row is
the line's number, `completed` or `failed`, and the result, apart by tabs. Which row of a line counts is not decided
here: the one of the taking that Redis has the line's mark of. Every method blocks.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

_ROW_PARTS = 3


class ResultFile:
    """The results of one taking. folder: made if it is not there."""

    def __init__(self, folder: Path, epoch: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(folder / str(epoch), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = os.fstat(self._descriptor).st_size
        self._lock = threading.Lock()
        self._is_closed = False

    def append(self, number: int, outcome: Literal["completed", "failed"], result: bytes) -> None:
        """Write a row, so that it outlives the machine. Raises OSError; then the row is not there."""
        row = b"%d\t%s\t%s\n" % (number, outcome.encode(), result)
        with self._lock:
            if self._is_closed:
                raise OSError("the results are closed")
            written = 0
            while written < len(row):
                written += os.pwrite(self._descriptor, row[written:], self._end + written)
            os.fdatasync(self._descriptor)
            self._end += len(row)

    def close(self) -> None:
        """Close the file, when a write that is under way on another thread is over."""
        with self._lock:
            self._is_closed = True
            os.close(self._descriptor)


class Assembled(NamedTuple):
    """What was written of a batch's results."""

    num_output: int
    """Lines of the output file."""
    num_errors: int


class _Place(NamedTuple):
    """Where a line's result is."""

    epoch: int
    start: int
    length: int
    is_output: bool


def assemble(
    folder: Path, marks: Sequence[int], explain: Callable[[int], bytes], output: Path, errors: Path
) -> Assembled:
    """Write the output and the error file in the order of the input's lines. marks: as in the registry. explain: the
    result of a line that was not run, or whose result is lost. Raises OSError."""
    places = _find(folder, marks)
    files = {
        epoch: (folder / str(epoch)).open("rb") for epoch in {place.epoch for place in places if place is not None}
    }
    num_output = num_errors = 0
    try:
        with output.open("xb") as good, errors.open("xb") as bad:
            for number, place in enumerate(places):
                result = explain(number) if place is None else _read(files[place.epoch], place)
                is_output = place is not None and place.is_output
                (good if is_output else bad).write(result + b"\n")
                num_output += is_output
                num_errors += not is_output
    finally:
        for file in files.values():
            file.close()
    return Assembled(num_output, num_errors)


def _find(folder: Path, marks: Sequence[int]) -> list[_Place | None]:
    """Where the results are that count."""
    found: list[_Place | None] = [None] * len(marks)
    for epoch in sorted(set(marks) - {0}):
        for number, place in _rows(folder, epoch):
            if number < len(marks) and marks[number] == epoch:
                found[number] = place
    return found


def _rows(folder: Path, epoch: int) -> Iterator[tuple[int, _Place]]:
    """Rows of one taking; the last one is left out where it was left half written."""
    path = folder / str(epoch)
    if not path.is_file():
        return
    start = 0
    with path.open("rb") as file:
        for row in file:
            parts = row.split(b"\t", _ROW_PARTS - 1)
            if row.endswith(b"\n") and len(parts) == _ROW_PARTS:
                head = len(parts[0]) + len(parts[1]) + 2
                place = _Place(epoch, start + head, len(row) - head - 1, parts[1] == b"completed")
                yield int(parts[0]), place
            start += len(row)


def _read(file: BinaryIO, place: _Place) -> bytes:
    file.seek(place.start)
    return file.read(place.length)
