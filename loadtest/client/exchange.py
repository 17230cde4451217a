"""One request under way: receives the response and fills the record. Whatever the server does ends in a record, once.

Tokens of a chunk are its token ids, where the server sends them with all text; else a chunk with text is one token
until the usage gives their number, and then the usage's tokens are spread over the chunks. No text of a server gets
into a record, its errors' sentences included.
"""

import asyncio
import math
import time
from array import array
from hashlib import blake2b

from penstock_loadtest.client.bodies import describe_error
from penstock_loadtest.client.chunks import Choice, Usage, read_chunk, spread_tokens
from penstock_loadtest.client.connection import Connection, Headers
from penstock_loadtest.client.sse import EventParser, EventTooLong
from penstock_loadtest.results.records import Outcome, Record

MAX_BODY_BYTES = 32 << 20
MAX_ERROR_BYTES = 64 << 10
SHED = (429, 503)
NO_DONE = "no [DONE]"
NO_FINISH = "no finish_reason"
TWO_ENDS = "two ends"
BEHIND_THE_END = "tokens behind the end"
BEHIND_DONE = "data behind [DONE]"
NO_USAGE = "no usage though asked for"
TWO_USAGES = "two usages that differ"
BROKEN_OFF = "broken off"
NO_CHUNK = "an event that is no chunk"
NO_STREAM = "a whole answer though a stream was asked for"
MAX_HEADER_CHARS = 128
"""Most characters that a record keeps of one of the server's headers."""
STALE_S = 0.005
"""A kept connection that the server had closed before the request came breaks within a round trip, and so much for the
tester's own delays."""


