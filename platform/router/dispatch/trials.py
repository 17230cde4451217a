"""One at a time, requests are tried again that were on a lost replica and had no token from it.

Any of them may be why it was lost, and those that go to another replica together may be lost with it together: nothing
would tell them apart (`quarantine`). So the next one goes when the one before has its first token, is over, or has lost
its replica too. None waits longer than TURN_S, however many there are and whatever holds them up. A gateway knows its
own requests only.
"""

import asyncio
from contextlib import suppress

from penstock.router.dispatch.quarantine import LossRecord

TURN_S = 2.0
"""Longest wait for the ones before, seconds: what a loss may add to the time to the first token."""


class Trials:
    """The turn of such requests, in the order in which they ask for it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._on_trial: LossRecord | None = None

    async def await_turn(self, record: LossRecord, timeout_s: float) -> None:
        """Returns when it is the request's turn, or after timeout_s, TURN_S at most; `end` must follow."""
        if self._on_trial is record:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, TURN_S)):
                await self._turn.acquire()
                self._on_trial = record

    def end(self, record: LossRecord) -> None:
        """The request is not on trial any more, if it was."""
        if self._on_trial is record:
            self._on_trial = None
            self._turn.release()
