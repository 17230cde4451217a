"""The process in which constraints are checked (`python -m penstock.text.grammar_child CPU_S MEMORY_BYTES`): each in a
process of its own that is forked off, and that the kernel ends when it has used up its CPU time or memory.

Not what may be asked for (`text.grammar`), and not the gateway's side (`text.grammar_check`). Requests come on standard
input and replies go to standard output, each behind its length, until the input ends. Invariant: nothing of a
constraint is left when the next one is read.
"""

import os
import resource
import signal
import struct
import sys

import msgspec

from penstock.text.grammar import find_error
from penstock.wire.frames import Constraint

LENGTH = struct.Struct("!I")
"""Bytes of a message, in front of it."""
_MAX_ANSWER_BYTES = 64 * 2**10
_TOO_LARGE = 3
"""Exit status of a check that ran out of memory."""


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """What became of a check, and what it cost."""

    error: str | None
    """Why the constraint can't be enforced; None if it can."""
    cpu_s: float
    rss_bytes: int
    """Most memory of the process, that of the interpreter included."""
    fault: str = ""
    """Exception that no constraint should cause; empty: there was none."""


def main() -> None:
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    find_error(Constraint("regex", "a"))  # what is made once is made before the forks
    _limit_memory(memory_bytes)
    while (head := _read(0, LENGTH.size)) is not None:
        body = _read(0, LENGTH.unpack(head)[0])
        if body is None:
            return
        reply = msgspec.json.encode(_check_apart(body, cpu_s, memory_bytes))
        _write(1, LENGTH.pack(len(reply)) + reply)


def _limit_memory(more_bytes: int) -> None:
    """Bound the address space of this process and those forked off it: what there is, and so much more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _check_apart(body: bytes, cpu_s: float, memory_bytes: int) -> Checked:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _check(body, cpu_s, writing)
    os.close(writing)
    answer = _read_all(reading)
    os.close(reading)
    _, status, used = os.wait4(pid, 0)
    spent = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    if status == 0:
        return Checked(msgspec.json.decode(answer, type=str | None), *spent)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != _TOO_LARGE:
        return Checked(None, *spent, fault=answer.decode("utf-8", "replace") or f"exit status {status}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Checked(f"It takes more than {cpu_s:g} s of CPU time to read.", *spent)
    # an allocation that fails aborts the process, and a stack that overflows ends it too
    return Checked(f"It takes more than {memory_bytes // 2**20} MiB of memory to read.", *spent)


def _check(body: bytes, cpu_s: float, writing: int) -> None:
    """Check, and end the process, which was forked off for it."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust writes why it aborts
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        error = find_error(msgspec.json.decode(body, type=Constraint))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writing, msgspec.json.encode(error))
        status = 0
    except MemoryError:
        status = _TOO_LARGE
    except BaseException as fault:  # noqa: BLE001 (nothing may go on in this copy of the process)
        os.write(writing, f"{type(fault).__name__}: {fault}".encode("utf-8", "replace")[:_MAX_ANSWER_BYTES])
    finally:
        os._exit(status)


def _read(descriptor: int, size: int) -> bytes | None:
    """Exactly `size` bytes. Returns None where the input ends before."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _read_all(descriptor: int) -> bytes:
    data = bytearray()
    while piece := os.read(descriptor, _MAX_ANSWER_BYTES):
        data += piece
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
