"""How many CPU cores are really ours: the affinity mask, and the quota of a container."""

import math
import os
from pathlib import Path

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""cgroup v2: `QUOTA PERIOD` in microseconds, or `max PERIOD`."""


def available_cores(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    return min(len(os.sched_getaffinity(0)), _quota(cpu_max))


def _quota(path: Path) -> int:
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return (os.cpu_count() or 1) if quota == "max" else max(1, math.floor(int(quota) / int(period)))
