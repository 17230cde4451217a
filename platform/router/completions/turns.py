"""Work on the event loop that takes longer than a millisecond: in steps, between which others get their turn.

So large bodies are decoded, and long answers encoded. Not threads (`fair_threads`): decoder and encoder hold the
interpreter's lock all the time.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.wire.bodies import MAX_UNCOUNTED_BYTES, count_values

T = TypeVar("T")

TURN_S = 0.001
"""Time for which a body is looked at, or an answer encoded, before others get their turn."""


async def in_turns(steps: Iterable[T], clock: Callable[[], float]) -> list[T]:
    """What the steps yield, with a pause for others about every millisecond. clock: seconds."""
    done: list[T] = []
    paused_s = clock()
    for each in steps:
        done.append(each)
        if clock() - paused_s > TURN_S:
            await asyncio.sleep(0)
            paused_s = clock()
    return done


class BodyDecoder:
    """Decodes bodies, of each tenant one large one at a time. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """Held while a large body of the tenant is decoded."""

    async def decode(self, tenant: str, body: bytes, decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the body, whose values are counted before. Raises InvalidRequest, and what it
        raises."""
        if len(body) <= MAX_UNCOUNTED_BYTES:
            return decode(body)
        async with self._locks.setdefault(tenant, asyncio.Lock()):
            await in_turns(count_values(body), self._clock)
            decoded = decode(body)
            await asyncio.sleep(0)  # this took up to ten milliseconds; the tenant's next one comes later
            return decoded
