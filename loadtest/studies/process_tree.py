"""CPU time of other processes with everything below them, from the operating system's account (psutil)."""

from collections.abc import Sequence
from contextlib import suppress

import psutil

from penstock_loadtest.errors import ScenarioInvalid


def read_tree_cpu_s(pids: Sequence[int], without: Sequence[int] = ()) -> float:
    """CPU seconds, user and system, that these processes and their descendants have spent, those of `without` and
    theirs left out.

    A descendant that ended and was waited for is in its parent's account, so nothing is lost between two readings; in
    steps of the kernel's clock tick (10 ms on Linux) a process. Raises ScenarioInvalid for a process that is not there.
    """
    left_out = _tree(without)
    return sum(_cpu_s(process) for pid, process in _tree(pids).items() if pid not in left_out)


def _tree(pids: Sequence[int]) -> dict[int, psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        except psutil.Error:
            raise ScenarioInvalid(f"There is no process {pid} whose CPU time could be read.") from None
    return found


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # ended between listing and reading
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
