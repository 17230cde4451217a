"""What the one gateway or replica of a Kubernetes pod and the pod's hooks tell each other, by files in a folder that
PENSTOCK_POD_DIR names.

`ready`: it serves; its process id. `drain`: the pod is to go, so take nothing new and finish what runs. `drained`: that
is done. Elsewhere than in a pod there is no folder, and nobody asks for anything.
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
"""How long a gateway that is to go still answers: for probes to fail (two, a second apart, in our chart), and for
endpoints, proxies and idle connections to follow, on a busy node too."""
AFTER_GATEWAYS_S = SPREAD_S + 4.0
"""How long a replica whose pod is to go takes new work: where a whole cluster goes, its gateways have nobody else for
what still reaches them."""
POLL_S = 0.2
_READY, _DRAIN, _DRAINED = "ready", "drain", "drained"


class Pod:
    """folder: None where this is no pod of ours."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:  # a container that was started again finds what the one before has left
            folder.mkdir(parents=True, exist_ok=True)
            for name in (_READY, _DRAIN, _DRAINED):
                (folder / name).unlink(missing_ok=True)

    def serves(self) -> None:
        if self.folder is not None:
            (self.folder / _READY).write_text(f"{os.getpid()}\n", encoding="ascii")

    def has_stopped(self) -> None:
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / _READY).unlink(missing_ok=True)

    def has_drained(self) -> None:
        self.has_stopped()
        if self.folder is not None:
            (self.folder / _DRAINED).touch()

    async def until_asked(self) -> None:
        """Until the pod is asked to drain."""
        while True:
            if self.folder is not None and (self.folder / _DRAIN).exists():  # a look at memory
                return
            await asyncio.sleep(POLL_S)


def this_pod() -> Pod:
    folder = os.environ.get(POD_DIR)
    return Pod(Path(folder) if folder else None)


def drain(
    folder: Path,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Ask who serves in this pod to drain, and wait for it; not where nobody serves (any more). Whether nothing is left
    to wait for."""
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
    """The folder in /proc of the process that serves; one that was killed could not take back what it had said."""
    try:
        found = Path("/proc") / (folder / _READY).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return found if found.name.isdigit() and found.exists() else None
