"""Turns of connections to be read where many have something at once: a few in each iteration of the event loop.

Not the reading (`connection`). What is read becomes requests, each of which is some tenths of a millisecond of work; an
iteration that took them all would hold up the streams of everybody. So the others wait, those of each source in their
order, the sources taking turns: tenants, as far as connections have shown their keys, and addresses of clients that
have not. The two kinds alternate. Invariant: who may be read while nobody waits is read at once.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

MOST_AT_ONCE = 8
"""Connections that are read in one iteration."""

_Lane = deque[Callable[[], None]]


class ReadingTurns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._num_taken = 0
        """Connections read in this iteration, whose end is scheduled once there are any."""
        self._proven: OrderedDict[str, _Lane] = OrderedDict()
        self._unproven: OrderedDict[str, _Lane] = OrderedDict()

    def take(self) -> bool:
        """Whether a connection may be read now; else it must `wait`."""
        if self._num_taken >= MOST_AT_ONCE or self._proven or self._unproven:
            return False
        if not self._num_taken:
            self._schedule()
        self._num_taken += 1
        return True

    def wait(self, source: str, go_on: Callable[[], None], *, is_proven: bool) -> None:
        """Have `go_on` called when it is the source's turn. source: the tenant, or the address of one that is not
        known. Only after `take` has returned False."""
        self._lanes(is_proven=is_proven).setdefault(source, deque()).append(go_on)

    def _lanes(self, *, is_proven: bool) -> OrderedDict[str, _Lane]:
        return self._proven if is_proven else self._unproven

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._num_taken = 0
        try:
            while (self._proven or self._unproven) and self._num_taken < MOST_AT_ONCE:
                is_proven = bool(self._proven) and (self._num_taken % 2 == 0 or not self._unproven)
                self._num_taken += 1
                _next_of(self._lanes(is_proven=is_proven))()
        finally:
            if self._num_taken:
                self._schedule()


def _next_of(lanes: OrderedDict[str, _Lane]) -> Callable[[], None]:
    """The next one in turn; its source comes last then."""
    source, lane = lanes.popitem(last=False)
    go_on = lane.popleft()
    if lane:
        lanes[source] = lane
    return go_on
