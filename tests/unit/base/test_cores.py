import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.cores import available_cores, pin_process
from penstock.base.errors import ConfigError

PINNED = """
import json, os, sys, threading
from penstock.base.cores import pin_process
stop, ids = threading.Event(), []
def run():
    ids.append(threading.get_native_id())
    stop.wait()
before = threading.Thread(target=run)
before.start()
pin_process([int(sys.argv[1])])
after = threading.Thread(target=run)
after.start()
while len(ids) < 2:
    pass
print(json.dumps([sorted(os.sched_getaffinity(each)) for each in (0, *ids)]))
stop.set()
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [("50000 100000\n", 1), ("100000 100000\n", 1), ("max 100000\n", None), ("garbage", None), (None, None)],
)
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, content: str | None, expected: int | None) -> None:
    path = tmp_path / "cpu.max"
    if content is not None:
        path.write_text(content, encoding="ascii")

    assert available_cores(path) == (expected or len(os.sched_getaffinity(0)))


def test_every_thread_of_a_pinned_process_keeps_to_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", PINNED, str(core)], capture_output=True, check=True, timeout=30)

    assert json.loads(done.stdout) == [[core]] * 3


def test_a_core_that_is_not_ours_is_refused() -> None:
    before, foreign = os.sched_getaffinity(0), 1 + max(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=rf"can't be pinned to the cores \[{foreign}\]"):
        pin_process([min(before), foreign])

    assert os.sched_getaffinity(0) == before
