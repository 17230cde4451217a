"""One request under way: hears the response and fills the record. Whatever the server does ends in a record, once.

Tokens of a chunk are its token ids, where the server sends them; else a chunk with text is one token until the usage says better, and then the
usage's tokens are spread evenly over the chunks.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from penstock_loadtest.bodies import error_of
from penstock_loadtest.connection import Connection, Headers
from penstock_loadtest.records import Outcome, Record
from penstock_loadtest.sse import EventParser, EventTooLong

MAX_BODY_BYTES = 32 << 20
SHED = (429, 503)
NO_DONE = "no [DONE]"
TWO_ENDS = "two ends"
BEHIND_THE_END = "tokens behind the end"
BEHIND_DONE = "data behind [DONE]"
NO_USAGE = "no usage though asked for"
TWO_USAGES = "two usages that differ"
BROKEN_OFF = "broken off"
NOT_JSON = "an event that is not a chunk's JSON"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Exchange:
    """Listens to one response (`penstock_loadtest.connection.Listener`). `done` is set when the record is complete."""

    def __init__(self, record: Record, zero_s: float, *, stream: bool, wants_usage: bool, keeps_text: bool) -> None:
        """record: filled in place; its times are `time.perf_counter` minus zero_s."""
        self.record = record
        self.connection: Connection | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_unheard = False
        """The connection ended before a byte of the response."""
        self.error_body = b""
        self._zero_s = zero_s
        self._is_stream = stream
        self._wants_usage = wants_usage
        self._keeps_text = keeps_text
        self._events = EventParser()
        self._ids = array("q")
        self._has_ids = False
        self._text: list[str] = []
        self._text_digest = blake2b(digest_size=16)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._usage: _Usage | None = None
        self._is_done = self._has_failed = False
        self._feed: Callable[[bytes, float], None] = self._whole

    @property
    def text(self) -> str:
        """The answer, where it is kept."""
        return "".join(self._text)

    def at(self, now: float) -> float:
        return round(now - self._zero_s, 6)

    def reset(self) -> None:
        """As before it was sent; only of one that is unheard."""
        record = self.record
        record.outcome, record.error, record.end_s = "unfinished", None, None
        self.is_unheard = False
        self.done = asyncio.get_running_loop().create_future()

    # what the connection says

    def on_head(self, status: int, headers: Headers) -> None:
        record = self.record
        record.status = status
        get = headers.get
        record.request_id = get("x-penstock-request-id") or get("x-request-id")
        record.tier, record.tier_reason, record.replica = get("x-penstock-tier"), get("x-penstock-tier-reason"), get("x-penstock-replica")
        record.predicted_ttft_s = _number(get("x-penstock-predicted-ttft-ms"), 1e-3)
        cached = _number(get("x-penstock-cached-tokens"))
        record.cached_tokens = None if cached is None else int(cached)
        if status == 200 and self._is_stream and get("content-type", "").startswith("text/event-stream"):
            self._feed = self._stream

    def on_body(self, data: bytes, at: float) -> None:
        self._feed(data, at)

    def on_end(self, at: float) -> None:
        record = self.record
        record.end_s = self.at(at)
        if record.status != 200:
            self._decline(b"".join(self._body))
        elif self._feed == self._stream:
            self._end_of_stream()
        else:
            self._end_of_whole(at)
        self._conclude()

    def on_broken(self, reason: str, at: float, is_unheard: bool) -> None:
        self.is_unheard = is_unheard
        if self.record.status == 200:
            self._violate(BROKEN_OFF)
        self._stop("failed", f"{reason} before the answer's end", at)

    # what ends it from our side

    def hang_up(self) -> None:
        """As planned."""
        self._stop("cancelled", None)

    def expire(self) -> None:
        self._stop("unfinished", "its timeout passed")

    def cut(self) -> None:
        """The run ends."""
        self.record.is_cut = True
        self._stop("unfinished", "the run ended")

    def fail(self, reason: str) -> None:
        self._stop("failed", reason)

    def _stop(self, outcome: Outcome, error: str | None, at: float | None = None) -> None:
        if self.done.done():
            return
        record = self.record
        record.outcome, record.error = outcome, error
        record.end_s = self.at(time.perf_counter() if at is None else at)
        if self.connection is not None:
            self.connection.close()
        self._conclude()

    # streams

    def _stream(self, data: bytes, at: float) -> None:
        try:
            events = self._events.feed(data)
        except EventTooLong as error:
            self._stop("failed", str(error), at)
            return
        for event in events:
            self._event(event, at)

    def _event(self, event: bytes, at: float) -> None:
        if self._is_done:
            self._violate(BEHIND_DONE)
            return
        if event == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._violate(NOT_JSON)
            return
        if chunk.error is not None:
            self._error_event(event)
        for choice in chunk.choices:
            self._choice(choice, at)
        if chunk.usage is not None:
            self._meter(chunk.usage)

    def _choice(self, choice: _Choice, at: float) -> None:
        record = self.record
        text = choice.text if choice.text is not None else choice.delta.text if choice.delta is not None else ""
        ids = choice.token_ids
        if ids is not None:
            self._has_ids = True
            self._ids.extend(ids)
        count = len(ids) if ids is not None else bool(text)
        if text:
            self._take(text)
        if count:
            if record.finish_reason is not None:
                self._violate(BEHIND_THE_END)
            now_s = round(at - self._zero_s, 6)
            if record.first_s is None and self._is_stream:
                record.first_s = now_s
            record.chunk_s.append(now_s)
            record.chunk_tokens.append(count)
        if choice.finish_reason is not None:
            if record.finish_reason is not None or self._has_failed:
                self._violate(TWO_ENDS)
            record.finish_reason = choice.finish_reason

    def _error_event(self, event: bytes) -> None:
        if self._has_failed or self.record.finish_reason is not None:
            self._violate(TWO_ENDS)
        self._has_failed = True
        self.record.error = f"the stream ended with an error: {error_of(event)[0]}"

    def _end_of_stream(self) -> None:
        record = self.record
        if self._has_failed:
            record.outcome = "failed"
            return
        if not self._is_done:
            self._violate(NO_DONE)
        if record.finish_reason is None:
            record.outcome, record.error = "failed", "the stream ended without a finish_reason"
            return
        if self._usage is None and self._wants_usage:
            self._violate(NO_USAGE)
        record.outcome = "finished"

    # whole answers

    def _whole(self, data: bytes, at: float) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > MAX_BODY_BYTES:
            self._stop("failed", f"the answer is longer than {MAX_BODY_BYTES} bytes", at)

    def _end_of_whole(self, at: float) -> None:
        record = self.record
        try:
            chunk = _decode(b"".join(self._body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            record.outcome, record.error = "failed", "the answer is not an answer's JSON"
            return
        for choice in chunk.choices:
            self._choice(_Choice(choice.message, None, choice.text, choice.token_ids, choice.finish_reason), at)
        if chunk.usage is not None:
            self._meter(chunk.usage)
        if record.finish_reason is None:
            record.outcome, record.error = "failed", "the answer has no finish_reason"
        else:
            record.outcome = "finished"

    def _decline(self, body: bytes) -> None:
        record = self.record
        self.error_body = body
        record.outcome = "shed" if record.status in SHED else "failed"
        record.error = f"HTTP {record.status} {error_of(body)[0]}".rstrip()

    # both

    def _take(self, text: str) -> None:
        self._text_digest.update(text.encode("utf-8", "surrogatepass"))
        if self._keeps_text:
            self._text.append(text)

    def _meter(self, usage: _Usage) -> None:
        before, self._usage = self._usage, usage
        if before is not None and self.record.finish_reason is not None and before.completion_tokens > usage.completion_tokens:
            self._violate(TWO_USAGES)

    def _violate(self, what: str) -> None:
        if what not in self.record.violations:
            self.record.violations.append(what)

    def _conclude(self) -> None:
        """Tokens and digest, from all that has come."""
        record, usage = self.record, self._usage
        if usage is not None:
            record.prompt_tokens, record.metered_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if self._has_ids:
            record.tokens_from = "ids"
        elif usage is not None:
            record.tokens_from = "usage"
            record.chunk_tokens = spread(usage.completion_tokens, len(record.chunk_s))
        record.tokens = usage.completion_tokens if record.tokens_from == "usage" and usage is not None else sum(record.chunk_tokens)
        if record.tokens:
            record.answer_digest = blake2b(self._ids.tobytes(), digest_size=16).hexdigest() if self._has_ids else self._text_digest.hexdigest()
        if not self.done.done():
            self.done.set_result(None)


def spread(tokens: int, chunks: int) -> list[int]:
    """Tokens over chunks as evenly as whole numbers go."""
    return [(index + 1) * tokens // chunks - index * tokens // chunks for index in range(chunks)]


def _number(value: str | None, scale: float = 1.0) -> float | None:
    """A header's number; None where there is none."""
    try:
        return None if value is None else float(value) * scale
    except ValueError:
        return None
