"""An answer as the events of another API: named ones, each with its own JSON (WHATWG HTML, 9.2).

The response starts with the first token, not before: until then an error can still be a status; where the request waits
for a first replica, it starts with the first heartbeat. Invariant: what ends
the stream leaves in one piece, with the last text. The one choice of the answer is the only one.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.router.completions.completion import Choice, DeltaListener, usage_of
from penstock.router.completions.formats import WholeFormat
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.transport.exchange import EVENTS, Exchange
from penstock.router.transport.headers import Headers, receipt_headers
from penstock.wire.frames import Delta
from penstock.wire.openai import Usage

_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_encode = msgspec.json.Encoder().encode


def named_event(name: str, data: object) -> bytes:
    """One event, as it is sent."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


class EventFormat(WholeFormat, Protocol):
    """The events of one answer, as they are sent; called in their order."""

    def begin(self, usage: Usage) -> bytes:
        """The first events. usage: of the prompt."""

    def piece(self, piece: TextPiece) -> bytes:
        """Events for a piece; a finish is kept for `end`."""

    def text(self, text: str) -> bytes:
        """Events for a text without anything else."""

    def end(self, usage: Usage) -> bytes:
        """The last events, once the choice has finished."""

    def failure(self, error: BaseException, request_id: str) -> bytes:
        """The last event of an answer that has failed."""


class NamedEventStream:
    """Emitter of an answer that leaves as named events. num_choices: 1."""

    def __init__(self, exchange: Exchange, answer_format: EventFormat, num_choices: int) -> None:
        assert num_choices == 1
        self._exchange = exchange
        self._format = answer_format
        self._tail = b""
        self._has_begun = False
        self._is_open = False
        self._opening = asyncio.Lock()

    async def begin(self, choice: Choice) -> None:
        """Nothing: these APIs show nothing of a prompt."""

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        """Waits while the client is not reading."""
        events = b""
        if not self._has_begun:
            events = await self._start(choice)
        events += self._format.piece(piece)
        if piece.finish is not None:
            self._tail = events
        elif events:
            await self._exchange.write(events)

    def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
        """The fast path of texts."""
        if not choice.assembler.is_plain:
            return None
        exchange, text_of, events_of = self._exchange, choice.assembler.text, self._format.text

        def take(delta: Delta) -> bool:
            if not exchange.is_writable:
                return False
            text = text_of(delta.token_ids)
            choice.num_tokens += len(delta.token_ids)
            choice.last_token_s = clock()
            if text:
                exchange.write_now(events_of(text))
            return True

        return take

    async def end(self, usage: Usage) -> None:
        """Send the end of the stream, once the choice has finished."""
        await self._exchange.write(self._tail + self._format.end(usage), is_last=True)

    async def _start(self, choice: Choice) -> bytes:
        """Start the response. Returns the first events."""
        assert choice.receipt is not None
        self._has_begun = True
        self._format.set_answering_model(choice.receipt)
        await self._open(receipt_headers(choice.receipt))
        return self._format.begin(usage_of(choice))

    async def open(self) -> None:
        """Start the response, if it has not started, without the headers that say who answers."""
        await self._open(())

    async def _open(self, headers: Headers) -> None:
        exchange = self._exchange
        async with self._opening:
            if not self._is_open:
                exchange.error_form = exchange.error_form._replace(event=self._format.failure)
                await exchange.start(200, EVENTS, (*_HEADERS, *headers))
                self._is_open = True
