"""One request's record, as a line of JSON: what every figure of a summary, plot or ledger is computed from.

Times are seconds since the run's start on the monotonic clock, to the microsecond. A record never holds prompt text, an
answer or a key.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from penstock_loadtest.errors import RecordsInvalid

Outcome = Literal["finished", "cancelled", "shed", "failed", "unfinished"]
"""finished: the whole answer came. cancelled: we hung up, as planned. shed: the server declined before any token (429,
503). failed: any other error, a broken connection or stream. unfinished: no end before the request's timeout or the end
of the run."""

TokenCount = Literal["ids", "usage", "chunks"]
"""Where `tokens` comes from: token ids in the chunks (verified), the server's own usage, or one per chunk with
content."""


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How one request went. Fields at their default are left out of the line."""

    index: int  # place in the plan
    intended_s: float  # when it should have left; for a later turn of a session never before its previous answer's end
    # when it left: was given to the socket, or to a connection that was made for it; None: never
    sent_s: float | None = None
    # arrival of the first chunk with a token; None also for a whole answer, whose first token can't be observed
    first_s: float | None = None
    end_s: float | None = None  # arrival of its end: the last byte, the error, our hanging up
    # arrival of every chunk with tokens; not streamed: of the answer
    chunk_s: list[float] = msgspec.field(default_factory=list)
    # tokens in each; tokens of one chunk share the chunk's time
    chunk_tokens: list[int] = msgspec.field(default_factory=list)
    outcome: Outcome = "unfinished"
    status: int | None = None  # HTTP status; None: no response
    error: str | None = None  # why it did not finish, in one line, without content
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # as the server reports them
    cached_tokens: int | None = None  # as the server reports them
    tokens: int = 0  # tokens delivered
    tokens_from: TokenCount = "chunks"
    metered_tokens: int | None = None  # completion tokens of the server's usage
    wanted_tokens: int | None = None  # max_tokens of the request
    # what the answer did that the protocol forbids: two ends, tokens behind the end, no [DONE], broken off
    violations: list[str] = msgspec.field(default_factory=list)
    is_whole: bool = False  # not requested as a stream: its tokens come with its end
    # sent twice: the kept connection turned out to be closed, or the server refused an optional field; its times
    # include both
    is_resent: bool = False
    # unfinished because the run ended (Ctrl-C, drain), not because the request's own timeout passed
    is_cut: bool = False
    # of the token ids (of the text where there are none), to compare answers without keeping them
    answer_digest: str | None = None
    tenant: str = "default"
    kind: str = "requests"  # of the scenario's mixed load
    model: str = ""
    endpoint: str = "chat"
    session: str | None = None
    turn: int = 0
    request_id: str | None = None  # the server's
    tier: str | None = None
    tier_reason: str | None = None
    replica: str | None = None
    predicted_ttft_s: float | None = None

    @property
    def lateness_s(self) -> float | None:
        """Seconds after the intended time at which it left: the tester's own fault."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended time to the first token, so that a stall of the server or the tester is not left
        out (coordinated omission); None: no token came, or not as a stream."""
        return None if self.first_s is None else self.first_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first chunk's; None with fewer than two chunks."""
        later = sum(self.chunk_tokens[1:])
        return (self.chunk_s[-1] - self.chunk_s[0]) / later if later else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from intended time to end, of a request that finished."""
        return self.end_s - self.intended_s if self.end_s is not None and self.outcome == "finished" else None

    @property
    def token_s(self) -> list[float]:
        """Arrival of every token."""
        return [at for at, count in zip(self.chunk_s, self.chunk_tokens, strict=True) for _ in range(count)]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class RecordWriter:
    """Appends records to a file, a line each, as they end; a context manager. What was written survives a kill of the
    tester within `flush_every` lines."""

    def __init__(self, path: Path, *, flush_every: int = 64) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._flush_every = flush_every
        self.count = 0

    def write(self, record: Record) -> None:
        self._file.write(_encoder.encode(record) + b"\n")
        self.count += 1
        if self.count % self._flush_every == 0:
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in the order they ended. A last line cut short by a kill is left out. Raises
    RecordsInvalid."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise RecordsInvalid(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise RecordsInvalid(f"{path} can't be read: {error.strerror}.") from None


def write_json(path: Path, value: object) -> None:
    """Write JSON for people and programs; the file appears whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(msgspec.to_builtins(value), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
