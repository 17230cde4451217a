import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from penstock.base.subsecrets import stream_secret
from penstock.router.replicas import link as module
from penstock.router.replicas.link import Greeter, Greeting, connect
from penstock.wire.channel import HEADER_BYTES, Channel
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import (
    PREVIOUS_PROTOCOL,
    PROTOCOL_VERSION,
    Abort,
    Announce,
    Delta,
    DownFrame,
    Load,
    SamplingParams,
    StepCosts,
    Submit,
    UpFrame,
    decode_up,
    encode,
)
from penstock.wire.proof import (
    MAX_OPENING_BYTES,
    Answer,
    Challenge,
    Opening,
    StreamProofs,
    decode_opening,
    encode_opening,
    make_nonce,
)
from tests.unit.router.fleet_fakes import FakeMember

TIMEOUT_S = 10.0
SECRET = bytes(range(32))
ME = Greeting("me", "epoch", SECRET)
PREVIOUS_HELLO = bytes.fromhex(
    "919194a168a9676174657761792d3102c420ff6c32e3db74b3b4c4abb50ced293d9c6e8088e12703099886da3aad72984828"
)
"""First message of gateway-1, of protocol 2, to the process with the epoch "epoch", as it was sent."""
PREVIOUS_FIRST = bytes.fromhex(
    "9490dc0011a565706f6368000800000000646498cb3f847ae147ae147bcb0000000000000000cb0000000000000000cb00000000000000"
    "00cb0000000000000000cb0000000000000000cb0000000000000000cb0000000000000000cd0200c29000000090c0c0"
)
"""First frame of a replica of protocol 2, as it was sent."""
LOAD = Load("epoch", 0, 8, 0, 0, 0, 0, 100, 100, StepCosts(), 512)
FIRST = DownFrame([], LOAD)
FRAME = encode(DownFrame([Delta(1, [5])]))


class FakeReplica:
    """One connection's replica; answers the router's proof as the test demands, and keeps all it receives."""

    def __init__(self, answers: tuple[bytes, ...], *, closes: bool, secret: bytes | None) -> None:
        """secret: None: it knows nothing of openings, and answers the first message instead."""
        self.channel = Channel(self._on_message if secret is None else self._on_opening, self._on_end)
        self.opened: list[object] = []
        """The messages of the opening."""
        self._secret = secret or b""
        self.received: asyncio.Queue[UpFrame] = asyncio.Queue()
        self.ended = asyncio.Event()
        self._answers = answers
        self._closes = closes

    def _on_opening(self, data: bytes) -> None:
        message = decode_opening(data)
        self.opened.append(message)
        if isinstance(message, Opening):
            nonce = make_nonce()
            self._proofs = StreamProofs(self._secret, message, "epoch", nonce)
            self.channel.send(encode_opening(Challenge(nonce, self._proofs.replica)))
        else:
            assert message == Answer(self._proofs.router)
            self.channel.on_message = self._on_message
            self._answer()

    def _on_message(self, data: bytes) -> None:
        if self._secret:
            self.received.put_nowait(decode_up(data))
        else:
            self.opened.append(data)
        self._answer()

    def _answer(self) -> None:
        for answer in self._answers:
            self.channel.send(answer)
        self._answers = ()
        if self._closes:
            self.channel.close()

    def _on_end(self, _error: Exception | None) -> None:
        self.ended.set()

    def send_past_the_loop(self, message: bytes) -> None:
        """Send as a process of its own does, also while the router's stands still."""
        with socket.socket(fileno=os.dup(self.channel._transport.get_extra_info("socket").fileno())) as own:
            own.sendall(len(message).to_bytes(HEADER_BYTES, "little") + message)

    async def ops(self) -> list[object]:
        async with asyncio.timeout(TIMEOUT_S):
            return [*(await self.received.get()).ops]


class Place:
    """Where fake replicas are made for whoever connects."""

    def __init__(self) -> None:
        self.address = ""
        self.replicas: list[FakeReplica] = []


@asynccontextmanager
async def replica(*answers: bytes, closes: bool = False, secret: bytes | None = SECRET) -> AsyncIterator[Place]:
    """answers: messages sent in reply to the router's proof; without a secret, to its first message."""
    place = Place()

    def accept() -> Channel:
        place.replicas.append(FakeReplica(answers, closes=closes, secret=secret))
        return place.replicas[-1].channel

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    place.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield place
    finally:
        server.close()
        for made in place.replicas:
            if made.channel.is_open:
                made.channel.abort()


