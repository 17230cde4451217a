"""The gateway's check of a constraint, in another process: what it costs has a hard bound, in CPU time and in memory.

Not the check itself (`text.grammar`), and not the other process (`text.grammar_child`), which is started by the first
check and stays. Of our environment it has only what Python needs. It ends by itself when this process does, because its
input ends.
"""

import os
import select
import subprocess
import sys
import threading
import time

import msgspec

from penstock.text.grammar_child import LENGTH, Checked
from penstock.wire.errors import Overloaded
from penstock.wire.frames import Constraint

CPU_S = 0.1
"""CPU time of one check. Most constraints take milliseconds; the heaviest within all other limits take longer, and are
refused."""
MEMORY_BYTES = 128 * 2**20
"""Memory that one check may add to that of the interpreter."""
WALL_S = 10.0
"""Longest wait for a check: the machine is overloaded by then."""
START_S = 30.0
"""Longest wait for a check of a process that has just been started."""
_MODULE = "penstock.text.grammar_child"
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class _Lost(Exception):
    """The process has ended."""


class GrammarChecks:
    """Checks constraints, one at a time, from any thread."""

    def __init__(self, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._command = [sys.executable, "-m", _MODULE, str(cpu_s), str(memory_bytes)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def find_error(self, constraint: Constraint) -> str | None:
        """Why the constraint can't be enforced, as a sentence; None if it can. Raises Overloaded where there was no
        answer in time."""
        return self.check(constraint).error

    def check(self, constraint: Constraint) -> Checked:
        """`find_error`, with what it cost."""
        body = msgspec.json.encode(constraint)
        with self._lock:
            try:
                checked = self._ask(body)
            except _Lost:  # killed by something else, such as the kernel where memory is short
                self._end()
                checked = self._ask_again(body)
        if checked.fault:
            raise RuntimeError(f"the check of a constraint failed: {checked.fault}")
        return checked

    def close(self) -> None:
        """End the process; a check under way fails."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ask_again(self, body: bytes) -> Checked:
        try:
            return self._ask(body)
        except _Lost:
            self._end()
            raise Overloaded("The request's constraint could not be checked; try again.", retry_after_s=1.0) from None

    def _ask(self, body: bytes) -> Checked:
        if self._is_closed:
            raise Overloaded("The gateway is about to end; try again.", retry_after_s=1.0)
        until_s = time.monotonic() + (START_S if self._process is None else WALL_S)
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _write(self._process.stdin.fileno(), LENGTH.pack(len(body)) + body, until_s)
        reading = self._process.stdout.fileno()
        (size,) = LENGTH.unpack(_read(reading, LENGTH.size, until_s))
        return msgspec.json.decode(_read(reading, size, until_s), type=Checked)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,  # no Ctrl-C of a terminal
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # waits for it, and closes the pipes
                pass


def _write(descriptor: int, data: bytes, until_s: float) -> None:
    """Raises _Lost where nobody reads, or not in time."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    try:
        while data:
            if not ready.poll(max(0.0, until_s - time.monotonic()) * 1e3):
                raise _Lost
            data = data[os.write(descriptor, data) :]
    except OSError:
        raise _Lost from None


def _read(descriptor: int, size: int, until_s: float) -> bytes:
    """Exactly `size` bytes. Raises _Lost where there are no more, or not in time."""
    data = bytearray()
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    while len(data) < size:
        if not ready.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise _Lost
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise _Lost
        data += piece
    return bytes(data)
