"""Draws the plan and builds request bodies in a thread, a bounded way ahead of the run, so that neither makes a request
late.

Not here: bodies of a session's later turns; they need the answers before them and come as None.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

from penstock_loadtest.planned import Planned

MAX_ITEMS = 512
MAX_BYTES = 32 << 20


class Prepared(NamedTuple):
    planned: Planned
    body: bytes | None


class PrefetchQueue:
    """A queue of prepared requests that a thread keeps filled: up to `max_items` or `max_bytes` of bodies, filled up
    again when half of it is gone.

    An async context manager, used from the event loop that entered it; `next` is for one caller at a time.
    """

    def __init__(
        self,
        plan: Iterator[Planned],
        prepare: Callable[[Planned], bytes],
        *,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._plan = plan
        self._prepare = prepare
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._queue: deque[Prepared] = deque()
        self._bytes = 0
        self._room = threading.Condition()
        self._is_closed = False
        self._changed = asyncio.Event()  # something arrived, or the thread waits or ended

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "loadtest-plan")
        self._filling: Future[None] = self._thread.submit(self._fill)
        self._filling.add_done_callback(lambda _: self._notify())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._room:
            self._is_closed = True
            self._room.notify()
        await self._loop.run_in_executor(None, self._thread.shutdown)

    async def wait_filled(self, timeout_s: float, stop: asyncio.Event) -> None:
        """Wait until the queue is full, the plan is drawn, time is up or `stop` is set. Raises what the thread raised,
        even where items before it are still queued."""
        filling = asyncio.ensure_future(self._fill_up())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((filling, stopped), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            filling.cancel()
            stopped.cancel()
        if self._filling.done():
            self._filling.result()

    async def _fill_up(self) -> None:
        while not (self._is_full or self._filling.done()):
            await self._wait()

    async def next(self) -> Prepared | None:
        """The next request. Returns None if the plan has ended. Raises what drawing or preparing the request raised."""
        while not self._queue:
            if self._filling.done() and not self._queue:  # in this order: the thread ends after its last item
                self._filling.result()
                return None
            await self._wait()
        with self._room:
            item = self._queue.popleft()
            self._bytes -= len(item.body or b"")
            if self._is_half_empty:
                self._room.notify()
        return item

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= self._max_items or self._bytes >= self._max_bytes

    @property
    def _is_half_empty(self) -> bool:
        return len(self._queue) <= self._max_items // 2 and self._bytes <= self._max_bytes // 2

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _fill(self) -> None:
        """The work of the thread: draw the plan and build bodies while there is room."""
        for planned in self._plan:
            item = Prepared(planned, None if planned.turn else self._prepare(planned))
            with self._room:
                if self._is_closed:
                    return
                was_empty = not self._queue
                self._queue.append(item)
                self._bytes += len(item.body or b"")
                is_full = self._is_full
            if was_empty or is_full:
                self._notify()
            if is_full:
                with self._room:
                    self._room.wait_for(lambda: self._is_closed or self._is_half_empty)
