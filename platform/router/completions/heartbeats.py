"""Heartbeats of a stream whose request waits for the first replica of its pool: comments (WHATWG HTML, 9.2.5), which
clients skip, with the time until the replica should be there.

They keep proxies and clients from giving up, and tell whoever looks. The first one starts the response, so that from
then on an error is an event. Invariant: none is written once the wait is over, and none is half written.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from penstock.router.transport.client import ClientGone
from penstock.router.transport.exchange import EVENT_END, Exchange

FIRST_S = 1.0
"""A wait that is over sooner shows nothing: its errors are still statuses, and its headers complete. A heartbeat that
knew no time yet is followed by the next one after as long: the autoscaler's word takes some seconds."""
PERIOD_S = 5.0
"""Time between two heartbeats, seconds."""
LAST_WRITE_S = 5.0
"""Longest time for a heartbeat that is being written when the wait ends."""


class Heartbeats:
    """The heartbeats of one stream, a `penstock.router.routing.request.HoldListener`. Use it as a context around the
    request. start: starts the response, if it has not started."""

    def __init__(
        self,
        exchange: Exchange,
        start: Callable[[], Awaitable[None]],
        first_s: float = FIRST_S,
        period_s: float = PERIOD_S,
    ) -> None:
        self._exchange = exchange
        self._start = start
        self._first_s = first_s
        self._period_s = period_s
        self._num_held = 0
        self._is_closed = False
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._over.set()
        if self._task is None:
            return
        try:
            if isinstance(error, Exception) or error is None:
                await asyncio.wait([self._task], timeout=LAST_WRITE_S)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin_hold(self, ready_in_s: Callable[[], float | None]) -> None:
        """A sequence of the request waits; see `HoldListener`."""
        self._num_held += 1
        self._over.clear()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat(ready_in_s), name="heartbeats")

    def end_hold(self) -> None:
        self._num_held -= 1
        if not self._num_held:
            self._over.set()

    async def _beat(self, ready_in_s: Callable[[], float | None]) -> None:
        pause_s = self._first_s
        try:
            while not await self._is_over_within(pause_s):
                await self._start()
                if self._is_over:
                    return
                known_s = ready_in_s()
                await self._exchange.write(_comment(known_s))
                pause_s = self._first_s if known_s is None else self._period_s
        except ClientGone:
            return  # the watch of the connection ends the request

    async def _is_over_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                await self._over.wait()
                while not self._is_over:  # the next wait began before this one was seen to be over
                    await self._over.wait()
        except TimeoutError:
            return self._is_over
        return True

    @property
    def _is_over(self) -> bool:
        return not self._num_held or self._is_closed


def _comment(ready_in_s: float | None) -> bytes:
    if ready_in_s is None:
        return b": waiting for a replica to start" + EVENT_END
    return b": waiting for a replica to start, expected in %.0f s" % ready_in_s + EVENT_END
