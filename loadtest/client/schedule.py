"""Calls at absolute times, some tens of microseconds after they are due: event loops only keep whole milliseconds.

One timerfd of the kernel (Linux) is armed for the earliest call. `time.perf_counter` and the timer read the same clock,
CLOCK_MONOTONIC.
"""

import asyncio
import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable

CALLS_AT_ONCE = 32
"""Calls made before the event loop has its turn, though more be due: libuv accepts one connection a round, and must not
starve of rounds."""
_MONOTONIC, _ABSOLUTE = 1, 1  # CLOCK_MONOTONIC, TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC are the same bits
_libc = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """itimerspec(3type): the interval is zero, it rings once."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "s", "ns")]


class Schedule:
    """Calls back on the running event loop. Close it before the loop ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd: int = _libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._armed_s = float("inf")
        self._loop.add_reader(self._fd, self._ring)

    def at(self, due_s: float, call: Callable[[float], None]) -> None:
        """Call with the time it then is, once `due_s` has come; calls due at the same time keep their order."""
        heapq.heappush(self._heap, (due_s, next(self._order), call))
        if due_s < self._armed_s:
            self._arm(due_s)

    def close(self) -> None:
        """Forget the calls that are still to come, and close the timer."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._heap.clear()

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was armed anew after it rang
        now = time.perf_counter()
        self._armed_s = 0.0  # calls may schedule; the timer is armed once, below
        try:
            for _ in range(CALLS_AT_ONCE):
                if not self._heap or self._heap[0][0] > now:
                    break
                heapq.heappop(self._heap)[2](now)
        finally:
            self._armed_s = float("inf")
            if self._heap:
                self._arm(self._heap[0][0])

    def _arm(self, due_s: float) -> None:
        self._armed_s = due_s
        ns = max(1, int(due_s * 1e9))
        spec = _TimerSpec(0, 0, ns // 1_000_000_000, ns % 1_000_000_000)
        _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)
