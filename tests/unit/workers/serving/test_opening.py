"""The opening of a stream over real connections, with what a stranger would try."""

import asyncio
import socket
from typing import Any

import pytest

from penstock.base.subsecrets import replica_secrets
from penstock.wire.frames import Hello, UpFrame, encode
from penstock.wire.proof import (
    MAX_OPENING_BYTES,
    NONCE_BYTES,
    Answer,
    Challenge,
    Opening,
    StreamProofs,
    encode_opening,
    make_nonce,
)
from penstock.workers.serving import opening as module
from penstock.workers.serving import session
from penstock.workers.serving.opening import Lobby
from tests.unit.workers.stream_fakes import EPOCH, SECRET, TIMEOUT_S, Bench, FakeRouter, serving, soon, submit

pytestmark = pytest.mark.uvloop

PREVIOUS_HELLO = bytes.fromhex(
    "919194a168a9676174657761792d3102c420ff6c32e3db74b3b4c4abb50ced293d9c6e8088e12703099886da3aad72984828"
)
"""The first frame of a gateway of protocol 2, as it was sent: gateway-1, to the process with the epoch "epoch", under
the cluster secret 00 01 .. 1f."""
PREVIOUS_SUBMIT = bytes.fromhex(
    "91919ca17301a27131c41000000000010000000200000003000000c400c410636363636363636363636363636363639e0800cb3ff00000"
    "0000000000cb3ff0000000000000cb0000000000000000cb3ff0000000000000cb0000000000000000cb00000000000000009090c200c0"
    "00c0a0c0c0"
)
"""The second frame of that gateway: the sequence 1 of four tokens."""
CLUSTER_SECRET = bytes(range(32))


async def reason_of(router: FakeRouter) -> str:
    """The reason in the replica's last frame, after which it ends the stream."""
    reason = (await router.frame_with(lambda frame: frame.error)).error
    with pytest.raises(EOFError):
        await router.frame()
    return reason or ""


async def ended(router: FakeRouter) -> None:
    with pytest.raises(EOFError):
        await router.frame_with(lambda _: False)


async def test_a_router_that_has_proven_itself_is_served() -> None:
    async with serving() as bench, bench.router(greets=False) as router:
        await router.greet()
        router.send(submit(1))

        assert (await soon(bench.engine.submitted)).request_id == "q1"


@pytest.mark.parametrize("wrong", [{"secret": b"t" * 32}, {"epoch": "of another process"}], ids=["secret", "epoch"])
async def test_a_router_with_another_secret_or_for_another_process_is_refused(wrong: dict[str, Any]) -> None:
    async with serving() as bench, bench.router(greets=False) as router:
        await router.greet(**{"secret": b"t" * 32, **wrong})

        assert "secret" in await reason_of(router)


async def test_a_replica_with_its_own_secrets_opens_no_stream_to_another() -> None:
    own = replica_secrets(CLUSTER_SECRET)
    async with serving() as bench, bench.router(greets=False) as router:
        bench.server.door.secret = replica_secrets(CLUSTER_SECRET).stream
        await router.greet(secret=own.stream)

        assert "secret" in await reason_of(router)


async def test_a_sniffed_opening_opens_no_second_stream() -> None:
    async with serving() as bench, bench.router(greets=False) as first:
        opening = Opening("r", make_nonce())
        first.channel.on_message = first._on_challenge
        first.channel.send(encode_opening(opening))
        challenge = await first.challenges.get()
        answer = encode_opening(Answer(StreamProofs(SECRET, opening, EPOCH, challenge.nonce).router))
        first.channel.on_message = first._on_message
        first.channel.send(answer)
        assert (await first.frame()).load is not None

        async with bench.router(greets=False) as second:
            second.channel.on_message = second._on_challenge
            second.channel.send(encode_opening(opening))
            replayed = await second.challenges.get()
            second.channel.on_message = second._on_message
            second.channel.send(answer)

            assert replayed.nonce != challenge.nonce
            assert "secret" in await reason_of(second)


async def test_the_replicas_own_proof_sent_back_is_refused() -> None:
    async with serving() as bench, bench.router(greets=False) as router:
        router.channel.on_message = router._on_challenge
        router.channel.send(encode_opening(Opening("r", make_nonce())))
        challenge = await router.challenges.get()
        router.channel.on_message = router._on_message
        router.channel.send(encode_opening(Answer(challenge.proof)))

        assert "secret" in await reason_of(router)


