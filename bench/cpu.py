"""CPU time of other processes, to the nanosecond: the scheduler's own per-thread account (/proc/PID/task/TID/schedstat, Linux)."""

from pathlib import Path
from typing import NamedTuple

import psutil


class ThreadCpu(NamedTuple):
    name: str
    seconds: float


def threads(pid: int) -> dict[int, ThreadCpu]:
    """CPU seconds of each living thread of a process."""
    found: dict[int, ThreadCpu] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found[int(task.name)] = ThreadCpu((task / "comm").read_text().strip(), int((task / "schedstat").read_text().split()[0]) / 1e9)
        except OSError:
            continue  # the thread has just ended
    return found


def process_seconds(pid: int, *, without_threads: str = "\0") -> float:
    """CPU seconds of a process; threads whose name starts with `without_threads` are left out."""
    return sum(t.seconds for t in threads(pid).values() if not t.name.startswith(without_threads))


def descendants(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]
