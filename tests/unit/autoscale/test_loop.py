import asyncio
from typing import cast

from penstock.autoscale.loop import run
from penstock.autoscale.scaler import Scaler


class Failing:
    """A scaler whose first turns fail."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.has_succeeded = asyncio.Event()

    async def reconcile(self) -> None:
        self.num_turns += 1
        if self.num_turns < 3:
            raise RuntimeError("nobody foresaw this")
        self.has_succeeded.set()


async def test_a_turn_that_fails_is_not_the_last() -> None:
    scaler = Failing()
    task = asyncio.create_task(run(cast(Scaler, scaler), period_s=0.0))
    await asyncio.wait_for(scaler.has_succeeded.wait(), 5.0)
    task.cancel()
    await asyncio.wait([task])

    assert scaler.num_turns >= 3
