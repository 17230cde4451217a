"""Turns among the processes of a machine: whoever has one does what others would disturb.

Not a lock that keeps anything whole: a turn is waited for, but not forever, and where none can be had things go on
without. What is locked is a folder that is there in any case, so that nothing is left of a turn, whatever ends its
process, and nobody need own a file among those of other users. Any of them may keep the others waiting, for as long as
these do.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_S = 0.05
"""Time between two looks whether the turn is free."""


@contextmanager
def take_turn(wait_s: float, folder: Path | None = None) -> Iterator[bool]:
    """Have the turn, waited for at most so long; yields whether it was got. It ends with the block, or with the
    process. folder: the folder whose turn it is; None: that of temporary files."""
    try:
        path = Path(tempfile.gettempdir()) if folder is None else folder
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
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
