"""Targets of what peers send: frames of gateways and replicas, answers of providers and of servers under load."""

import asyncio
from typing import Any

import msgspec
from hypothesis import strategies as st

from penstock.router.providers.provider_api import CallNumbers, StreamBroken, read_event, read_refusal
from penstock.text.tools.parser import MARKERS, CallFormat, ToolParser
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
    decode_down,
    decode_up,
    encode,
    pack_token_ids,
)
from penstock.wire.proof import NONCE_BYTES, Opening, encode_opening
from penstock.workers.serving.intake import ProtocolError, check_submission, make_sequence
from penstock.workers.serving.opening import Door, Entrance
from penstock_loadtest.client.chunks import read_chunk
from penstock_loadtest.client.sse import EventParser, EventTooLong
from tests.fuzz.check import Target, raising
from tests.fuzz.inputs import bytes_like, texts

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

_NESTED = b"\x92\x90" + b"\x91" * 3000 + b"\xc0"
"""An empty frame with an item more than there are, nested deeply."""


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


_up_frames = bytes_like(*_UP, _NESTED)
_down_frames = bytes_like(*_DOWN, _NESTED)


_OPENING = encode_opening(Opening(router_id="router-1", nonce=bytes(NONCE_BYTES)))


@raising(ProtocolError)
def _open(messages: list[bytes]) -> None:
    """A replica takes any messages before a proof: the next step of an opening, or a refusal."""
    entrance = Entrance(Door(bytes(32), "epoch"))
    for message in messages:
        entrance.take(message)


@raising(msgspec.MsgspecError, ProtocolError)
def _take_router_frame(data: bytes) -> None:
    for op in decode_up(data).ops:
        if isinstance(op, Submit):
            check_submission(op)
            make_sequence(op, 0.0, 0.0)


_take_replica_frame = raising(msgspec.MsgspecError)(decode_down)


# providers

_EVENT = (
    b'{"id":"a","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}],"usage":null}',
    b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
    b'{"choices":[{"text":"a","finish_reason":"length"}],"error":null}',
    b'{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}}]}}]}',
)
_REFUSAL = (b'{"error":{"message":"no","type":"x","code":"context_length_exceeded"}}', b'{"error":"no"}')
_RETRY = (b"3", b"Wed, 21 Oct 2026 07:28:00 GMT", b"-1", b"1e9")

_NESTED_JSON = b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"


@raising(StreamBroken)
def _read_provider_event(data: bytes) -> None:
    CallNumbers().renumber(read_event(data).calls)


@raising()
def _read_refusal(given: tuple[int, bytes, bytes]) -> None:
    status, retry_after, body = given
    read_refusal("p", status, retry_after.decode("latin-1"), body, 1.8e9)


# what models write

_MODEL_TEXT = st.lists(
    st.sampled_from(
        [
            *sorted(MARKERS),
            '{"name": "f"',
            ', "arguments": ',
            ', "parameters": ',
            "{",
            "}",
            "[",
            "]",
            ";",
            ",",
            '"',
            "\\",
            " ",
            "\n",
        ]
    )
    | texts,
    max_size=20,
)


@raising()
def _parse_calls(given: tuple[CallFormat, bool, list[str]]) -> None:
    call_format, holds_calls, pieces = given
    parser = ToolParser(call_format, frozenset({"f"}), holds_calls=holds_calls)
    for piece in pieces:
        parser.push(piece)
    parser.finish()


# answers that the load tester reads

_ANSWER = tuple(b"data: " + event + b"\n\n" for event in _EVENT)


@raising(EventTooLong)
def _parse_events(parts: list[bytes]) -> None:
    parser = EventParser()
    for part in parts:
        for event in parser.feed(part):
            read_chunk(event)


PEER_TARGETS: dict[str, Target] = {
    "channel": Target(st.lists(bytes_like(*map(_framed, (*_UP, *_DOWN))), max_size=5), _channel),
    "openings": Target(st.lists(bytes_like(_OPENING, *_UP, _NESTED), max_size=4), _open),
    "router-frames": Target(_up_frames, _take_router_frame),
    "replica-frames": Target(_down_frames, _take_replica_frame),
    "provider-event": Target(bytes_like(*_EVENT, _NESTED_JSON), _read_provider_event),
    "provider-refusal": Target(
        st.tuples(st.integers(100, 599), bytes_like(*_RETRY), bytes_like(*_REFUSAL, _NESTED_JSON)), _read_refusal
    ),
    "tool-calls": Target(
        st.tuples(st.sampled_from(("hermes", "llama3", "mistral")), st.booleans(), _MODEL_TEXT), _parse_calls
    ),
    "answer-events": Target(st.lists(bytes_like(*_ANSWER), max_size=4), _parse_events),
}
