"""All processes of a step, however far below it and in whatever sessions: they end together, and with the harness. By
/proc and prctl(2), so Linux alone.

Invariant: what a command has started while `adopting` was open is below this process, even where its parents have
ended, and is gone after `end_children`.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

SET_DEATH_SIGNAL, SET_SUBREAPER, GET_SUBREAPER = 1, 36, 37
"""Operations of prctl(2), from <linux/prctl.h>."""
END_S = 15.0
"""Longest time for ending processes, seconds: one that waits for a driver can't be ended at once."""
POLL_S = 0.02


class Entry(NamedTuple):
    parent: int
    is_zombie: bool


@contextmanager
def adopting() -> Iterator[None]:
    """Processes below this one whose parent ends become this one's children, instead of the first process's."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(SET_SUBREAPER, before.value, 0, 0, 0)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Ends it at once where `parent` is its parent no more."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children() -> set[int]:
    """Process ids of this process's own children."""
    return {pid for pid, entry in _entries().items() if entry.parent == os.getpid()}


def end_children(others: Set[int]) -> None:
    """Kill all children of this process but `others`, and all that is below them; wait for them, END_S at most."""
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        entries = _entries()
        own = {pid for pid, entry in entries.items() if entry.parent == os.getpid()} - others
        if not own:
            return
        for pid in _below(own, entries):
            if not entries[pid].is_zombie:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            elif pid in own:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S)


def _below(roots: Set[int], entries: dict[int, Entry]) -> set[int]:
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += [child for child, entry in entries.items() if entry.parent == pid and child not in found]
    return found


def _entries() -> dict[int, Entry]:
    """Processes that there are, by id (proc_pid_stat(5): the name in parentheses may hold anything)."""
    found: dict[int, Entry] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = Entry(int(parent), state == "Z")
    return found
