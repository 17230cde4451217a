"""How old this process is, by the kernel: it began before any of its modules could read a clock. Linux."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
_START_FIELD = 19
"""Place of `starttime` behind the process's name, in clock ticks since the machine started; proc(5)."""


def process_age_s() -> float:
    """Seconds since this process was made, to about 10 ms."""
    behind_name = _STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started_s = int(behind_name[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
