import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.base import log


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger("penstock")
    before = (root.handlers[:], root.level, root.propagate)
    stream = io.StringIO()
    log.configure(stream=stream)
    yield stream
    root.handlers[:], root.level, root.propagate = before[0], before[1], before[2]


def test_an_event_is_one_line_of_json_with_its_request_id(lines: io.StringIO) -> None:
    logging.getLogger("penstock.router").info("resumed", extra={"request_id": "r1", "replica": "a\nb"})

    assert lines.getvalue().count("\n") == 1
    line = json.loads(lines.getvalue())
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "penstock.router",
        "event": "resumed",
        "request_id": "r1",
        "replica": "a\nb",
    }


def test_fields_that_libraries_add_for_themselves_are_left_out(lines: io.StringIO) -> None:
    logging.getLogger("penstock").info("event", extra={"_library_field": 1, "request_id": "r"})

    assert "_library" not in lines.getvalue()
    assert json.loads(lines.getvalue())["request_id"] == "r"


def test_the_text_of_an_exception_never_reaches_the_log(lines: io.StringIO) -> None:
    try:
        try:
            raise KeyError("the caller's prompt")
        except KeyError as inner:
            raise ValueError("sk-secret") from inner
    except ValueError:
        logging.getLogger("penstock.router").exception("failed", extra={"request_id": "r2"})

    text = lines.getvalue()
    line = json.loads(text)
    assert "prompt" not in text
    assert "sk-secret" not in text
    assert line["exception"] == "ValueError"
    assert line["cause"]["exception"] == "KeyError"
    assert "test_log.py" in line["stack"][0]


def test_an_operating_system_error_keeps_its_reason(lines: io.StringIO) -> None:
    try:
        raise FileNotFoundError(2, "No such file or directory", "secret-name")
    except FileNotFoundError:
        logging.getLogger("penstock").exception("failed")

    assert json.loads(lines.getvalue())["os_error"] == "No such file or directory"
    assert "secret-name" not in lines.getvalue()


def test_configuring_twice_writes_each_event_once(lines: io.StringIO) -> None:
    log.configure(stream=lines)
    logging.getLogger("penstock").warning("once")

    assert lines.getvalue().count("once") == 1
