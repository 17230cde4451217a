"""Turns among the processes of a user on one machine: whoever has one does what others would disturb.

Not a lock that keeps anything whole: a turn is waited for, but not forever, and where none can be had things go on
without.
"""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_S = 0.05
"""Time between two looks whether the turn is free."""


@contextmanager
def take_turn(name: str, wait_s: float, folder: Path | None = None) -> Iterator[bool]:
    """Have a turn of this name, waited for at most so long; yields whether it was got. It ends with the block, or with
    the process. folder: where files of turns lie; None: that of temporary files."""
    descriptor = _open(name, folder)
    if descriptor is None:
        yield False
        return
    try:
        has_turn = _wait(descriptor, wait_s)
        try:
            yield has_turn
        finally:
            if has_turn:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
    finally:
        os.close(descriptor)


def _open(name: str, folder: Path | None) -> int | None:
    """Returns None where no file can be written, or somebody else's is there."""
    try:
        path = (Path(tempfile.gettempdir()) if folder is None else folder) / f"penstock-{os.getuid()}-{name}.turn"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        return descriptor
    os.close(descriptor)
    return None


def _wait(descriptor: int, wait_s: float) -> bool:
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOOK_S)
        except OSError:
            return False
        else:
            return True
