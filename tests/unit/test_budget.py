"""tests.budget: files begin until the time is over, and all of them get their turn."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.budget import rotate

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure
"""


def run(folder: Path, until_s: float, turn: int) -> str:
    """What pytest prints for three files of two tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (folder / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", str(folder / "none.ini")]
    (folder / "none.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [*command, str(folder), f"--until={until_s}", f"--turn={turn}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(("turn", "order"), [(0, "abc"), (1, "bca"), (5, "cab")])
def test_files_begin_with_another_one_each_turn(tmp_path: Path, turn: int, order: str) -> None:
    told = run(tmp_path, time.time() + 600, turn)

    places = [told.index(f"test_{name}.py::test_one") for name in order]
    assert places == sorted(places)
    assert told.count("PASSED") == 6
    assert "left for another run" not in told


def test_what_does_not_begin_in_time_is_left_and_named(tmp_path: Path) -> None:
    told = run(tmp_path, time.time() - 1, 0)

    assert "PASSED" not in told
    assert all(f"test_{name}.py: 2 tests" in told for name in "abc")


def test_no_files_have_no_first() -> None:
    assert rotate([], 3) == []
