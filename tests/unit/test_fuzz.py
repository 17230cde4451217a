"""Every parser of bytes from outside, given a few wrong inputs; `python -m tests.fuzz` gives them for hours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import Fault, keep, kept, try_seed
from tests.fuzz.check import Costly, Target, check, raising
from tests.fuzz.targets import TARGETS

NUM_INPUTS = 20


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_whatever_comes(name: str) -> None:
    target = TARGETS[name]

    with target.open() as run:

        @settings(max_examples=NUM_INPUTS, database=None)
        @given(target.inputs)
        def takes(given_input: Any) -> None:
            check(run, given_input, target.base_bytes)

        takes()


def opened(parse: Callable[[Any], object], *expected: type[BaseException]) -> Callable[[Any], None]:
    with raising(*expected)(parse)() as run:
        return run


def test_an_error_that_is_not_documented_is_a_fault() -> None:
    check(opened(int, ValueError), "x")
    with pytest.raises(ValueError, match="invalid literal"):
        check(opened(int, TypeError), "x")


def test_memory_beyond_proportion_is_a_fault() -> None:
    check(opened(lambda data: bytes(50 * len(data))), bytes(200_000))
    with pytest.raises(Costly, match="bytes of memory for 8 bytes"):
        check(opened(lambda data: bytes(2**23)), bytes(8))


def test_time_beyond_proportion_is_a_fault() -> None:
    quick, slow = iter((0.0, 0.9)), iter((0.0, 1.5))

    check(opened(lambda data: data), bytes(8), cpu_clock=lambda: next(quick))
    with pytest.raises(Costly, match=r"1\.5 s of CPU for 8 bytes"):
        check(opened(lambda data: data), bytes(8), cpu_clock=lambda: next(slow))


def refuse_long(data: bytes) -> None:
    if len(data) > 2:
        raise KeyError(len(data))


def test_a_seed_finds_the_smallest_input_again() -> None:
    target = Target(st.binary(), raising(ValueError)(refuse_long))

    first, second = (try_seed("broken", target, 7, 100) for _ in range(2))

    assert first.fault == second.fault == Fault("broken", 7, ANY, repr(bytes(3)))
    assert first.fault is not None
    assert first.fault.error.startswith("KeyError: 3 (test_fuzz.py:")
    assert try_seed("whole", Target(st.binary(max_size=2), target.open), 7, 50).fault is None


def test_what_was_found_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "fuzz.jsonl"
    faults = [Fault("a", 1, "KeyError", "b''"), Fault("b", 1, "KeyError", "b''"), Fault("a", 1, "OSError", "b'x'")]

    assert kept(path) == []
    for fault in faults:
        keep(path, fault)

    assert kept(path) == [faults[2], faults[1]]
