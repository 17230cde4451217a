"""CPU time of real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.studies.process_tree import read_tree_cpu_s

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PARENT = f"""
import subprocess, sys
from subprocess import PIPE
child = subprocess.Popen([sys.executable, "-c", {BURN + "print(flush=True); input()"!r}], stdin=PIPE, stdout=PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
print("waited", flush=True)
input()
"""


class Family:
    """A process with a child that has burnt 0.3 s; the child ends when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.child = int(self.read_line())

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    made.process.communicate("\n\n", timeout=30)


def test_descendants_count(family: Family) -> None:
    assert read_tree_cpu_s([family.process.pid]) >= 0.28


def test_what_is_left_out_does_not_count(family: Family) -> None:
    with_child, without = read_tree_cpu_s([family.process.pid]), read_tree_cpu_s([family.process.pid], [family.child])

    assert with_child - without >= 0.28


def test_a_process_named_twice_counts_once(family: Family) -> None:
    assert read_tree_cpu_s([family.process.pid, family.child]) == pytest.approx(
        read_tree_cpu_s([family.process.pid]), abs=0.1
    )


def test_a_child_that_ended_is_not_lost(family: Family) -> None:
    before_s = read_tree_cpu_s([family.process.pid])
    family.go_on()

    assert family.read_line() == "waited\n"
    assert read_tree_cpu_s([family.process.pid]) >= before_s - 0.011  # the kernel rounds each account down to its tick


def test_a_process_that_is_not_there_is_refused() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    with pytest.raises(ScenarioInvalid, match=f"no process {gone.pid} "):
        read_tree_cpu_s([os.getpid(), gone.pid])
