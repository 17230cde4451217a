"""Parts of a test cluster as processes: stopped for a while, or ended and started anew as they were."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import Cluster

END_S = 20.0


def pid_of(cluster: Cluster, part: str) -> int:
    return int(_state(cluster)["pids"][part])


def log_of(cluster: Cluster, part: str) -> Path:
    return cluster.folder / "logs" / f"{part}.log"


@contextmanager
def stopped(cluster: Cluster, part: str) -> Iterator[None]:
    """A part that stands still inside the context: connections to it stay open and are not answered."""
    pid = pid_of(cluster, part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Part:
    """How it was started."""

    cluster: Cluster
    name: str
    command: list[str]
    variables: dict[str, str]
    folder: str
    log_begin: int
    """How long its log was when it ended."""

    def start(self) -> None:
        """The cluster's `down` ends it."""
        begin = [
            "sh",
            "-c",
            '"$@" >>"$0" 2>&1 </dev/null & echo $!',
            str(log_of(self.cluster, self.name)),
            *self._inside(),
            *self.command,
        ]
        started = subprocess.run(
            begin, env=self.variables, cwd=self.folder, stdout=subprocess.PIPE, start_new_session=True, check=True
        )
        state = _state(self.cluster)
        state["pids"][self.name] = int(started.stdout)
        (self.cluster.folder / "state.json").write_text(json.dumps(state))

    def _inside(self) -> list[str]:
        """The cluster's network, where it has one of its own; what runs there becomes the command."""
        namespace = _state(self.cluster).get("netns")
        return ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []

    @property
    def said(self) -> str:
        """Output of the part since it was started again."""
        return log_of(self.cluster, self.name).read_bytes()[self.log_begin :].decode()

    def keep(self) -> None:
        """Start it again where it has ended: while nobody listened there, a client that tried may have got its port."""
        if not _is_alive(pid_of(self.cluster, self.name)):
            self.start()


@contextmanager
def ended(cluster: Cluster, name: str) -> Iterator[Part]:
    """Killed, and started behind what is inside, with the same command line."""
    pid = pid_of(cluster, name)
    process = Path(f"/proc/{pid}")
    command = process.joinpath("cmdline").read_text().rstrip("\0").split("\0")
    variables = dict(each.split("=", 1) for each in process.joinpath("environ").read_text().rstrip("\0").split("\0"))
    part = Part(cluster, name, command, variables, os.readlink(process / "cwd"), log_of(cluster, name).stat().st_size)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"{name} does not end"
        time.sleep(0.02)
    try:
        yield part
    finally:
        part.start()


def _state(cluster: Cluster) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads((cluster.folder / "state.json").read_text())
    return found


def _is_alive(pid: int) -> bool:
    """Dead and not waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while it was read
        return False