async def test_a_challenge_reflected_onto_another_connection_proves_nothing() -> None:
    """The stranger opens with the nonce that the replica gave another connection, to have it make the router's
    proof of that one."""
    async with serving() as bench, bench.router(greets=False) as victim, bench.router(greets=False) as mirror:
        for router in (victim, mirror):
            router.channel.on_message = router._on_challenge
        victim.channel.send(encode_opening(Opening("r", make_nonce())))
        wanted = await victim.challenges.get()
        mirror.channel.send(encode_opening(Opening("r", wanted.nonce)))
        made = await mirror.challenges.get()
        victim.channel.on_message = victim._on_message
        victim.channel.send(encode_opening(Answer(made.proof)))

        assert "secret" in await reason_of(victim)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xc1", "decoded"),
        (b"GET / HTTP/1.1", "decoded"),
        (encode(UpFrame([])), "opening"),
        (encode(UpFrame([submit()])), "opening"),
        (encode(UpFrame([Hello("r"), submit()])), "opening"),
        (encode(UpFrame([Hello("r", 7)])), "protocol 7"),
        (encode_opening(Opening("r", b"n" * NONCE_BYTES, 4)), "protocol 4"),
        (encode_opening(Opening("r", b"short")), "malformed"),
        (encode_opening(Opening("r" * 200, b"n" * NONCE_BYTES)), "malformed"),
        (encode_opening(Answer(b"p" * 32)), "decoded"),
        (encode_opening(Challenge(b"n" * 32, b"p" * 32)), "decoded"),
        (PREVIOUS_HELLO, "protocol 2"),
    ],
    ids=[
        "garbage",
        "HTTP",
        "empty",
        "no opening",
        "more than a hello",
        "hello of another protocol",
        "another protocol",
        "short nonce",
        "long id",
        "answer first",
        "challenge",
        "previous hello",
    ],
)
async def test_what_opens_no_stream_is_refused_and_reaches_no_engine(message: bytes, reason: str) -> None:
    async with serving() as bench, bench.router(greets=False) as router:
        router.channel.send(message)

        assert reason in await reason_of(router)
        assert bench.engine.submitted.empty()


async def test_a_message_too_long_for_an_opening_ends_the_connection_before_it_has_come() -> None:
    async with serving() as bench, bench.router(greets=False) as router:
        router.channel._transport.write((MAX_OPENING_BYTES + 1).to_bytes(4, "little") + b"x")

        await ended(router)


async def test_once_proven_a_router_may_send_long_messages() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(1, num_tokens=50_000))

        assert len((await soon(bench.engine.submitted)).token_ids) == 50_000


async def test_a_connection_that_proves_nothing_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "OPENING_TIMEOUT_S", 0.05)

    async with serving() as bench, bench.router(greets=False) as silent, bench.router(greets=False) as halfway:
        halfway.channel.on_message = halfway._on_challenge
        halfway.channel.send(encode_opening(Opening("r", make_nonce())))
        await halfway.challenges.get()
        halfway.channel.on_message = halfway._on_message

        assert "No proof" in await reason_of(silent)
        assert "No proof" in await reason_of(halfway)


async def test_strangers_that_fill_the_lobby_keep_no_router_out(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as bench:
        strangers = [await stranger(bench) for _ in range(3 * module.MAX_UNPROVEN)]
        try:
            async with bench.router() as router:
                assert (await router.frame()).load is not None
                assert len(bench.server._lobby) <= module.MAX_UNPROVEN
                assert len(bench.server._connections) <= module.MAX_UNPROVEN + 1
        finally:
            for each in strangers:
                each.close()

    assert caplog.messages.count("strangers fill the stream's port") == 1


async def stranger(bench: Bench) -> socket.socket:
    """A connection that says nothing."""
    host, _, port = bench.address.rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    return connection


class Guest:
    def __init__(self) -> None:
        self.is_out = False

    def give_up(self) -> None:
        self.is_out = True


async def test_a_full_lobby_gives_up_its_oldest() -> None:
    lobby, guests = Lobby(2), [Guest() for _ in range(4)]
    lobby.enter(guests[0])
    lobby.enter(guests[1])
    lobby.leave(guests[0])
    lobby.enter(guests[2])
    lobby.enter(guests[3])

    assert [guest.is_out for guest in guests] == [False, True, False, False]


# beside the version before


async def test_a_gateway_of_the_version_before_is_served_while_that_is_allowed() -> None:
    async with serving(previous_secret=CLUSTER_SECRET) as bench, bench.router(greets=False) as router:
        router.channel.send(PREVIOUS_HELLO)
        assert (await router.frame()).load is not None
        router.channel.send(PREVIOUS_SUBMIT)

        assert (await soon(bench.engine.submitted)).token_ids == [0, 1, 2, 3]


async def test_its_hello_under_another_secret_is_refused() -> None:
    async with serving(previous_secret=b"t" * 32) as bench, bench.router(greets=False) as router:
        router.channel.send(PREVIOUS_HELLO)

        assert "secret" in await reason_of(router)
