"""HTTP/1.1 as servers speak it, byte by byte, over real sockets."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from bench.support.free_ports import free_port
from penstock_loadtest.client.connection import MAX_HEAD_BYTES, Connection, Connections, Headers, Origin, parse_origin
from penstock_loadtest.errors import TargetUnreachable
from tests.unit.loadtest.raw_server import LAST, Script, Site, Wire, chunked, response, site

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


class RecordingListener:
    """A listener that keeps what is reported to it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = {}
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.broken: str | None = None
        self.is_unanswered = False
        self.ends = 0
        self.over = asyncio.Event()
        self.has_head = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.has_head.set()

    def on_body(self, data: bytes, at: float) -> None:
        self.parts.append(data)
        self.times.append(at)

    def on_end(self, _at: float) -> None:
        self.ends += 1
        self.over.set()

    def on_broken(self, reason: str, _at: float, is_unanswered: bool) -> None:
        self.broken, self.is_unanswered = reason, is_unanswered
        self.ends += 1
        self.over.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


async def send_request(connection: Connection, data: bytes = ASK) -> RecordingListener:
    listener = RecordingListener()
    connection.request(data, listener)
    async with asyncio.timeout(20):
        await listener.over.wait()
    return listener


@asynccontextmanager
async def connected(script: Script) -> AsyncIterator[tuple[Site, Connections]]:
    """A server that plays `script`, and connections to it."""
    async with site(script) as there:
        connections = Connections(parse_origin(there.url))
        try:
            yield there, connections
        finally:
            connections.close()
            await asyncio.sleep(0)


