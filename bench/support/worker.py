"""A contender in a process of its own that is asked by lines of JSON, and stands still while another one is timed.

`answer` is the child's half; it needs only the standard library, because the child may run under another environment's
Python. `Worker` is the parent's. Between two questions the child's whole process group is stopped (SIGSTOP), so idle
threads that spin take nothing from who is timed.
"""

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
END_S = 10.0
BOOT = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"
"""The repository comes last on the path: nothing in it is taken for a module of the child's environment."""


def answer(start: Callable[[], Mapping[str, Callable[..., object]]]) -> None:
    """The child's main loop: start, report that it is ready, and answer questions until the parent closes its end.

    What anyone prints goes to stderr, at once, because the child is killed in the end; only answers go to the parent.
    """
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as out:
        os.dup2(2, 1)
        operations = start()
        out.write('"ready"\n')
        for line in sys.stdin:
            question = json.loads(line)
            out.write(json.dumps(operations[question.pop("op")](**question)) + "\n")


class Worker:
    """The parent's half. Its calls raise RuntimeError, with the end of what the child printed, where the child ends or
    takes longer than it may."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        self._receive(timeout_s)
        self._signal(signal.SIGSTOP)

    def ask(self, op: str, *, timeout_s: float = 600.0, **arguments: object) -> Any:
        """Ask the child for the operation `op`; returns its answer, as JSON gives it."""
        self._signal(signal.SIGCONT)
        _pipe(self._process.stdin).write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        found = self._receive(timeout_s)
        self._signal(signal.SIGSTOP)
        return found

    def _receive(self, timeout_s: float) -> Any:
        out = _pipe(self._process.stdout)
        is_there = bool(select.select([out], [], [], timeout_s)[0])
        line = out.readline() if is_there else b""  # one answer at a time, so none waits in the buffer
        if not line:
            if is_there:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)  # what it says last comes behind its end of the pipe
            reason = "ended" if is_there else f"did not answer within {timeout_s:.0f} s"
            raise RuntimeError(
                f"{self._log.stem} {reason}; it printed last:\n"
                f"{self._log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
            )
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)


@contextmanager
def worker(
    name: str, command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, start_s: float = 900.0
) -> Iterator[Worker]:
    """Start a worker and wait until it is ready; end its whole process group at the end. folder: for what it prints."""
    log = folder / f"{name}.log"
    with (
        log.open("wb") as out,
        # a group, not a session: when this process dies, the kernel continues stopped groups with a hang-up
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            env=env,
            cwd=folder,
            process_group=0,
            bufsize=0,
        ) as process,
    ):
        try:
            started = Worker(process, log)
            started.wait_ready(start_s)
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    return [python, "-c", BOOT, str(ROOT), module, *arguments]


def peak_bytes(pid: int) -> int:
    """The most memory that a living process has had resident at once (VmHWM of proc_pid_status(5)), mapped files
    included."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
