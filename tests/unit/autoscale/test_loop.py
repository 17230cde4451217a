import asyncio
from typing import cast

from penstock.autoscale.loop import run
from penstock.autoscale.scaler import Scaler


class Failing:
    """A scaler whose first looks fail."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.has_succeeded = asyncio.Event()

    async def reconcile(self) -> None:
        self.num_looks += 1
        if self.num_looks < 3:
            raise RuntimeError("nobody foresaw this")
        self.has_succeeded.set()


def test_a_look_that_fails_is_not_the_last() -> None:
    async def go() -> int:
        scaler = Failing()
        task = asyncio.create_task(run(cast(Scaler, scaler), period_s=0.0))
        await asyncio.wait_for(scaler.has_succeeded.wait(), 5.0)
        task.cancel()
        await asyncio.wait([task])
        return scaler.num_looks

    assert asyncio.run(go()) >= 3