def answers(*parts: bytes) -> Script:
    """A script that answers every request in the same way and keeps the connection open."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.read_request()
            await wire.send(*parts)

    return script


def answers_and_closes(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(*parts)

    return script


def record_one(
    script: Script, loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
) -> tuple[RecordingListener, bool]:
    """The listener of one request, on the kind of event loop that the tester runs on, and whether its connection may be
    used again."""

    async def main() -> tuple[RecordingListener, bool]:
        async with connected(script) as (_, connections):
            listener = await send_request(await connections.connect())
            return listener, connections.take_idle() is not None

    with asyncio.Runner(loop_factory=loop) as runner:
        listener, is_kept = runner.run(main())
    assert listener.ends == 1
    return listener, is_kept


# --- whole responses


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_body_of_known_length_comes_whole_and_the_connection_is_kept(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    listener, is_kept = record_one(answers(response(b"hello", "X-Twice: 1", "x-twice: 2")), loop)

    assert (listener.status, listener.body, listener.headers["x-twice"]) == (200, b"hello", "2")
    assert listener.broken is None
    assert is_kept


def test_a_chunked_body_comes_whole_wherever_it_is_cut() -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"hel") + chunked(b"lo") + LAST
    listener, is_kept = record_one(answers(*[whole[i : i + 1] for i in range(len(whole))]))

    assert listener.body == b"hello"
    assert is_kept


def test_a_body_without_length_ends_with_the_connection() -> None:
    listener, is_kept = record_one(answers_and_closes(b"HTTP/1.0 200 OK\r\n\r\n", b"hel", b"lo"))

    assert listener.body == b"hello"
    assert listener.broken is None
    assert not is_kept


def test_interim_responses_are_passed_over() -> None:
    listener, is_kept = record_one(
        answers(
            b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n" + response(b"hello")
        )
    )

    assert (listener.status, listener.body) == (200, b"hello")
    assert "x-early" not in listener.headers
    assert is_kept


def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    listener, is_kept = record_one(answers(response(b"hello", "connection: close")))

    assert listener.body == b"hello"
    assert not is_kept


async def test_a_response_before_the_request_was_read_is_heard_and_its_connection_is_not_kept() -> None:
    async def script(wire: Wire) -> None:
        await wire.send(response(b"too large", status="413 Content Too Large"))
        await asyncio.get_running_loop().create_future()  # never reads

    async with connected(script) as (_, connections):
        listener = await send_request(
            await connections.connect(), b"POST / HTTP/1.1\r\ncontent-length: 67108864\r\n\r\n" + b"x" * (64 << 20)
        )

        assert (listener.status, listener.body) == (413, b"too large")
        assert connections.take_idle() is None


async def test_arrivals_are_timed_apart() -> None:
    pause_s, listener = 0.02, RecordingListener()

    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na")
        while not listener.parts:  # noqa: ASYNC110 (the part of a body has no event)
            await asyncio.sleep(0)
        await asyncio.sleep(pause_s)
        await wire.send(b"b")
        await wire.wait_closed()

    async with connected(script) as (_, connections):
        connection = await connections.connect()
        before = time.perf_counter()
        connection.request(ASK, listener)
        async with asyncio.timeout(20):
            await listener.over.wait()

    assert listener.parts == [b"a", b"b"]
    assert before < listener.times[0] <= listener.times[1] - pause_s / 2
    assert listener.times[1] < time.perf_counter()


# --- responses that break


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello")],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\nhello"],
    ],
    ids=["length", "between chunks", "inside a chunk"],
)
def test_a_body_that_is_cut_off_is_broken(parts: list[bytes]) -> None:
    listener, is_kept = record_one(answers_and_closes(*parts))

    assert listener.body == b"hello"
    assert listener.broken == "the connection was closed"
    assert not listener.is_unanswered
    assert not is_kept


@pytest.mark.parametrize(("parts", "is_unanswered"), [([], True), ([b"HTTP/1.1 200"], False)])
def test_a_connection_closed_in_place_of_a_response_says_whether_anything_came(
    parts: list[bytes], is_unanswered: bool
) -> None:
    listener, _ = record_one(answers_and_closes(*parts))

    assert listener.broken == "the connection was closed"
    assert listener.is_unanswered == is_unanswered


def test_a_reset_is_told_by_its_kind() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        wire.reset()

    listener, _ = record_one(script)

    assert listener.broken in ("the connection broke (ConnectionResetError)", "the connection was closed")
    assert listener.is_unanswered


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what came is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "what came is not HTTP/1.1"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            "the server changed to another protocol",
        ),
        (
            b"HTTP/1.1 200 OK\r\n" + b"x-much: of it\r\n" * 5000,
            f"the head of the response is longer than {MAX_HEAD_BYTES} bytes",
        ),
    ],
)
def test_what_is_no_response_breaks_the_connection_with_a_reason(answer: bytes, reason: str) -> None:
    listener, is_kept = record_one(answers(answer))

    assert listener.broken == reason
    assert not is_kept


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 200 OK\r\n", response(b"again")])
def test_a_connection_that_says_more_than_its_response_is_not_kept(surplus: bytes) -> None:
    listener, is_kept = record_one(answers(response(b"hello") + surplus))

    assert listener.body == b"hello"
    assert listener.broken is None
    assert not is_kept


async def test_a_server_that_speaks_unasked_loses_the_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(response(b"hello"))
        await wire.read_request()
        await wire.send(response(b"hello"), b"and more")
        await wire.wait_closed()

    async with connected(script) as (_, connections):
        connection = await connections.connect()
        await send_request(connection)
        listener = await send_request(connection)
        async with asyncio.timeout(20):
            while connection.is_open:  # noqa: ASYNC110 (an idle connection reports nothing)
                await asyncio.sleep(0)

        assert listener.body == b"hello"
        assert connections.take_idle() is None


async def test_after_closing_a_listener_gets_no_calls() -> None:
    async def script(wire: Wire) -> None:
        await wire.read_request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await wire.wait_closed()
        gone.set()

    gone = asyncio.Event()

    async with connected(script) as (_, connections):
        connection = await connections.connect()
        listener = RecordingListener()
        connection.request(ASK, listener)
        async with asyncio.timeout(20):
            await listener.has_head.wait()
            connection.close()
            await gone.wait()

        assert listener.ends == 0
        assert not connection.is_open


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + b"0\r\nx-trailer: ",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + b"1;extended=",
    ],
    ids=["interim responses", "a trailer", "the extension of a chunk"],
)
def test_what_is_no_body_and_does_not_end_is_refused(answer: bytes) -> None:
    listener, is_kept = record_one(answers(answer, *[answer if answer.endswith(b"\r\n\r\n") else b"x" * 1000] * 4000))

    assert listener.broken == f"the head of the response is longer than {MAX_HEAD_BYTES} bytes"
    assert not is_kept


def test_trailers_are_passed_over() -> None:
    listener, is_kept = record_one(
        answers(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + (b"0\r\nx-late: 1\r\n\r\n")
        )
    )

    assert listener.body == b"hello"
    assert "x-late" not in listener.headers
    assert is_kept


def test_a_body_that_is_coded_in_another_way_than_chunks_ends_with_the_connection() -> None:
    listener, _ = record_one(answers_and_closes(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", b"hello"))

    assert listener.body == b"hello"
    assert listener.broken is None


def test_what_came_before_nonsense_is_reported() -> None:
    listener, _ = record_one(
        answers(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + (b"nonsense\r\n"))
    )

    assert (listener.body, listener.broken) == (b"hello", "what came is not HTTP/1.1")


# --- the pool


async def test_an_idle_connection_is_used_again_and_the_last_used_comes_first() -> None:
    async with connected(answers(response(b"hello"))) as (there, connections):
        first, second = await connections.connect(), await connections.connect()
        await send_request(first)
        await send_request(second)

        assert connections.take_idle() is second
        assert connections.take_idle() is first
        assert connections.take_idle() is None
        assert len(there.connections) == 2


async def test_connections_that_the_server_closed_are_forgotten() -> None:
    async with connected(answers_and_closes(response(b"hello"))) as (_, connections):
        connection = await connections.connect()
        await send_request(connection)
        async with asyncio.timeout(20):
            while connection.is_open:  # noqa: ASYNC110 (an idle connection reports nothing)
                await asyncio.sleep(0)
            await asyncio.sleep(0)

        assert not connections._open
        assert not connections._idle


async def test_connections_do_not_wait_for_small_packets_to_fill() -> None:
    async with connected(answers()) as (_, connections):
        connection = await connections.connect()
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")

        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- reaching a server


def unreachable(url: str, timeout_s: float = 5.0) -> str:
    with pytest.raises(TargetUnreachable) as error, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Connections(parse_origin(url)).connect(timeout_s))
    return str(error.value)


def test_nothing_listening_is_one_sentence() -> None:
    port = free_port()

    assert (
        unreachable(f"http://127.0.0.1:{port}")
        == f"127.0.0.1:{port} can't be reached: nothing listens there (connection refused)."
    )


def test_a_name_that_is_no_name_is_one_sentence() -> None:
    assert (
        unreachable(f"http://{'x' * 64}.example:8000")
        == f"{'x' * 64}.example:8000 can't be reached: the name is not known."
    )


def test_a_server_that_does_not_take_connections_is_given_up_in_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        sentence = unreachable(f"http://127.0.0.1:{port}", 0.2)
        for other in waiting:
            other.close()

    assert sentence == f"127.0.0.1:{port} did not take the connection within 0.2 s."


async def test_of_several_addresses_one_that_listens_is_enough() -> None:
    async with site(answers(response(b"hello"))) as there:
        connections = Connections(Origin("localhost", there.port, False))
        addresses = connections._addresses
        addresses._known = ["127.0.0.2", "127.0.0.1"]  # nothing listens on the first
        listeners = [await send_request(await connections.connect()) for _ in range(3)]
        connections.close()
        await asyncio.sleep(0)

        assert [listener.body for listener in listeners] == [b"hello"] * 3
        assert addresses._known == ["127.0.0.1"]


async def test_an_address_that_does_not_answer_leaves_time_for_the_next_one() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(("127.0.0.2", port))
        async with site(answers(response(b"hello")), port=port):
            connections = Connections(Origin("localhost", port, False))
            connections._addresses._known = ["127.0.0.2", "127.0.0.1"]
            listener = await send_request(await connections.connect(4.0))
            connections.close()
            await asyncio.sleep(0)

            assert listener.body == b"hello"
        for other in waiting:
            other.close()


async def test_connections_go_to_all_addresses_of_a_name_in_turn() -> None:
    async with site(answers(response(b"hello")), host="0.0.0.0") as there:
        connections = Connections(Origin("localhost", there.port, False))
        connections._addresses._known = ["127.0.0.1", "127.0.0.2"]
        made = [await connections.connect() for _ in range(4)]
        peers = [connection._transport.get_extra_info("peername")[0] for connection in made if connection._transport]
        connections.close()
        await asyncio.sleep(0)

        assert sorted(peers) == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]


async def test_a_name_is_resolved_anew_when_no_address_is_left() -> None:
    async with site(answers(response(b"hello"))) as there:
        connections = Connections(Origin("localhost", there.port, False))
        connections._addresses._known = ["127.0.0.2"]
        with pytest.raises(TargetUnreachable, match="connection refused"):
            await connections.connect()
        listener = await send_request(await connections.connect())
        connections.close()
        await asyncio.sleep(0)

        assert listener.body == b"hello"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host/v1",
        "http://",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://a b/v1",
        "http://a/\n",
        "",
    ],
)
def test_what_is_no_address_of_a_server_is_one_sentence(url: str) -> None:
    with pytest.raises(
        TargetUnreachable, match=r"is no address of a server; one looks like http://127.0.0.1:8000/v1\.$"
    ):
        parse_origin(url)


def test_the_host_header_names_the_port_only_where_it_is_not_the_usual_one() -> None:
    urls = ["http://a/v1", "https://a", "http://a:443", "https://a:8443/x", "http://[::1]:8000", "http://[::1]"]

    assert [parse_origin(url).host_header for url in urls] == ["a", "a", "a:443", "a:8443", "[::1]:8000", "[::1]"]


def test_a_url_with_a_password_is_refused_without_being_repeated() -> None:
    with pytest.raises(TargetUnreachable) as error:
        parse_origin("http://user:secret@host/v1")

    assert str(error.value).startswith("The server's URL holds a user or a password;")
    assert "secret" not in str(error.value)


def test_names_in_other_scripts_are_resolved_as_name_servers_know_them() -> None:
    assert parse_origin("http://bücher.example/v1").host == "xn--bcher-kva.example"


async def test_a_literal_address_of_ipv6_is_connected_to() -> None:
    try:
        async with site(answers(response(b"hello")), host="::1") as there:
            connections = Connections(parse_origin(f"http://[::1]:{there.port}/v1"))
            listener = await send_request(await connections.connect())
            connections.close()
            await connections.wait_closed()

            assert listener.body == b"hello"
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Paths of a self-signed certificate for 127.0.0.1 and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-out",
        str(certificate),
        "-keyout",
        str(key),
        *name,
    ]
    try:
        subprocess.run(make, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl command to make a certificate with")
    return certificate, key


async def test_tls_speaks_to_a_server_whose_certificate_is_trusted_and_to_no_other(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)

    async with site(answers(response(b"hello")), tls=tls) as there:
        strangers = Connections(parse_origin(there.url))
        with pytest.raises(TargetUnreachable) as error:
            await strangers.connect()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        connections = Connections(parse_origin(there.url))
        listener = await send_request(await connections.connect())
        connections.close()
        await connections.wait_closed()  # TLS is put down in more than one round of the loop

        assert listener.body == b"hello"
        assert str(error.value).startswith(
            f"127.0.0.1:{there.port} can't be spoken to by TLS: its certificate is not trusted (self"
        )


async def test_tls_to_a_server_without_it_is_one_sentence() -> None:
    async with site(lambda wire: wire.send(response(b"", status="400 Bad Request"))) as there:
        with pytest.raises(TargetUnreachable, match=r"^127\.0\.0\.1:\d+ can't be (spoken to by TLS|reached): .+\.$"):
            await Connections(Origin("127.0.0.1", there.port, True)).connect()
