"""A batch as Redis holds it: what was asked, how far it has come, and the steps that it may take. Pure.

Invariant: a batch that has ended never changes. Statuses: validating -> in_progress -> finalizing -> completed or
expired; validating -> failed; each that has not ended -> cancelling -> cancelled.
"""

import msgspec

from penstock.wire.batches import (
    ENDED,
    BatchCreate,
    BatchError,
    BatchErrors,
    BatchOut,
    BatchStatus,
    BatchUsage,
    CachedDetails,
    RequestCounts,
)
from penstock.wire.errors import InvalidRequest

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 7 * 86400
MAX_ERRORS = 32
"""Errors of an input that are told."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Redis holds of a batch. Times are Unix time in seconds; None: it has not happened."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    created_at: int
    expires_at: int
    num_lines: int
    """Lines of the input: at first as many as its file has at the most, then those that are requests."""
    output_seconds: int
    """How long output and error file live, seconds."""
    metadata: dict[str, str] | None = None
    stays: bool = False
    """Whether its lines are to stay on the edge."""
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_at(self) -> int | None:
        """Time of the end. None while there is none."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    def move_to(self, status: BatchStatus, now: float) -> "BatchRecord":
        """The batch with another status, taken now (Unix time)."""
        return msgspec.structs.replace(self, status=status, **{f"{status}_at": int(now)})

    def fail(self, errors: list[BatchError], now: float) -> "BatchRecord":
        return msgspec.structs.replace(self.move_to("failed", now), errors=tuple(errors[:MAX_ERRORS]))

    def describe(self, counts: "BatchCounts") -> BatchOut:
        """The batch as the API shows it."""
        is_read = self.in_progress_at is not None
        return BatchOut(
            id=self.id,
            endpoint=self.endpoint,
            errors=BatchErrors(data=list(self.errors)) if self.errors else None,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_at,
            in_progress_at=self.in_progress_at,
            expires_at=self.expires_at,
            finalizing_at=self.finalizing_at,
            completed_at=self.completed_at,
            failed_at=self.failed_at,
            expired_at=self.expired_at,
            cancelling_at=self.cancelling_at,
            cancelled_at=self.cancelled_at,
            request_counts=RequestCounts(
                total=self.num_lines if is_read else 0, completed=counts.completed, failed=counts.failed
            ),
            usage=BatchUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=CachedDetails(cached_tokens=counts.cached_tokens),
                output_tokens=counts.completion_tokens,
                total_tokens=counts.prompt_tokens + counts.completion_tokens,
            )
            if is_read
            else None,
            metadata=self.metadata,
        )


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the lines of a batch that are done have come to."""

    completed: int = 0
    failed: int = 0
    """Lines whose result is in the error file."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def window_s(window: str) -> int:
    """Seconds of a completion window. Raises InvalidRequest for one that is too long."""
    seconds = int(window[:-1]) * _SECONDS[window[-1]]
    if seconds > MAX_WINDOW_S:
        raise InvalidRequest("'completion_window' may be at most 7d.", param="completion_window")
    return seconds


def new_record(
    batch_id: str,
    wanted: BatchCreate,
    num_lines: int,
    default_output_seconds: int,
    now: float,
    *,
    stays: bool = False,
) -> BatchRecord:
    """A batch as it is created. now: Unix time. stays: whether its lines are to stay on the edge. Raises
    InvalidRequest."""
    expires = wanted.output_expires_after
    return BatchRecord(
        id=batch_id,
        endpoint=wanted.endpoint,
        input_file_id=wanted.input_file_id,
        completion_window=wanted.completion_window,
        created_at=int(now),
        expires_at=int(now) + window_s(wanted.completion_window),
        num_lines=num_lines,
        output_seconds=default_output_seconds if expires is None else expires.seconds,
        metadata=wanted.metadata,
        stays=stays,
    )
