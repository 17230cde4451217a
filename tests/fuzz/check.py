"""One input through one parser, watched: only the errors that it documents, an end in time, and memory in proportion to
the input."""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from hypothesis import strategies as st

BASE_S, BASE_BYTES = 1.0, 4 * 2**20
"""CPU seconds and bytes that any input may cost, where its target says nothing else."""
SECONDS_PER_MB = 4.0
BYTES_PER_BYTE = 80
"""Bytes that a byte of input may cost; JSON's empty lists cost 56 each, in two bytes."""


class Target(NamedTuple):
    """A parser of bytes from outside."""

    inputs: st.SearchStrategy[Any]
    open: Callable[[], AbstractContextManager[Callable[[Any], None]]]
    """Context of the function that gives it an input; what that raises is a fault."""
    base_bytes: int = BASE_BYTES
    """Bytes that any input may cost."""


class Costly(AssertionError):
    """An input costs more than its size allows."""


def size_of(given: object) -> int:
    """Bytes of an input: of all that it contains."""
    if isinstance(given, bytes | str):
        return len(given)
    if isinstance(given, tuple | list):
        return sum(size_of(each) for each in given)
    return 8


def check(
    run: Callable[[Any], None],
    given: object,
    base_bytes: int = BASE_BYTES,
    cpu_clock: Callable[[], float] = time.process_time,
) -> None:
    """Run one input. Raises Costly, and whatever the parser does that it should not."""
    num_bytes = size_of(given)
    tracemalloc.start()
    begun_s = cpu_clock()
    try:
        run(given)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        spent_s = cpu_clock() - begun_s
        tracemalloc.stop()
    if spent_s > BASE_S + SECONDS_PER_MB * num_bytes / 2**20:
        raise Costly(f"{spent_s:.1f} s of CPU for {num_bytes} bytes")
    if peak > base_bytes + BYTES_PER_BYTE * num_bytes:
        raise Costly(f"{peak} bytes of memory for {num_bytes} bytes")


def raising(*expected: type[BaseException]) -> Callable[[Callable[[Any], object]], Callable[[], Any]]:
    """Make a function of one input a target's `open`: it returns, or raises an error that it documents."""

    def wrap(parse: Callable[[Any], object]) -> Callable[[], Any]:
        def run(given: Any) -> None:
            with suppress(*expected):
                parse(given)

        @contextmanager
        def opened() -> Iterator[Callable[[Any], None]]:
            yield run

        return opened

    return wrap
