"""The child process that runs vLLM, seen from the replica: started with another environment's Python, connected by a
socket, killed with all that it started.

Not the engine. Invariants: the process leads a group of its own, which is gone when `end` returns; it ends by itself
when this process does, because its end of the socket closes; of our environment it has only what ALLOWED names, and so
none of the platform's secrets.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from penstock.workers.vllm.bridge import Closed, Message, Op, Start, Wire

BRIDGE = Path(__file__).with_name("bridge.py")
NUM_LAST_LINES = 12
"""Lines of the child's output that an error about its start shows."""
MAX_LINE_CHARS = 400
"""Characters that are kept of each of those lines."""
OUTPUT_ENDS_S = 1.0
"""Longest wait for the child's output to end after its group has; a process that left the group may hold it open."""
ALLOWED = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "TZ",
        "LANG",
        "TMPDIR",
        "CC",
        "CXX",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
    )
)
ALLOWED_BEGINNINGS = (
    *("LC_", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "MALLOC_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "VLLM_"),
)
"""Environment variables that the child inherits, by the beginning of their names. A secret can have any name (a
provider's key, a header of a trace exporter, a proxy's password), so only what is named here is inherited; vLLM needs
no network, its checkpoint is on this machine."""
SECRETIVE = frozenset(("KEY", "TOKEN", "SECRET", "PASSWORD"))
"""Words between the underscores of a variable's name; a variable that has one is never inherited."""


def bridge_command(python: str, bridge: Path = BRIDGE) -> list[str]:
    """The child's command but for its last argument, the descriptor. -I: beside the bridge lie modules that vLLM must
    not take for its own."""
    return [python, "-I", str(bridge)]


def make_environment(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """The child's environment variables. Those set for vLLM already stay, but for the one that places its engine: it
    runs in the same process, so that the bridge sees all of it."""
    kept = {name: value for name, value in inherited.items() if _is_allowed(name)}
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas share the cores
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the checkpoint is on this machine already
    }
    return {**defaults, **kept, "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _is_allowed(name: str) -> bool:
    return (name in ALLOWED or name.startswith(ALLOWED_BEGINNINGS)) and SECRETIVE.isdisjoint(name.upper().split("_"))


class Child:
    """A running bridge. `on_message` and, once, `on_end` (with a reason) are called on its reader thread. Its output
    goes to our stderr."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        start: Start,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Raises OSError when the command can't be run."""
        self._on_message = on_message
        self._on_end = on_end
        ours, theirs = socket.socketpair()
        self._socket = ours
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        assert self._process.stdout is not None
        self._printer = threading.Thread(
            target=self._print, args=(self._process.stdout,), name="penstock-vllm-output", daemon=True
        )
        self._printer.start()
        self._wire = Wire(ours, Message)
        self._reader = threading.Thread(target=self._read, args=(start,), name="penstock-vllm-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_output(self) -> str:
        """The last lines that the child printed, for an error about its start; empty when it printed nothing."""
        lines = list(self._last_lines)
        return "Its last lines:\n" + "\n".join(lines) if lines else ""

    def send(self, ops: list[Op]) -> None:
        """Send operations; waits only for a child that has stopped reading altogether. Raises Closed."""
        self._wire.send(ops)

    def end(self, timeout_s: float) -> bool:
        """Kill the whole process group, at once. Returns False if it is not gone after `timeout_s`. Safe to call again,
        but not from `on_message` or `on_end`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the reader ends, and a write that waits
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _read(self, start: Start) -> None:
        try:
            self._wire.send([start])
            while True:
                self._on_message(self._wire.receive())
        except Closed as closed:
            # Only here is the process waited for, so its number still belongs to its group; what sends garbage is of no
            # more use either.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            status = self._process.wait()
            self._printer.join(OUTPUT_ENDS_S)
            self._socket.close()
            self._on_end(f"{closed}; status {status}")

    def _print(self, output: IO[bytes]) -> None:
        with output:
            for data in output:
                line = data.decode("utf-8", "replace")
                last_state = line.rstrip().rpartition("\r")[2]  # a progress bar overwrites itself
                self._last_lines.append(last_state[:MAX_LINE_CHARS])
                sys.stderr.write(line)
