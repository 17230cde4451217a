"""The processes that this one started, children of children included, and the end of exactly those.

Linux only: as a subreaper we inherit orphans, so that whatever we ever started stays below us in the process tree.
"""

import ctypes
import os
import signal

import psutil

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of this process."""
KILL_ROUNDS = 5
"""Rounds of SIGKILL at most: a killed process may have been about to start another."""


def become_subreaper() -> None:
    """Adopt, from now on, every descendant whose parent dies. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def end_descendants(grace_s: float) -> int:
    """Terminate all descendants, kill after `grace_s` what is left; returns how many had to be ended. Zombies are
    reaped."""
    first = descendants()
    for process in first:
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(first, timeout=grace_s)
    for _ in range(KILL_ROUNDS):
        if not (left := descendants()):
            break
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=grace_s)
    return len(first)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
