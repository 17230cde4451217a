"""Logs: one line of JSON per event, on the standard library's logging.

An event is a short fixed name; what belongs to it goes into `extra`, request_id first: `log.info("resumed",
extra={"request_id": rid, "replica": name})`. Never a prompt, a completion or a key. An exception's own text may hold
what a caller sent (invariant 7), so of an exception only its type and the lines it passed through are written.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ROOT = "penstock"


class JsonFormatter(logging.Formatter):
    """ts (UTC), level, logger, event, the extra fields without those that libraries add with an underscore, and where
    an exception came from."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(
            (key, value) for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")
        )
        if record.exc_info and record.exc_info[1] is not None:
            line.update(_origin(record.exc_info[1]))
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send penstock's events to `stream` (stderr). Called once by a composition root; a second call replaces the
    first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def _origin(error: BaseException) -> dict[str, object]:
    frames = traceback.extract_tb(error.__traceback__)
    found: dict[str, object] = {
        "exception": type(error).__qualname__,
        "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if isinstance(error, OSError) and error.strerror:
        found["os_error"] = error.strerror
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        found["cause"] = _origin(cause)
    return found
