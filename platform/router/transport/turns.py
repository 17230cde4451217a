"""Turns of connections to be opened, or read, where many come at once: a few in each iteration of the event loop.

Not the opening (`acceptor`), not the reading (`connection`). What is read becomes requests, each of which is some
tenths of a millisecond of work; an iteration that took them all would hold up the streams of everybody. So the others
wait, those of each source in their order, the sources taking turns: tenants, as far as connections have shown their
keys, else the addresses of the peers. Tenants, and addresses that have shown a key lately, are known; they alternate
with the others. Invariant: where nobody waits, the next one need not.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

_Lane = deque[Callable[[], None]]


class Turns:
    """The turns of one event loop. most_at_once: in one iteration."""

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._num_taken = 0
        """Connections that had their turn in this iteration, whose end is scheduled once there are any."""
        self._known: OrderedDict[str, _Lane] = OrderedDict()
        self._unknown: OrderedDict[str, _Lane] = OrderedDict()

    def take(self) -> bool:
        """Whether it is a connection's turn now; else it must `wait`."""
        if self._num_taken >= self._most_at_once or self._known or self._unknown:
            return False
        if not self._num_taken:
            self._schedule()
        self._num_taken += 1
        return True

    def wait(self, source: str, go_on: Callable[[], None], *, is_known: bool) -> None:
        """Have `go_on` called when it is the source's turn. source: the tenant, or the peer's address. Only after
        `take` has returned False."""
        self._lanes(is_known=is_known).setdefault(source, deque()).append(go_on)

    def _lanes(self, *, is_known: bool) -> OrderedDict[str, _Lane]:
        return self._known if is_known else self._unknown

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._num_taken = 0
        try:
            while (self._known or self._unknown) and self._num_taken < self._most_at_once:
                is_known = bool(self._known) and (self._num_taken % 2 == 0 or not self._unknown)
                self._num_taken += 1
                _next_of(self._lanes(is_known=is_known))()
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