class Exchange:
    """Listens to one response (`penstock_loadtest.client.connection.Listener`)."""

    def __init__(self, record: Record, zero_s: float, *, stream: bool, wants_usage: bool, keeps_text: bool) -> None:
        """record: filled in place; its times are `time.perf_counter` minus zero_s."""
        self.record = record
        self.is_over = False
        """The record is complete."""
        self.is_cut = False
        """Nothing more is to be sent, whether it was over or not."""
        self.is_unanswered = False
        """The connection, which was a kept one, ended before a byte of the response: not over, may be started once
        more."""
        self.error_body = b""
        self._zero_s = zero_s
        self._wants_usage = wants_usage
        self._keeps_text = keeps_text
        self._connection: Connection | None = None
        self._stale_until = 0.0
        """`time.perf_counter` before which a break is that of a kept connection which the server had closed already."""
        self._wake: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._feed = EventParser().feed
        self._ids = array("q")
        self._has_ids = False
        self._texts: list[str] = []
        """Text that was generated and came without token ids."""
        self._answers: list[str] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._usage: Usage | None = None
        self._has_ended = self._has_failed = self._is_done = False
        """Whether the stream has brought a finish_reason or an error; an error; [DONE]."""
        self._is_final_usage = self._is_sse = False
        self._asks_stream = stream

    @property
    def text(self) -> str:
        """The answer, where it is kept; without what the model thought."""
        return "".join(self._answers)

    # calls of the sender

    def expire_in(self, seconds: float) -> None:
        self._timers.append(
            asyncio.get_running_loop().call_later(max(0.0, seconds), self._stop, "unfinished", "its timeout passed")
        )

    def hang_up_in(self, seconds: float) -> None:
        """Hang up after so many seconds, as the plan wants it."""
        self._timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), self._stop, "cancelled", None))

    async def send_over(self, connection: Connection, data: bytes, *, is_kept: bool) -> None:
        """Send, and return at the end of the exchange, or when it `is_unanswered`. is_kept: the connection carried
        other requests before."""
        self._connection, self.is_unanswered = connection, False
        self._wake = asyncio.get_running_loop().create_future()
        now = time.perf_counter()
        self._stale_until = now + 2 * connection.round_trip_s + STALE_S if is_kept else 0.0
        self.mark_sent(now)
        connection.request(data, self)
        await self._wake

    def mark_sent(self, now: float) -> None:
        """Note the time at which the request is given to the socket, or before that to a connection that is made for
        it. Only the first call counts."""
        if self.record.sent_s is None:
            self.record.sent_s = self._at(now)

    def cut(self) -> None:
        """End the request because the run ends."""
        self.is_cut = True
        if not self.is_over:
            self.record.is_cut = True
            self._stop("unfinished", "the run ended")

    def fail(self, reason: str) -> None:
        self._stop("failed", reason)

    # calls of the connection

    def on_head(self, status: int, headers: Headers) -> None:
        record = self.record
        record.status = status
        get = headers.get
        record.request_id = _trim_header(get("x-penstock-request-id") or get("x-request-id"))
        record.tier, record.tier_reason = (
            _trim_header(get("x-penstock-tier")),
            _trim_header(get("x-penstock-tier-reason")),
        )
        record.replica = _trim_header(get("x-penstock-replica"))
        record.predicted_ttft_s = _parse_number(get("x-penstock-predicted-ttft-ms"), 1e-3)
        cached = _parse_number(get("x-penstock-cached-tokens"))
        record.cached_tokens = None if cached is None else int(cached)
        if status == 200 and self._asks_stream:
            kind = get("content-type", "").lower()
            self._is_sse = not kind or kind.startswith(("text/event-stream", "text/plain"))

    def on_body(self, data: bytes, at: float) -> None:
        if not self._is_sse:
            self._add_body(data, at)
            return
        try:
            events = self._feed(data)
        except EventTooLong as error:
            self._stop("failed", str(error), at)
            return
        now_s = self._at(at)
        for event in events:
            self._read_event(event, now_s)

    def on_end(self, at: float) -> None:
        self.record.end_s = self._at(at)
        if self.record.status != 200:
            self._decline()
        elif self._is_sse:
            self._end_stream()
        else:
            self._end_whole(at)
        self._conclude()

    def on_broken(self, reason: str, at: float, is_unanswered: bool) -> None:
        record = self.record
        if is_unanswered and at < self._stale_until:
            self.is_unanswered = True
            self._resume()
        elif self._has_failed:
            self._stop("failed", None, at)
        elif record.status is not None and record.status != 200:
            self._decline()
            self._stop(record.outcome, record.error, at)
        else:
            if record.status is not None:
                self._note_violation(BROKEN_OFF)
            is_whole = self._is_done and record.finish_reason is not None
            self._stop(
                "finished" if is_whole else "failed", None if is_whole else f"{reason} before the answer's end", at
            )

    def _stop(self, outcome: Outcome, error: str | None, at: float | None = None) -> None:
        if self.is_over:
            return
        record = self.record
        if self._has_failed:  # whatever came then, the server had named the cause
            outcome, error = "failed", record.error
        record.outcome, record.error = outcome, error
        record.end_s = self._at(time.perf_counter() if at is None else at)
        if self._connection is not None:
            self._connection.close()
        self._conclude()

    # streams

    def _read_event(self, event: bytes, now_s: float) -> None:
        if event == b"[DONE]" or self._is_done:
            if self._is_done:
                self._note_violation(BEHIND_DONE)
            self._is_done = True
            return
        chunk = read_chunk(event)
        if chunk is None:
            self._note_violation(NO_CHUNK)
            return
        if chunk.choices:
            for choice in chunk.choices:
                self._add_choice(choice, now_s)
        if chunk.is_error:
            self._read_error(event)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)

    def _add_choice(self, choice: Choice, now_s: float) -> None:
        ids = choice.token_ids
        if ids is not None:
            self._has_ids = True
            self._ids.extend(ids)
            count = len(ids)
        elif text := choice.generated_text:
            self._texts.append(text)
            count = 1
        else:
            count = 0
        if self._keeps_text:
            self._answers.append(choice.answer)
        record = self.record
        if count:
            if self._has_ended:
                self._note_violation(BEHIND_THE_END)
            if record.first_s is None and not record.is_whole:
                record.first_s = now_s
            record.chunk_s.append(now_s)
            record.chunk_tokens.append(count)
        if choice.finish_reason:
            if self._has_ended:
                self._note_violation(TWO_ENDS)
            self._has_ended = True
            record.finish_reason = _trim_header(choice.finish_reason)

    def _read_error(self, event: bytes) -> None:
        if self._has_ended:
            self._note_violation(TWO_ENDS)
        self._has_ended = self._has_failed = True
        self.record.error = f"the stream ended with an error {describe_error(event)}".rstrip()

    def _end_stream(self) -> None:
        record = self.record
        if self._has_failed:
            record.outcome = "failed"
            return
        if not self._is_done:
            self._note_violation(NO_DONE)
        if record.finish_reason is None:
            self._note_violation(NO_FINISH)
            record.outcome, record.error = "failed", "the stream ended without a finish_reason"
            return
        if self._usage is None and self._wants_usage:
            self._note_violation(NO_USAGE)
        record.outcome = "finished"

    # whole answers, and errors

    def _add_body(self, data: bytes, at: float) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        record = self.record
        if record.status != 200 and self._body_bytes > MAX_ERROR_BYTES:
            self._decline()
            self._stop(record.outcome, record.error, at)
        elif self._body_bytes > MAX_BODY_BYTES:
            self._stop("failed", f"the answer is longer than {MAX_BODY_BYTES} bytes", at)

    def _end_whole(self, at: float) -> None:
        record = self.record
        record.outcome = "failed"
        if self._asks_stream:
            self._note_violation(NO_STREAM)
        answer = read_chunk(b"".join(self._body))
        if answer is None or answer.is_error:
            record.error = (
                "the answer is not an answer's JSON" if answer is None else "the answer is an error, with status 200"
            )
            return
        for choice in answer.choices or ():
            self._add_choice(choice, self._at(at))
        if answer.usage is not None:
            self._take_usage(answer.usage)
        if record.finish_reason is None:
            self._note_violation(NO_FINISH)
            record.error = "the answer has no finish_reason"
            return
        record.outcome = "finished"

    def _decline(self) -> None:
        record = self.record
        self.error_body = b"".join(self._body)
        record.outcome = "shed" if record.status in SHED else "failed"
        record.error = f"HTTP {record.status} {describe_error(self.error_body)}".rstrip()

    # both

    def _take_usage(self, usage: Usage) -> None:
        """Take the server's usage. Some servers send it with every chunk: it may grow until the end."""
        before, self._usage = self._usage, usage
        if before is not None and (
            (usage.completion_tokens or 0) < (before.completion_tokens or 0)
            or (self._is_final_usage and usage != before)
        ):
            self._note_violation(TWO_USAGES)
        self._is_final_usage = self._has_ended

    def _note_violation(self, what: str) -> None:
        if what not in self.record.violations:
            self.record.violations.append(what)

    def _conclude(self) -> None:
        """Tokens and digest, from all that has come."""
        self.is_over = True
        for timer in self._timers:
            timer.cancel()
        self._read_usage()
        record = self.record
        if self._has_ids and not self._texts:
            record.tokens_from = "ids"
        elif record.metered_tokens is not None:
            record.tokens_from = "usage"
            record.chunk_tokens = spread_tokens(record.metered_tokens, len(record.chunk_s))
        record.tokens = (
            record.metered_tokens
            if record.tokens_from == "usage" and record.metered_tokens is not None
            else sum(record.chunk_tokens)
        )
        if record.tokens:
            record.answer_digest = blake2b(
                self._ids.tobytes() + "".join(self._texts).encode(), digest_size=16
            ).hexdigest()
        self._resume()

    def _read_usage(self) -> None:
        record, usage = self.record, self._usage
        if usage is None:
            return
        record.prompt_tokens, record.metered_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _resume(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _at(self, now: float) -> float:
        """A time of `time.perf_counter` on the record's clock, to the microsecond; `round` takes several times as
        long."""
        return int((now - self._zero_s) * 1e6 + 0.5) / 1e6


def _parse_number(value: str | None, scale: float = 1.0) -> float | None:
    """A header's number; None where there is none."""
    try:
        number = float(value or "nan") * scale
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _trim_header(value: str | None) -> str | None:
    """A header of the server, bounded and on one line."""
    return None if value is None else "".join(filter(str.isprintable, value[:MAX_HEADER_CHARS]))
