"""`make demo-autoscale` begun and interrupted: it says where it is, and leaves nothing running."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.autoscale_demo import INTERRUPTED, read_lines
from bench.support.cpu import descendants, is_alive

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

STOPPED_S = 120.0


@pytest.fixture
def temp() -> Iterator[Path]:
    """A folder for temporary files, short: Ray's sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@contextmanager
def the_demo(out: Path, temp: Path) -> Iterator["subprocess.Popen[str]"]:
    """The demo as a terminal's foreground process group has it, its temporary files in `temp`."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "bench.autoscale_demo", "--out", str(out)],
        env=os.environ | {"TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield demo
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGINT)
            demo.communicate(timeout=STOPPED_S)


def test_ctrl_c_ends_the_demo_with_a_report_and_nothing_left(tmp_path: Path, temp: Path) -> None:
    with the_demo(tmp_path / "out", temp) as demo:
        assert demo.stdout is not None
        begun = next((line for line in demo.stdout if "requests/s" in line), "it did not begin")
        assert "replicas: 1, wanted 1" in begun
        started = descendants(demo.pid)
        os.killpg(demo.pid, signal.SIGINT)
        os.killpg(demo.pid, signal.SIGINT)
        said, _ = demo.communicate(timeout=STOPPED_S)

    (load,) = (tmp_path / "out").iterdir()
    assert demo.returncode == INTERRUPTED
    assert said.splitlines()[-1] == f"interrupted: nothing runs any more; {load} has what there is"
    assert (load / "report.html").exists()
    assert read_lines(load / "observed.jsonl"), "the load had begun"
    assert len(started) > 5, "Redis, Ray, gateway, replicas and the load tester"
    assert [process for process in started if is_alive(process)] == []
    assert list(temp.iterdir()) == []
