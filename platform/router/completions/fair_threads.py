"""Threads for work of many tenants, who take turns: chat templates and tokenization, which would hold up the event
loop.

Not the default threads of asyncio, which wait for disks. Each tenant's work waits in its own line, in the order in
which it came. Invariants: no more work is under way than there are threads, also of callers that are gone; between two
turns of a tenant every other one with work has one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.wire.errors import RateLimited

T = TypeVar("T")

NUM_THREADS = 2
"""Python runs one of them at a time beside the event loop: more would only make that wait longer."""
MAX_WAITING = 64
"""Pieces of work of one tenant that wait."""
MAX_WAITING_COST = 32 * 2**20
"""Cost of what waits of one tenant, in characters of text: so much of its memory is held meanwhile."""
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Line:
    """What waits of one tenant: its turns and their costs, the next one first."""

    turns: OrderedDict[asyncio.Future[None], int] = field(default_factory=OrderedDict)
    cost: int = 0


class FairThreads:
    """Runs work in threads, one tenant after the other. Methods run on one event loop."""

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        max_waiting: int = MAX_WAITING,
        max_waiting_cost: int = MAX_WAITING_COST,
    ) -> None:
        """max_waiting, max_waiting_cost: of each tenant."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._max_waiting = max_waiting
        self._max_waiting_cost = max_waiting_cost
        self._num_free = num_threads
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        """Waiting work by tenant; the tenant whose turn is next comes first."""

    async def run(self, tenant: str, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, which is not begun when the caller is gone before its turn. cost: in characters of
        text. Raises RateLimited when too much of the tenant waits, and what `work` raises."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant, cost)
        running = self._executor.submit(work)
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: _tell(loop, self._pass_on))
        return await asyncio.wrap_future(running)

    async def _wait(self, tenant: str, cost: int) -> None:
        line = self._lines.get(tenant) or _Line()
        if len(line.turns) >= self._max_waiting or (line.turns and line.cost + cost > self._max_waiting_cost):
            raise RateLimited(
                f"{len(line.turns)} requests of this tenant wait for their text to be read already.",
                retry_after_s=RETRY_AFTER_S,
            )
        turn = asyncio.get_running_loop().create_future()
        self._lines[tenant] = line
        line.turns[turn] = cost
        line.cost += cost
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn came, and nobody takes it
            else:
                self._leave(tenant, turn)
            raise

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines[tenant]
        line.cost -= line.turns.pop(turn)
        if not line.turns:
            del self._lines[tenant]

    def _pass_on(self) -> None:
        """Give a free thread to the next tenant that has work."""
        for tenant, line in self._lines.items():
            turn = next((turn for turn in line.turns if not turn.done()), None)
            if turn is not None:
                self._leave(tenant, turn)
                if line.turns:
                    self._lines.move_to_end(tenant)
                turn.set_result(None)
                return
        self._num_free += 1


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more
