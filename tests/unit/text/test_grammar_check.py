import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.hostile_constraints import HOSTILE
from penstock.text.grammar import find_error
from penstock.text.grammar_check import CPU_S, MEMORY_BYTES, GrammarChecks
from penstock.wire.errors import Overloaded
from penstock.wire.frames import Constraint

GOOD = Constraint("regex", "a+")
BAD = Constraint("json_schema", '{"type": "array", "uniqueItems": true}')
WIDE = {"type": "object", "properties": {f"p{index}": {} for index in range(1000)}, "additionalProperties": False}
HEAVY = Constraint(
    "json_schema", json.dumps({"type": "object", "properties": {f"o{index}": WIDE for index in range(5)}})
)
"""A schema at the bounds, which takes 0.2 s, and so many ticks of a timer of CPU time on any machine, and megabytes."""
LATE_S = 0.06
"""CPU time by which such a timer may be late, with that of starting and ending a process."""


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    with contextlib.closing(GrammarChecks()) as checks:
        yield checks


def test_the_process_says_what_the_check_says(checks: GrammarChecks) -> None:
    assert checks.find_error(GOOD) is None
    assert checks.find_error(BAD) == find_error(BAD)
    assert checks.find_error(Constraint("choice", json.dumps(["é😀" * 5000], ensure_ascii=False))) is None


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_constraint_costs_more_than_the_bound(checks: GrammarChecks, name: str) -> None:
    base = checks.check(GOOD)

    checked = checks.check(HOSTILE[name])

    assert checked.cpu_s < 3 * CPU_S  # whatever the machine adds
    assert checked.rss_bytes - base.rss_bytes < MEMORY_BYTES


def test_what_takes_too_long_is_cut_off_and_the_next_check_is_none_the_worse() -> None:
    with contextlib.closing(GrammarChecks(cpu_s=0.001)) as checks:
        checked, pid = checks.check(HEAVY), checks.pid

        assert checked.error == "It takes more than 0.001 s of CPU time to read."
        assert checked.cpu_s < 0.001 + LATE_S
        assert checks.find_error(GOOD) is None
        assert checks.pid == pid


def test_what_takes_too_much_memory_is_cut_off_and_the_next_check_is_none_the_worse() -> None:
    with contextlib.closing(GrammarChecks(cpu_s=30.0, memory_bytes=2**20)) as checks:
        assert checks.find_error(GOOD) is None
        pid = checks.pid

        assert checks.find_error(HEAVY) == "It takes more than 1 MiB of memory to read."
        assert checks.find_error(GOOD) is None
        assert checks.pid == pid


def test_a_process_that_was_killed_is_started_again() -> None:
    with contextlib.closing(GrammarChecks()) as checks:
        assert checks.find_error(GOOD) is None
        first = checks.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        assert checks.find_error(BAD) == find_error(BAD)
        assert checks.pid != first


def test_nothing_is_left_after_the_end() -> None:
    checks = GrammarChecks()
    checks.find_error(GOOD)
    pid = checks.pid
    checks.close()

    assert not Path(f"/proc/{pid}").exists()
    assert checks.pid is None
    with pytest.raises(Overloaded):
        checks.find_error(GOOD)


def test_no_secret_of_the_environment_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "hush")
    with contextlib.closing(GrammarChecks()) as checks:
        checks.find_error(GOOD)

        assert b"hush" not in Path(f"/proc/{checks.pid}/environ").read_bytes()


def test_the_process_has_no_threads_when_it_forks(checks: GrammarChecks) -> None:
    checks.find_error(GOOD)

    assert len(os.listdir(f"/proc/{checks.pid}/task")) == 1


def test_an_exception_that_no_constraint_should_cause_is_told() -> None:
    with contextlib.closing(GrammarChecks()) as checks, pytest.raises(RuntimeError, match="ValidationError"):
        checks.find_error(None)  # type: ignore[arg-type]
