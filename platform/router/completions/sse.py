"""An answer as server-sent events (WHATWG HTML, 9.2), in OpenAI's framing: `data: JSON` events, `data: [DONE]` at the
end.

The response starts with the first token, not before: until then an error can still be a status. A request that waits
for a first replica is the exception (`heartbeats`): its headers leave out what is not known. Invariant: chunks of
one choice leave in order; what ends the stream (last finish, usage, [DONE]) leaves in one piece, with the last text.
"""

import asyncio
from collections.abc import Callable

from penstock.router.completions.completion import Choice, DeltaListener, usage_of
from penstock.router.completions.formats import NO_USAGE, Format, encode_text, encode_usage
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.transport.exchange import EVENT, EVENT_END, EVENTS, PART, Exchange
from penstock.router.transport.headers import receipt_headers
from penstock.text.json_parts import JsonParts
from penstock.wire.frames import Delta
from penstock.wire.openai import Usage

DONE = EVENT + b"[DONE]" + EVENT_END
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventStream:
    """Emitter of an answer that leaves as events. num_choices: choices of all prompts, each of which will finish."""

    def __init__(self, exchange: Exchange, answer_format: Format, num_choices: int) -> None:
        self._exchange = exchange
        self._format = answer_format
        self._num_open = num_choices
        self._begun: set[int] = set()
        self._tail = b""
        self._has_started = False
        self._starting = asyncio.Lock()
        meta = answer_format.meta
        self._sends_every_token = meta.has_token_ids or meta.has_logprobs
        self._has_usage = meta.has_continuous_usage

    async def begin(self, choice: Choice) -> None:
        """Send what is shown of the prompt, part by part."""
        assert choice.echo is not None
        assert choice.receipt is not None
        if not self._begun:
            self._format.set_answering_model(choice.receipt)
        if not self._has_started:
            await self._start(choice)
        for piece in choice.echo.pieces():
            is_first = choice.index not in self._begun
            self._begun.add(choice.index)
            chunk = self._format.prompt_chunk(choice.index, piece, is_first)
            await self._exchange.write(self._event(choice, chunk))
            await asyncio.sleep(0)  # a long prompt has thousands

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        """Waits while the client is not reading."""
        if not self._begun:
            assert choice.receipt is not None
            self._format.set_answering_model(choice.receipt)
        events = self._events(choice, piece)
        is_last = self._num_open == 0  # now: others may finish while this one waits
        if not self._has_started:
            await self._start(choice)
        if is_last:
            self._tail = events
        elif events:
            await self._exchange.write(events)

    def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
        """The fast path of chunks with text and nothing else; most of a gateway's time is spent in here."""
        if self._sends_every_token or self._has_usage or not choice.assembler.is_plain:
            return None
        return _TextListener(self._exchange, choice, self._format.around_text(choice.index), clock).take

    async def end(self, usage: Usage) -> None:
        """Send the end of the stream, once every choice has finished."""
        if self._format.meta.has_usage_chunk:
            self._tail += EVENT + self._format.usage(usage) + EVENT_END
        await self._exchange.write(self._tail + DONE, is_last=True)

    def _events(self, choice: Choice, piece: TextPiece) -> bytes:
        index = choice.index
        is_first = index not in self._begun
        events = b""
        if is_first or piece.text or piece.calls or piece.reasoning or (self._sends_every_token and piece.token_ids):
            self._begun.add(index)
            events = self._event(choice, self._format.chunk(index, piece, is_first))
        if piece.finish is not None:
            self._num_open -= 1
            events += self._event(choice, self._format.end(index, piece.finish))
        return events

    def _event(self, choice: Choice, chunk: bytes) -> bytes:
        """A chunk as an event, with what its choice has used so far where that is wanted."""
        if self._has_usage:
            chunk = chunk.removesuffix(NO_USAGE) + encode_usage(usage_of(choice))
        return EVENT + chunk + EVENT_END

    async def _start(self, choice: Choice) -> None:
        """Start the response, once; other choices wait until that is done."""
        async with self._starting:
            if not self._has_started:
                assert choice.receipt is not None
                await self._exchange.start(200, EVENTS, (*_HEADERS, *receipt_headers(choice.receipt)))
                self._has_started = True

    async def open(self) -> None:
        """Start the response, if it has not started, without the headers that say who answers."""
        async with self._starting:
            if not self._has_started:
                await self._exchange.start(200, EVENTS, _HEADERS)
                self._has_started = True


class _TextListener:
    """The listener of one choice whose chunks are text.

    What a token touches is in no cache of the processor: as many objects of every other stream were touched since the
    last one. So it asks nobody: the text is looked up, and the connection tells when it has to be asked again.
    """

    __slots__ = (
        "_around",
        "_assembler",
        "_before",
        "_behind",
        "_choice",
        "_clock",
        "_exchange",
        "_json_parts",
        "_num_around",
        "_write",
    )

    def __init__(
        self, exchange: Exchange, choice: Choice, around: tuple[bytes, bytes], clock: Callable[[], float]
    ) -> None:
        """Make a listener of one choice. around: JSON before and behind the text of a chunk."""
        self._exchange = exchange
        self._assembler = choice.assembler
        self._choice = choice
        self._clock = clock
        self._around = EVENT + around[0], around[1] + EVENT_END
        self._before, self._behind = self._around[0] + b'"', b'"' + self._around[1]
        self._num_around = len(self._before) + len(self._behind)
        self._write: Callable[[bytes], None] | None = None
        """Writes a framed part; None: the exchange must be asked."""
        self._json_parts: JsonParts
        """The looked up texts, where `_write` is there."""

    def take(self, delta: Delta) -> bool:
        write = self._write
        if write is None:
            return self._take_asking(delta)
        token_ids = delta.token_ids
        part = self._json_parts.made[token_ids[0]] if len(token_ids) == 1 else None
        if part is None:
            part = self._json_parts.join(token_ids)
            if part is None:
                return self._take_asking(delta)
        if part:
            write(PART % (self._num_around + len(part), self._before, part, self._behind))
        choice = self._choice
        choice.num_tokens += len(token_ids)
        choice.last_token_s = self._clock()
        return True

    def _take_asking(self, delta: Delta) -> bool:
        exchange, choice = self._exchange, self._choice
        self._close()
        if not exchange.is_writable:
            return False
        text = self._assembler.text(delta.token_ids)
        choice.num_tokens += len(delta.token_ids)
        choice.last_token_s = self._clock()
        if text:
            before, behind = self._around
            exchange.write_now(before + encode_text(text) + behind)
        json_parts = self._assembler.json_parts()
        if json_parts is not None:
            self._json_parts = json_parts
            self._write = exchange.open_parts(self._close)
        return True

    def _close(self) -> None:
        self._write = None
