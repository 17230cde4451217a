"""/v1/files and /v1/batches as structs: a tenant's files, its batches, and the lines of both.

Source: OpenAI's Python package 3.52 (types/file_object.py, types/batch.py, types/batch_create_params.py) and OpenAI's
guide to its Batch API, for the lines of the files.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Paths that the lines of a batch may be for."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
"""Bounds of a file's life as a request may name it, seconds from its creation."""
WINDOW_PATTERN = r"^[1-9][0-9]{0,5}[smhd]$"
"""A completion window: a number of seconds, minutes, hours or days. OpenAI takes 24h only."""

FilePurpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses that a batch never leaves."""


class FileOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file, without its content."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    """Unix time, seconds."""
    expires_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileOut]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long files live."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class BatchCreate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[
        str, Meta(pattern=WINDOW_PATTERN, description="24h, or another time of up to 7 days, such as 30m")
    ]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a batch's input; it never holds text of the input."""

    code: str
    message: str
    line: int | None = None
    """Number of the line in the file, from 1."""
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class ReasoningDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the lines that are done."""

    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails = ReasoningDetails()
    total_tokens: int


class BatchOut(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times are Unix time in seconds, null for what has not happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchOut]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint answered to one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line was not run."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None
