"""Parts of a test cluster as processes: stopped for a while, or ended and started anew as they were."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import Cluster

END_S = 20.0


def pid_of(cluster: Cluster, part: str) -> int:
    return int(_state(cluster)["pids"][part])


def log_of(cluster: Cluster, part: str) -> Path:
    return cluster.folder / "logs" / f"{part}.log"


@contextmanager
def stopped(cluster: Cluster, part: str) -> Iterator[None]:
    """It is there and does nothing: connections stay open and are not answered."""
    pid = pid_of(cluster, part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def ended(cluster: Cluster, part: str) -> Iterator[None]:
    """Killed, and started behind what is inside, with the same command line. The cluster's `down` ends the new one."""
    pid = pid_of(cluster, part)
    process = Path(f"/proc/{pid}")
    command = process.joinpath("cmdline").read_text().rstrip("\0").split("\0")
    variables = [each.split("=", 1) for each in process.joinpath("environ").read_text().rstrip("\0").split("\0")]
    folder = os.readlink(process / "cwd")
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"{part} does not end"
        time.sleep(0.02)
    try:
        yield
    finally:
        with log_of(cluster, part).open("ab") as log:
            started = subprocess.Popen(command, env=dict(variables), cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        state = _state(cluster)
        state["pids"][part] = started.pid
        (cluster.folder / "state.json").write_text(json.dumps(state))


def _state(cluster: Cluster) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads((cluster.folder / "state.json").read_text())
    return found


def _is_alive(pid: int) -> bool:
    """Dead and not waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