class Received:
    """What a link delivers to its owner."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[DownFrame] = asyncio.Queue()
        self.losses: asyncio.Queue[None] = asyncio.Queue()

    def on_frame(self, frame: DownFrame) -> None:
        self.frames.put_nowait(frame)

    def on_lost(self) -> None:
        self.losses.put_nowait(None)

    async def frame(self) -> DownFrame:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.frames.get()

    async def loss(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.losses.get()


def submit(sid: int) -> Submit:
    return Submit(sid, f"q{sid}", b"", b"", b"c" * 16, SamplingParams(max_tokens=1))


def test_a_link_proves_itself_and_passes_on_the_first_load() -> None:
    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
        ):
            assert await received.frame() == FIRST
            assert [type(message) for message in place.replicas[0].opened] == [Opening, Answer]

    uvloop.run(main())


async def test_a_replica_that_does_not_know_the_secret_is_shown_no_proof() -> None:
    async with replica(encode(FIRST), secret=b"t" * 32) as place:
        with pytest.raises(ReplicaLost, match="not the replica of this platform"):
            async with connect(place.address, ME, lambda _: None, lambda: None):
                pass

        assert [type(message) for message in place.replicas[0].opened] == [Opening]


async def test_another_process_at_the_address_is_shown_no_proof() -> None:
    async with replica(encode(FIRST)) as place:
        with pytest.raises(ReplicaLost, match="not the replica of this platform"):
            async with connect(place.address, ME._replace(epoch="another"), lambda _: None, lambda: None):
                pass

        assert [type(message) for message in place.replicas[0].opened] == [Opening]


async def test_nothing_long_is_taken_before_the_replica_has_proven_itself() -> None:
    async with replica(b"x" * (MAX_OPENING_BYTES + 1), secret=None) as place:
        with pytest.raises(ReplicaLost, match="the connection ended"):
            async with connect(place.address, ME, lambda _: None, lambda: None):
                pass


async def test_a_replica_of_the_version_before_is_greeted_as_it_expects() -> None:
    received = Received()
    previous = Greeting("gateway-1", "epoch", bytes(range(32)), is_previous=True)
    async with (
        replica(PREVIOUS_FIRST, secret=None) as place,
        connect(place.address, previous, received.on_frame, received.on_lost),
    ):
        frame = await received.frame()

        assert place.replicas[0].opened == [PREVIOUS_HELLO]
        assert frame.load is not None
        assert (frame.load.epoch, frame.load.max_inflight) == ("epoch", 8)


def test_replicas_of_the_version_before_are_spoken_to_while_that_is_allowed_only() -> None:
    now, before, later = (FakeMember("r", protocol=protocol) for protocol in (PROTOCOL_VERSION, PREVIOUS_PROTOCOL, 9))
    strict, lenient = (Greeter("me", SECRET, accepts_previous=accepts) for accepts in (False, True))
    own = stream_secret(SECRET, bytes.fromhex(now.stream_key_id))

    assert strict.greet(now) == lenient.greet(now) == Greeting("me", now.epoch, own)
    assert lenient.greet(before) == Greeting("me", before.epoch, SECRET, is_previous=True)
    for greeter, member in ((strict, before), (strict, later), (lenient, later)):
        with pytest.raises(ReplicaLost, match="accept_previous_hello"):
            greeter.greet(member)


def test_a_replica_that_publishes_garbage_for_a_key_id_is_lost_and_nothing_else() -> None:
    with pytest.raises(ReplicaLost, match="garbage"):
        Greeter("me", SECRET, accepts_previous=False).greet(FakeMember("r", stream_key_id="no hex"))


def test_no_frame_is_passed_on_before_the_owner_has_the_link() -> None:
    async def main() -> None:
        received = Received()
        second = DownFrame([Delta(1, [5])])
        async with (
            replica(encode(FIRST), encode(second)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
        ):
            assert received.frames.empty()

            assert [await received.frame(), await received.frame()] == [FIRST, second]

    uvloop.run(main())


def test_what_is_sent_in_one_turn_of_the_loop_travels_in_one_frame_in_order() -> None:
    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost) as link,
        ):
            link.announce()
            link.submit(submit(1))
            link.abort(1)
            link.submit(submit(2))

            assert await place.replicas[0].ops() == [Announce(), submit(1), Abort(1), submit(2)]

    uvloop.run(main())


@pytest.mark.parametrize("last", [encode(DownFrame([], error="too slow")), b"\xc1"], ids=["with a word", "gibberish"])
def test_a_broken_stream_is_reported_once_and_nothing_after_it(last: bytes) -> None:
    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost) as link,
        ):
            await received.frame()
            for message in (FRAME, last, FRAME):
                place.replicas[0].channel.send(message)
            await received.loss()
            link.submit(submit(1))
            await place.replicas[0].ended.wait()

        assert (received.frames.qsize(), received.losses.qsize()) == (1, 0)

    uvloop.run(main())


@pytest.mark.parametrize("end", [Channel.close, Channel.abort], ids=["ended", "reset"])
def test_a_replica_that_dies_is_lost_at_once(end: Callable[[Channel], None]) -> None:
    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
        ):
            await received.frame()
            end(place.replicas[0].channel)

            await received.loss()

    uvloop.run(main())


def test_a_replica_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.2)

    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
        ):
            await received.loss()

    uvloop.run(main())


def test_a_replica_that_is_heard_of_now_and_then_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.4)

    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
        ):
            for _ in range(30):
                await received.frame()
                asyncio.get_running_loop().call_later(0.05, place.replicas[0].channel.send, encode(FIRST))

            assert received.losses.empty()

    uvloop.run(main())


def test_a_gateway_that_stood_still_itself_takes_no_replica_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.4)

    async def main() -> None:
        received, token = Received(), DownFrame([Delta(1, [5])])
        pauses_s = iter(6 * [0.1])

        def stand_still(frame: DownFrame) -> None:
            """Hold up the loop for longer than a silence may take, at the first token, while the replica goes on."""
            received.on_frame(frame)
            if frame == token:
                for pause_s in pauses_s:
                    time.sleep(pause_s)
                    place.replicas[0].send_past_the_loop(encode(token))

        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, stand_still, received.on_lost),
        ):
            await received.frame()
            place.replicas[0].channel.send(encode(token))

            assert [await received.frame() for _ in range(7)] == 7 * [token]
            assert received.losses.empty()

    uvloop.run(main())


def test_a_silent_replica_is_lost_by_a_gateway_too_that_stands_still_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.4)

    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost),
            asyncio.timeout(TIMEOUT_S),
        ):
            while received.losses.empty():
                time.sleep(0.15)  # noqa: ASYNC251 (the process stands still)
                await asyncio.sleep(0)

    uvloop.run(main())


def test_a_closed_link_ends_the_stream_and_reports_no_loss() -> None:
    async def main() -> None:
        received = Received()
        async with replica(encode(FIRST)) as place:
            async with connect(place.address, ME, received.on_frame, received.on_lost):
                await received.frame()
            async with asyncio.timeout(TIMEOUT_S):
                await place.replicas[0].ended.wait()

        assert received.losses.empty()

    uvloop.run(main())


def test_an_error_of_the_owner_ends_the_link_as_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        received = Received()

        def fail(_frame: DownFrame) -> None:
            raise LookupError("ours")

        async with replica(encode(FIRST)) as place, connect(place.address, ME, fail, received.on_lost):
            await received.loss()

    uvloop.run(main())

    assert [record.message for record in caplog.records] == ["link failed", "replica lost"]


def test_what_can_not_be_sent_ends_the_link_so_that_what_was_sent_with_it_goes_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        received = Received()
        async with (
            replica(encode(FIRST)) as place,
            connect(place.address, ME, received.on_frame, received.on_lost) as link,
        ):
            link.submit(submit(1))
            link.submit(Submit(2, "r", b"", b"", bytes(16), SamplingParams(1, top_k=2**64)))
            await received.loss()

    uvloop.run(main())

    assert [record.message for record in caplog.records] == ["link failed", "replica lost"]


def test_where_nobody_listens_there_is_no_link() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(ReplicaLost, match=address):
                async with connect(address, ME, lambda _: None, lambda: None):
                    pass

        uvloop.run(main())


@pytest.mark.parametrize(
    ("answers", "closes", "secret", "sentence"),
    [
        ((encode(DownFrame([], error="The router speaks protocol 1, this replica 2.")),), True, None, "this replica 2"),
        ((b"\xc1",), False, None, "not a replica of this version"),
        ((encode(FIRST),), False, None, "not a replica of this version"),
        ((), True, None, "the connection ended"),
        ((), False, None, "did not answer"),
        ((encode(DownFrame([], error="It knows you not.")),), True, SECRET, "knows you not"),
        ((b"\xc1",), False, SECRET, "not a replica of this version"),
        ((encode(FIRST), encode(DownFrame([], error="changed its mind"))), False, SECRET, "changed its mind"),
        ((), True, SECRET, "the connection ended"),
        ((), False, SECRET, "did not answer"),
    ],
    ids=[
        "refused",
        "gibberish",
        "a frame without proof",
        "closed",
        "silent",
        "refused after proof",
        "gibberish after proof",
        "refused late",
        "closed after proof",
        "silent after proof",
    ],
)
def test_a_replica_that_does_not_answer_is_no_link(
    answers: tuple[bytes, ...], closes: bool, secret: bytes | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.5 if sentence == "did not answer" else 60.0)

    async def main() -> None:
        async with replica(*answers, closes=closes, secret=secret) as place:
            with pytest.raises(ReplicaLost, match=sentence):
                async with connect(place.address, ME, lambda _: None, lambda: None):
                    pass

    uvloop.run(main())


def test_an_error_in_the_owners_block_is_its_own() -> None:
    async def main() -> None:
        async with replica(encode(FIRST)) as place:
            with pytest.raises(ConnectionError, match="of the owner"):
                async with connect(place.address, ME, lambda _: None, lambda: None):
                    raise ConnectionError("of the owner")

    uvloop.run(main())
