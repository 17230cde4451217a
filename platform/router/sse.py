"""An answer as server-sent events (WHATWG HTML, 9.2), in OpenAI's framing: `data: JSON` events, `data: [DONE]` at the end.

The response starts with the first token, not before: until then an error can still be a status. Invariant: chunks of one choice leave in
order; what ends the stream (last finish, usage, [DONE]) leaves in one piece, with the last text.
"""

import asyncio

from penstock.router.completion import Choice
from penstock.router.exchange import EVENT, EVENT_END, EVENTS, Exchange
from penstock.router.formats import Format
from penstock.router.headers import receipt_headers
from penstock.router.pieces import Piece
from penstock.wire.openai import Usage

DONE = EVENT + b"[DONE]" + EVENT_END
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventStream:
    """num_choices: how many will finish."""

    def __init__(self, exchange: Exchange, form: Format, num_choices: int) -> None:
        self._exchange = exchange
        self._form = form
        self._num_open = num_choices
        self._begun: set[int] = set()
        self._tail = b""
        self._has_started = False
        self._starting = asyncio.Lock()
        asked = form.asked
        self._sends_every_token = asked.has_token_ids or asked.has_logprobs

    async def emit(self, choice: Choice, piece: Piece) -> None:
        """Waits while the client is not reading."""
        events = self._events(choice.index, piece)
        is_last = self._num_open == 0  # now: others may finish while this one waits
        if not self._has_started:
            await self._start(choice)
        if is_last:
            self._tail = events
        elif events:
            await self._exchange.write(events)

    @property
    def is_ready(self) -> bool:
        return self._exchange.is_writable

    def emit_now(self, choice: Choice, piece: Piece) -> None:
        if piece.text or (self._sends_every_token and piece.token_ids):
            self._exchange.write_now(EVENT + self._form.chunk(choice.index, piece, False) + EVENT_END)

    async def end(self, usage: Usage) -> None:
        """After the last choice's finish."""
        if self._form.asked.has_usage_chunk:
            self._tail += EVENT + self._form.usage(usage) + EVENT_END
        await self._exchange.write(self._tail + DONE, is_last=True)

    def _events(self, index: int, piece: Piece) -> bytes:
        is_first = index not in self._begun
        events = b""
        if is_first or piece.text or (self._sends_every_token and piece.token_ids):
            self._begun.add(index)
            events = EVENT + self._form.chunk(index, piece, is_first) + EVENT_END
        if piece.finish is not None:
            self._num_open -= 1
            events += EVENT + self._form.end(index, piece.finish) + EVENT_END
        return events

    async def _start(self, choice: Choice) -> None:
        """Once; other choices wait until it is done."""
        async with self._starting:
            if not self._has_started:
                assert choice.receipt is not None
                await self._exchange.start(200, EVENTS, (*_HEADERS, *receipt_headers(choice.receipt)))
                self._has_started = True
