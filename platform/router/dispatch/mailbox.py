"""The mailbox of one answer: frames of a replica, or events of a provider, fill it, and one reader empties it.

Bounded; wakes its reader, or passes plain deltas to a listener without waking anybody. Not a transport, and not the
state of the request: what a delta, a loss or a failure means for it is the owner's decision (the dispatcher's).
Invariants: `delivered` is exactly what the reader and the listener have been given; after `close` nothing comes out.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.base.errors import PenstockError
from penstock.router.dispatch.state import RequestState
from penstock.router.routing.deltas import merge_deltas
from penstock.router.routing.request import Receipt, TextDelta
from penstock.router.routing.spending import NOWHERE, Spending
from penstock.wire.accounts import PlacePrices
from penstock.wire.errors import EngineFault
from penstock.wire.frames import Delta, Finish

log = logging.getLogger("penstock.stream")


class MailboxOwner(Protocol):
    """The keeper of the state of the request whose answer a mailbox takes."""

    def on_delta(self, mailbox: "Mailbox", delta: Delta) -> Delta | None:
        """The reader takes `delta`. Returns the delta that it gets, or None if this was only the end of an attempt."""

    def on_end(self, mailbox: "Mailbox", finish: Finish) -> None:
        """The last delta of an attempt has come; the reader takes it later."""

    def on_lost(self, mailbox: "Mailbox", *, is_planned: bool) -> None:
        """The link to the replica is gone. is_planned: the replica was leaving."""

    def on_refused(self, mailbox: "Mailbox", error: PenstockError) -> None:
        """The provider gives no answer; another route may."""

    def on_broken(self, mailbox: "Mailbox", error: PenstockError) -> None:
        """The provider's answer ends in the middle."""

    def on_overflow(self, mailbox: "Mailbox") -> None:
        """The reader is too slow: more deltas wait for it than are allowed."""

    def on_closed(self, mailbox: "Mailbox") -> None:
        """The reader wants no more."""

    def fail(self, mailbox: "Mailbox", error: PenstockError) -> None:
        """End the answer with an error, behind what has come."""

    async def resume(self, mailbox: "Mailbox") -> None:
        """Find another carrier for the rest of the answer, waiting for one if need be."""


class Mailbox:
    """The `penstock.router.routing.request.Stream` of a request. One reader; `close` not while a `next` is awaited."""

    __slots__ = (
        "__weakref__",
        "_deltas",
        "_listener",
        "_max_buffered_deltas",
        "_owner",
        "_waiter",
        "delivered",
        "is_closed",
        "spending",
        "state",
    )

    def __init__(self, state: RequestState, owner: MailboxOwner, max_buffered_deltas: int) -> None:
        self.state = state
        self.delivered: list[int] = []
        """Token ids that the reader and the listener have been given."""
        self.is_closed = False
        self.spending = Spending(NOWHERE, is_settled=True)
        """What the latest attempt costs."""
        self._owner = owner
        self._max_buffered_deltas = max_buffered_deltas
        self._deltas: list[Delta] = []
        """What has come and waits for the reader."""
        self._listener: Callable[[Delta], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def receipt(self) -> Receipt:
        return self.state.receipt

    @property
    def num_delivered_tokens(self) -> int:
        """Output tokens of all attempts that the reader and the listener have been given, as ids or as text."""
        return len(self.delivered) + self.state.num_text_tokens + self.state.num_beam_tokens

    @property
    def num_received_tokens(self) -> int:
        """Output tokens of all attempts that have come, those included that wait for the reader."""
        num_beam_tokens = max((delta.num_beam_tokens for delta in self._deltas), default=0)
        num_waiting = _count_tokens(self._deltas) + max(0, num_beam_tokens - self.state.num_beam_tokens)
        return self.num_delivered_tokens + num_waiting

    @property
    def num_computed_tokens(self) -> int:
        """Output tokens of the latest attempt that have come."""
        return self.num_received_tokens - len(self.state.output)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens of the latest attempt that were in the replica's cache; None while that is not known."""
        state = self.state
        if state.has_begun:
            return self.receipt.cached_tokens if not state.output else None
        return self._deltas[0].num_cached_tokens if self._deltas else None

    def push(self, delta: Delta) -> None:
        self.spending.step_s = delta.step_s
        if self._listener is not None and not self._deltas and delta.finish is None and delta.num_cached_tokens is None:
            try:
                is_taken = self._listener(delta)
            except Exception as error:
                # the top for one answer: `push` was called by the link, which carries the replica's other answers too
                log.error("listener failed", extra={"request_id": self.receipt.request_id}, exc_info=error)
                self._listener = None
                self._owner.fail(self, EngineFault("the answer could not be passed on"))
                return
            if is_taken:
                self.delivered += delta.token_ids
                return
        self._deltas.append(delta)
        if delta.finish is not None:
            self.spending.is_settled = True
            self._owner.on_end(self, delta.finish)
        waiter = self._waiter
        if waiter is not None:
            if not waiter.done():
                waiter.set_result(None)
        elif len(self._deltas) > self._max_buffered_deltas:
            self._owner.on_overflow(self)

    def begin_spending(self, prices: PlacePrices) -> None:
        """Begin to count what another attempt costs, at these prices."""
        self.spending = Spending(prices)
        self.receipt.spendings.append(self.spending)

    def lose(self, *, is_planned: bool = False) -> None:
        self.spending.settle()
        self._owner.on_lost(self, is_planned=is_planned)
        self.wake()

    def refuse(self, error: PenstockError) -> None:
        self._owner.on_refused(self, error)
        self.wake()

    def break_off(self, error: PenstockError) -> None:
        self._owner.on_broken(self, error)

    async def next(self) -> Delta:
        state = self.state
        while True:
            if self.is_closed or state.is_finished:
                raise RuntimeError("next() after the end of the stream")
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                merged = deltas[0] if len(deltas) == 1 else merge_deltas(deltas)
                self.delivered += merged.token_ids
                delta = self._owner.on_delta(self, merged)
                if delta is not None:
                    return delta
            elif state.error is not None:
                raise state.error
            elif state.carrier is None:
                await self._owner.resume(self)
            else:
                await self._wait()

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        if not self.state.is_text:  # a listener takes token ids
            self._listener = listener

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._listener = None
        self._owner.on_closed(self)  # what was computed counts, read or not
        self._deltas.clear()
        self.wake()

    def wake(self) -> None:
        """Wake the reader, if it waits: the state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _count_tokens(deltas: Sequence[Delta]) -> int:
    """Output tokens in the deltas, those of searches left out."""
    return sum([_count_tokens_of(delta) for delta in deltas])


def _count_tokens_of(delta: Delta) -> int:
    return delta.num_tokens if isinstance(delta, TextDelta) else len(delta.token_ids)
