"""Waiting for what another process answers, without taking one's own standing still for its silence.

An event loop that stood still (a paused machine, a long callback) finds its timers due before it reads its sockets:
with `asyncio.timeout` an answer that lies there already would be thrown away, and the other process would count as
gone.
"""

import asyncio
from types import TracebackType
from typing import Self

LATE_S = 0.02
"""A timer that is later than this was held up by its own process, seconds."""
READING_S = 0.1
"""Time in which a loop that stood still reads what has come meanwhile, seconds."""
MOST_TIMES = 3
"""How often that time is given: a loop may stand still again, or be long in reading."""


class answer_within:  # noqa: N801  # as asyncio.timeout
    """A context like `asyncio.timeout(seconds)`, but where this loop itself stood still when the time was over, what
    has come meanwhile is read first. Raises TimeoutError.

    Not for what has a timeout of its own within: redis-py gives up on a command after `redis.COMMAND_TIMEOUT_S`.
    """

    __slots__ = ("_due_s", "_handle", "_loop", "_num_left", "_seconds", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_left = MOST_TIMES
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        self._due_s = self._loop.time() + self._seconds
        self._handle = self._loop.call_at(self._due_s, self._end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _end(self) -> None:
        now = self._loop.time()
        if now - self._due_s > LATE_S and self._num_left:
            self._num_left -= 1
            self._due_s = now + READING_S
            self._handle = self._loop.call_at(self._due_s, self._end)
        else:
            self._timeout.reschedule(now)
