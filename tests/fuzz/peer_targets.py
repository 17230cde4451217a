"""Targets of what peers send: frames of gateways and replicas, answers of servers under load."""

import asyncio
from typing import Any

from hypothesis import strategies as st

from penstock.wire.channel import Channel
from penstock.wire.frames import (
    Abort,
    BlockEvents,
    Delta,
    DownFrame,
    Hello,
    Load,
    SamplingParams,
    StepCosts,
    Submit,
    UpFrame,
    encode,
    pack_token_ids,
)
from penstock_loadtest.client.chunks import read_chunk
from penstock_loadtest.client.sse import EventParser, EventTooLong
from tests.fuzz.check import Target, raising
from tests.fuzz.inputs import bytes_like

# the token stream

_SUBMIT = Submit(
    sid=1,
    request_id="r",
    packed_token_ids=pack_token_ids([1, 2, 3]),
    block_keys=bytes(16),
    chain_key=bytes(16),
    sampling=SamplingParams(max_tokens=4, seed=1),
    deadline=1.0,
)
_UP = (encode(UpFrame([Hello("router-1", proof=bytes(32))])), encode(UpFrame([_SUBMIT, Abort(1)])))
_LOAD = Load("epoch", 0, 8, 0, 0, 0, 0, 9, 9, StepCosts(base_s=0.01), 512)
_DOWN = (
    encode(DownFrame([Delta(1, [5, 6])], _LOAD, [BlockEvents(1, bytes(16), b"")])),
    encode(DownFrame([], error="no")),
)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


@raising()
def _channel(parts: list[bytes]) -> None:
    """A channel takes any bytes, cut anywhere: messages, or the end of the connection."""
    ends: list[object] = []
    channel = Channel(lambda _: None, ends.append)
    transport = _Transport()
    channel.connection_made(transport)  # type: ignore[arg-type]
    for part in parts:
        if not transport.is_closed:
            channel.data_received(part)


class _Transport(asyncio.Transport):
    """A connection that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket() if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class _Socket:
    def setsockopt(self, *_: object) -> None:
        pass


# answers that the load tester reads

_EVENT = (
    b'{"id":"a","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}],"usage":null}',
    b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
    b'{"choices":[{"text":"a","finish_reason":"length"}],"error":null}',
)
_ANSWER = tuple(b"data: " + event + b"\n\n" for event in _EVENT)


@raising(EventTooLong)
def _parse_events(parts: list[bytes]) -> None:
    parser = EventParser()
    for part in parts:
        for event in parser.feed(part):
            read_chunk(event)


PEER_TARGETS: dict[str, Target] = {
    "channel": Target(st.lists(bytes_like(*map(_framed, (*_UP, *_DOWN))), max_size=5), _channel),
    "answer-events": Target(st.lists(bytes_like(*_ANSWER), max_size=4), _parse_events),
}
