"""Ray's driver as a child process of `penstock up`: its events, and its end within a bound.

Private: an own temp folder, a token that only this run knows and that is written nowhere, no dashboard, no usage
report, nothing in the home folder.

Decisions: docs/decisions/one-machine.md
"""

import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from penstock.base.environment import serve_environment
from penstock.base.errors import PenstockError
from penstock.cli.config import PlatformConfig
from penstock.cli.events import FAILED, Event

STOP_S = 30.0
"""Seconds that requests under way, then Serve, then Ray get to end."""
POLL_S = 0.1
TAIL_LINES = 15
RAY_FOLDER = "ray"
"""Name of Ray's own folder in the run's temp folder."""


class StartFailed(PenstockError):
    """The platform did not come up, or ended by itself; the sentence gives the reason, `detail` the end of the log."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def ray_environment() -> dict[str, str]:
    """Environment variables for Ray and all that it starts."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        **serve_environment(),
    }


def driver_command(config: PlatformConfig, temp_dir: Path, journal: Path) -> list[str]:
    """Command line of the driver, without its last argument, the descriptor for events. journal: the autoscaler's event
    log."""
    path = temp_dir / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return [
        sys.executable,
        "-m",
        "penstock.cli.driver",
        str(path),
        str(temp_dir / RAY_FOLDER),
        str(journal.absolute()),
        str(os.getpid()),
    ]


class Cluster:
    """The driver process, started at once. `temp_dir` is private to this run; what the driver prints goes to `log`."""

    def __init__(self, command: Sequence[str], temp_dir: Path, environment: Mapping[str, str], log: TextIO) -> None:
        self._temp_dir = temp_dir
        self._events, writer = os.pipe()
        inherited = {
            name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
        }  # a cluster of someone else's
        try:
            # A session of its own: the terminal's Ctrl-C must go to `penstock up` alone, which ends things in order.
            self._process = subprocess.Popen(
                [*command, str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **environment},
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        self._unread = b""

    def wait_for(self, name: str, timeout_s: float) -> None:
        """Wait for the driver's event `name`. Raises StartFailed when the driver fails, ends or takes longer."""
        deadline = time.monotonic() + timeout_s
        while (event := self._next_event(deadline)) is not None:
            if event.name == FAILED:
                raise StartFailed(event.message, event.detail)
            if event.name == name:
                return
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StartFailed(
                f"Ray did not come as far as {name!r} within {timeout_s:.0f} s.", self.log_tail()
            ) from None
        raise StartFailed(f"Ray's driver process ended with status {status}.", self.log_tail())

    def wait_until_ended(self) -> int:
        """Wait for a driver that ends by itself; returns its exit status."""
        return self._process.wait()

    def stop(self, hurry: threading.Event) -> None:
        """Ask the driver to end and waits STOP_S at most, less when `hurry` is set. What is left then is for the
        caller to end."""
        self._process.terminate()
        deadline = time.monotonic() + STOP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if hurry.wait(POLL_S):
                break
        os.close(self._events)

    def log_tail(self) -> str:
        """The end of the newest log of a Serve process; empty where there is none."""
        logs = sorted(
            (self._temp_dir / RAY_FOLDER / "session_latest" / "logs" / "serve").glob("*.log"),
            key=lambda path: path.stat().st_mtime,
        )
        return (
            "\n".join(logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]) if logs else ""
        )

    def _next_event(self, deadline: float) -> Event | None:
        """The driver's next event; None at the deadline, or when the driver has closed its end and is about to end."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._events, 65536) if ready else b""
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=Event)
