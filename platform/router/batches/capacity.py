"""What lines of batches may take of a gateway: so many at once, and a new one only while no request waits for a
busy replica. Batches take turns, a line each."""

import asyncio
from collections.abc import Callable

POLL_S = 0.02
"""How often the queue is looked at while it is not empty, seconds."""


class Capacity:
    """num_places: lines at once. has_room: whether another line may begin now."""

    def __init__(self, num_places: int, has_room: Callable[[], bool]) -> None:
        self._places = asyncio.Semaphore(num_places)
        self._has_room = has_room
        self._turn = asyncio.Lock()

    async def acquire(self) -> None:
        """Wait for a place; `release` must follow."""
        async with self._turn:
            await self._places.acquire()
            try:
                while not self._has_room():  # noqa: ASYNC110 (the queue has no event for it)
                    await asyncio.sleep(POLL_S)
            except BaseException:
                self._places.release()
                raise

    def release(self) -> None:
        self._places.release()
