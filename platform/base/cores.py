"""How many CPU cores are really ours: the affinity mask, and the quota of a container. And pinning a process to some of
them."""

import math
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from penstock.base.errors import ConfigError

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""cgroup v2: `QUOTA PERIOD` in microseconds, or `max PERIOD`."""


def available_cores(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    return min(len(os.sched_getaffinity(0)), _quota(cpu_max))


def pin_process(cores: Collection[int]) -> None:
    """Have this process run on these cores only: every thread that it has, and with them those that they will start.
    Raises ConfigError for a core that the process may not run on."""
    allowed = os.sched_getaffinity(0)
    foreign = sorted(set(cores) - allowed)
    if foreign:
        raise ConfigError(
            f"this process can't be pinned to the cores {foreign}: it may run on {sorted(allowed)} (sched_setaffinity)"
        )
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(task.name), cores)


def _quota(path: Path) -> int:
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return (os.cpu_count() or 1) if quota == "max" else max(1, math.floor(int(quota) / int(period)))
