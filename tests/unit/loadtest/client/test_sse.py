"""The event parser, against a reader of whole inputs that takes the specification line by line."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock_loadtest.client.sse import MAX_EVENT_BYTES, EventParser, EventTooLong

PIECES = [
    b"data: ",
    b"data:",
    b"data",
    b"data: {}",
    b"event: x",
    b": keep-alive",
    b"id: 1",
    b"datax: 1",
    b" ",
    b"x",
    b"[DONE]",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
]


def events_of(whole: bytes) -> list[bytes]:
    """Reference: all at once."""
    *lines, _unended = re.split(rb"\r\n|\r|\n", whole.removeprefix(b"\xef\xbb\xbf"))
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines:
        name, _, value = line.partition(b":")
        if line == b"" and data:
            events.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
    return events


def fed(parts: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [event for part in parts for event in parser.feed(part)]


@given(
    st.lists(st.sampled_from(PIECES), max_size=24).map(b"".join),
    st.lists(st.integers(0, 80), max_size=8),
    st.booleans(),
)
@example(b"data: x\r\ndata: y\r\n\r\n", [8, 18], False)
@example(b"data: x\n\ndata: y\n\n", [9], False)
@example(b"data: x\ndata: y\n\n", [8], False)
@example(b"data: x\nid: data: y\n\n", [12], False)
@example(b"data: x\r\rdata: y\r\r", [9], False)
@example(b"data: x\n\n", [1, 2], True)
@example(b"\ndata: x\n\n", [0, 0, 1], False)
def test_events_are_those_of_the_whole_input_wherever_it_is_cut(text: bytes, cuts: list[int], has_bom: bool) -> None:
    whole = b"\xef\xbb\xbf" * has_bom + text
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]

    assert fed([whole[low:high] for low, high in pairwise(edges)]) == events_of(whole)


@given(st.lists(st.sampled_from(PIECES), max_size=24).map(b"".join))
def test_events_are_those_of_the_whole_input_byte_by_byte(whole: bytes) -> None:
    assert fed([whole[i : i + 1] for i in range(len(whole))]) == events_of(whole)


def test_an_event_is_there_with_the_byte_that_ends_it_whatever_the_line_ends() -> None:
    for end in (b"\n", b"\r", b"\r\n"):
        parser = EventParser()
        before_last = b"data: x" + end + end[:1]  # of CRLF the CR ends the line

        assert parser.feed(before_last) == [b"x"]
        assert parser.feed(end[1:]) == []


def test_several_events_in_one_packet_come_in_order() -> None:
    assert fed([b"data: 1\n\n: ping\n\ndata: 2\n\ndata: [DO", b"NE]\n\n"]) == [b"1", b"2", b"[DONE]"]


def test_lines_of_one_event_are_joined() -> None:
    assert fed([b"data: {\ndata:\ndata: }\n\n"]) == [b"{\n\n}"]


@pytest.mark.parametrize("piece", [b"x" * 65536, b"data: " + b"x" * 65536 + b"\n"], ids=["one line", "many lines"])
def test_an_event_without_end_is_refused(piece: bytes) -> None:
    with pytest.raises(EventTooLong, match="longer than 8388608 bytes"):
        fed([b"data: ", *[piece] * (MAX_EVENT_BYTES // 65536 + 1)])


def test_much_in_short_events_is_no_long_event() -> None:
    parser = EventParser()

    assert sum(len(parser.feed(b"data: x\n\n" * 100_000)) for _ in range(12)) == 1_200_000
