"""Signals between the one gateway or replica of a Kubernetes pod and the pod's hooks: files in a folder that
PENSTOCK_POD_DIR names.

`ready` holds the id of the process that serves. `drain` asks that process to take nothing new and to finish what runs,
because the pod is going to be deleted. `drained` says that this is done. Outside of a pod there is no folder, and
nothing is signalled.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POD_DIR = "PENSTOCK_POD_DIR"
DRAIN_S = "PENSTOCK_DRAIN_S"
"""Longest wait of `penstock drain`, seconds."""
SPREAD_S = 8.0
"""How long a gateway that is asked to drain still answers: for probes to fail (two, a second apart, in our chart), and
for endpoints, proxies and idle connections to follow, on a busy node too."""
AFTER_GATEWAYS_S = SPREAD_S + 4.0
"""How long a replica that is asked to drain still takes new work: where a whole cluster is deleted, its gateways have
no other replica for the requests that still come."""
POLL_S = 0.2
"""Pause between two checks of the folder."""
_READY, _DRAIN, _DRAINED = "ready", "drain", "drained"


class Pod:
    """The side of the process that serves. folder: None outside of a pod."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:  # a container that was started again finds what the one before has left
            folder.mkdir(parents=True, exist_ok=True)
            for name in (_READY, _DRAIN, _DRAINED):
                (folder / name).unlink(missing_ok=True)

    def mark_ready(self) -> None:
        """Signal that this process serves."""
        if self.folder is not None:
            (self.folder / _READY).write_text(f"{os.getpid()}\n", encoding="ascii")

    def mark_stopped(self) -> None:
        """Signal that this process serves no more."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / _READY).unlink(missing_ok=True)

    def mark_drained(self) -> None:
        """Signal that nothing runs any more."""
        self.mark_stopped()
        if self.folder is not None:
            (self.folder / _DRAINED).touch()

    async def wait_for_drain(self) -> None:
        """Return when the pod is asked to drain; never outside of a pod."""
        while True:
            if self.folder is not None and (self.folder / _DRAIN).exists():  # the folder is in memory
                return
            await asyncio.sleep(POLL_S)


def this_pod() -> Pod:
    """The pod of this process, as the environment names it."""
    folder = os.environ.get(POD_DIR)
    return Pod(Path(folder) if folder else None)


def drain(
    folder: Path,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Request that the process that serves in this pod drains, and wait until it has; returns at once where none serves
    (any more). Returns True if nothing runs any more, False if `timeout_s` passed first."""
    serving = _serving(folder)
    if serving is None:
        return True
    (folder / _DRAIN).touch()
    deadline = clock() + timeout_s
    while not (folder / _DRAINED).exists() and serving.exists():
        if clock() > deadline:
            return False
        sleep(POLL_S)
    return True


def _serving(folder: Path) -> Path | None:
    """Folder in /proc of the process that serves; None where it was killed and left its `ready` behind."""
    try:
        found = Path("/proc") / (folder / _READY).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return found if found.name.isdigit() and found.exists() else None
