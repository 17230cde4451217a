import subprocess
import sys
import time
from pathlib import Path

from penstock.base.turns import take_turn

HOLD = """
import sys, time
from pathlib import Path
from penstock.base.turns import take_turn
with take_turn(5, Path(sys.argv[1])) as has_turn:
    print(has_turn, flush=True)
    time.sleep(60)
"""


def test_one_process_has_a_turn_at_a_time_and_the_next_when_that_ends(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with take_turn(0.1, tmp_path) as has_turn:
            assert not has_turn, "it goes on without"
        with take_turn(0, tmp_path / "another") as has_turn:
            assert has_turn
        other.kill()
        with take_turn(10, tmp_path) as has_turn:
            assert has_turn, "a process that is gone has none"


def test_a_turn_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with take_turn(0, tmp_path) as has_turn:
            assert has_turn
            begun_s = time.monotonic()
            with take_turn(0.2, tmp_path) as has_another:
                assert not has_another
            assert time.monotonic() - begun_s >= 0.2


def test_nothing_is_left_of_a_turn_whose_process_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        other.kill()

    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_folder_things_go_on_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in ("file", "nowhere"):
        with take_turn(5, tmp_path / missing) as has_turn:
            assert not has_turn
