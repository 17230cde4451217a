"""CPU time of other processes, to the nanosecond: the scheduler's own per-thread account (/proc/PID/task/TID/schedstat,
Linux)."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class ThreadCpu(NamedTuple):
    name: str
    seconds: float


def threads(pid: int) -> dict[int, ThreadCpu]:
    """CPU seconds of each living thread of a process."""
    found: dict[int, ThreadCpu] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found[int(task.name)] = ThreadCpu(
                (task / "comm").read_text().strip(), int((task / "schedstat").read_text().split()[0]) / 1e9
            )
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


def command_line(process: psutil.Process) -> list[str]:
    """The words of its command line; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this id, runs. One that has ended does not, nobody need have waited for it."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it ended meanwhile
        return False


def _times(process: psutil.Process) -> Any:
    try:
        return process.cpu_times()
    except psutil.Error:  # it ended meanwhile
        return None


class Spent(NamedTuple):
    """Seconds of some cores since the machine started."""

    everybody: float
    tree: float
    """CPU seconds of one process, and of all that it has started and still waits for or has waited for."""
    stolen: float
    """CPU seconds that the hypervisor took for other machines."""
    total: float

    @staticmethod
    def now(pid: int, cores: Collection[int]) -> "Spent":
        times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in cores]
        own = [found for process in descendants(pid) if (found := _times(process)) is not None]
        return Spent(
            everybody=sum(t.user + t.nice + t.system + t.irq + t.softirq for t in times),
            tree=sum(t.user + t.system + t.children_user + t.children_system for t in own),
            stolen=sum(t.steal for t in times),
            total=sum(t.user + t.nice + t.system + t.irq + t.softirq + t.idle + t.iowait + t.steal for t in times),
        )

    def others_since(self, before: "Spent") -> tuple[float, float]:
        """Shares of the cores' time: what processes outside of the tree took, and what was stolen."""
        total = self.total - before.total
        others = (self.everybody - before.everybody) - (self.tree - before.tree)
        return max(0.0, others) / total, (self.stolen - before.stolen) / total
