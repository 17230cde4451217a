"""Lines of a batch's files: what a line of the input says, and what its result's line says. Pure.

Invariants: whatever the bytes, a line is a `BatchLine` or a BadLine; no error's sentence repeats text of the input,
because it goes to Redis.
"""

from typing import NamedTuple

import msgspec

from penstock.wire.batches import BatchError, LineError, LineResponse, LineResult
from penstock.wire.errors import InvalidRequest

MAX_CUSTOM_ID_CHARS = 512
NOT_RUN = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": ("batch_expired", "The request could not be run before the completion window expired."),
    None: ("result_lost", "The result of this request was lost with the disk that it was on."),
}
"""Code and sentence of lines without a result, by what stopped their batch; None: nothing did."""


class BatchLine(NamedTuple):
    """One line of an input file."""

    custom_id: str
    body: bytes
    """JSON of the request."""


class BadLine(Exception):
    """What is wrong with a line of the input."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def at(self, number: int) -> BatchError:
        """number: of the line in its file, from 1."""
        return BatchError(code=self.code, message=self.message, line=number, param=self.param)


class _Line(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


class _Streamed(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Line)
_stream_decoder = msgspec.json.Decoder(_Streamed)
_encoder = msgspec.json.Encoder()


def parse_line(data: bytes, endpoint: str) -> BatchLine:
    """One line, which must be for the batch's endpoint. Raises BadLine. Other members than the four are ignored."""
    try:
        line = _decoder.decode(data)
    except msgspec.ValidationError:
        raise BadLine(
            "invalid_json_line",
            "The line must be a JSON object whose 'custom_id', 'method' and 'url' are strings.",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("invalid_json_line", "The line is not valid JSON.") from None
    if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadLine("invalid_custom_id", f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_method", "'method' must be 'POST'.", "method")
    if line.url != endpoint:
        raise BadLine("invalid_url", f"'url' must be the batch's endpoint, '{endpoint}'.", "url")
    body = bytes(line.body)
    if not body.startswith(b"{"):
        raise BadLine("invalid_request", "'body' must be a JSON object.", "body")
    return BatchLine(line.custom_id, body)


def check_not_streamed(body: bytes) -> None:
    """Raises InvalidRequest for a request whose answer would be a stream. body: a JSON object."""
    stream = bytes(_stream_decoder.decode(body).stream)
    if stream not in (b"", b"false", b"null"):
        raise InvalidRequest("A line of a batch is answered whole; leave out 'stream'.", param="stream")


def result_id(batch_id: str, number: int) -> str:
    """Id of a line's result, the same each time that the line is run. number: from 0."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def encode_answer(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Result of a line that was answered, as a line without its end."""
    response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(_on_one_line(body)))
    return _encoder.encode(LineResult(id=result_id(batch_id, number), custom_id=custom_id, response=response))


def encode_not_run(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Result of a line that was not run, as a line without its end."""
    error = LineError(code=code, message=message)
    return _encoder.encode(LineResult(id=result_id(batch_id, number), custom_id=custom_id, error=error))


def _on_one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body
