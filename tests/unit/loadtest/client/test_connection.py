"""HTTP/1.1 as servers speak it, byte by byte, over real sockets."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from penstock_loadtest.client.connection import MAX_HEAD_BYTES, Connection, Connections, Headers, Origin, parse_origin
from penstock_loadtest.errors import TargetUnreachable
from tests.unit.loadtest.raw_server import LAST, Script, Site, Wire, chunked, response, site

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


class Ear:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = {}
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.broken: str | None = None
        self.is_unanswered = False
        self.ends = 0
        self.over = asyncio.Event()
        self.heard = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.heard.set()

    def on_body(self, data: bytes, at: float) -> None:
        self.pieces.append(data)
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
        return b"".join(self.pieces)


async def asks(connection: Connection, data: bytes = ASK) -> Ear:
    ear = Ear()
    connection.request(data, ear)
    async with asyncio.timeout(20):
        await ear.over.wait()
    return ear


def run(
    script: Script,
    test: Callable[[Site, Connections], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    """On the loop that the tester runs on."""

    async def main() -> None:
        async with site(script) as there:
            connections = Connections(parse_origin(there.url))
            try:
                await test(there, connections)
            finally:
                connections.close()
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def says(*parts: bytes) -> Script:
    """The same to every request, and the connection stays open."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.asked()
            await wire.say(*parts)

    return script


def says_and_closes(*parts: bytes) -> Script:
    async def script(wire: Wire) -> None:
        await wire.asked()
        await wire.say(*parts)

    return script


def heard(script: Script, loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> tuple[Ear, bool]:
    """What one request hears, and whether its connection may be used again."""
    found: list[tuple[Ear, bool]] = []

    async def test(_: Site, connections: Connections) -> None:
        ear = await asks(await connections.connect())
        found.append((ear, connections.take_idle() is not None))

    run(script, test, loop)
    ear, is_kept = found[0]
    assert ear.ends == 1
    return ear, is_kept


# --- whole responses


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_body_of_known_length_comes_whole_and_the_connection_is_kept(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    ear, is_kept = heard(says(response(b"hello", "X-Twice: 1", "x-twice: 2")), loop)

    assert (ear.status, ear.body, ear.headers["x-twice"]) == (200, b"hello", "2")
    assert ear.broken is None
    assert is_kept


def test_a_chunked_body_comes_whole_wherever_it_is_cut() -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"hel") + chunked(b"lo") + LAST
    ear, is_kept = heard(says(*[whole[i : i + 1] for i in range(len(whole))]))

    assert ear.body == b"hello"
    assert is_kept


def test_a_body_without_length_ends_with_the_connection() -> None:
    ear, is_kept = heard(says_and_closes(b"HTTP/1.0 200 OK\r\n\r\n", b"hel", b"lo"))

    assert ear.body == b"hello"
    assert ear.broken is None
    assert not is_kept


def test_interim_responses_are_passed_over() -> None:
    ear, is_kept = heard(
        says(b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n" + response(b"hello"))
    )

    assert (ear.status, ear.body) == (200, b"hello")
    assert "x-early" not in ear.headers
    assert is_kept


def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    ear, is_kept = heard(says(response(b"hello", "connection: close")))

    assert ear.body == b"hello"
    assert not is_kept


def test_a_response_before_the_request_was_read_is_heard_and_its_connection_is_not_kept() -> None:
    async def script(wire: Wire) -> None:
        await wire.say(response(b"too large", status="413 Content Too Large"))
        await asyncio.get_running_loop().create_future()  # never reads

    async def test(_: Site, connections: Connections) -> None:
        ear = await asks(
            await connections.connect(), b"POST / HTTP/1.1\r\ncontent-length: 67108864\r\n\r\n" + b"x" * (64 << 20)
        )

        assert (ear.status, ear.body) == (413, b"too large")
        assert connections.take_idle() is None

    run(script, test)


def test_arrivals_are_timed_apart() -> None:
    pause_s = 0.02

    async def script(wire: Wire) -> None:
        await wire.asked()
        await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na")
        await asyncio.sleep(pause_s)
        await wire.say(b"b")
        await wire.gone()

    before = time.perf_counter()
    ear, _ = heard(script)

    assert ear.pieces == [b"a", b"b"]
    assert before < ear.times[0] <= ear.times[1] - pause_s / 2
    assert ear.times[1] < time.perf_counter()


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
    ear, is_kept = heard(says_and_closes(*parts))

    assert ear.body == b"hello"
    assert ear.broken == "the connection was closed"
    assert not ear.is_unanswered
    assert not is_kept


@pytest.mark.parametrize(("parts", "is_unanswered"), [([], True), ([b"HTTP/1.1 200"], False)])
def test_a_connection_closed_in_place_of_a_response_says_whether_anything_came(
    parts: list[bytes], is_unanswered: bool
) -> None:
    ear, _ = heard(says_and_closes(*parts))

    assert ear.broken == "the connection was closed"
    assert ear.is_unanswered == is_unanswered


def test_a_reset_is_told_by_its_kind() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.reset()

    ear, _ = heard(script)

    assert ear.broken in ("the connection broke (ConnectionResetError)", "the connection was closed")
    assert ear.is_unanswered


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
    ear, is_kept = heard(says(answer))

    assert ear.broken == reason
    assert not is_kept


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 200 OK\r\n", response(b"again")])
def test_a_connection_that_says_more_than_its_response_is_not_kept(surplus: bytes) -> None:
    ear, is_kept = heard(says(response(b"hello") + surplus))

    assert ear.body == b"hello"
    assert ear.broken is None
    assert not is_kept


def test_a_server_that_speaks_unasked_loses_the_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        await wire.say(response(b"hello"))
        await wire.asked()
        await wire.say(response(b"hello"), b"and more")
        await wire.gone()

    async def test(_: Site, connections: Connections) -> None:
        connection = await connections.connect()
        await asks(connection)
        ear = await asks(connection)
        async with asyncio.timeout(20):
            while connection.is_open:  # noqa: ASYNC110 (nobody is told of what an idle connection does)
                await asyncio.sleep(0)

        assert ear.body == b"hello"
        assert connections.take_idle() is None

    run(script, test)


def test_after_closing_a_listener_hears_no_more() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await wire.gone()
        gone.set()

    gone = asyncio.Event()

    async def test(_: Site, connections: Connections) -> None:
        connection = await connections.connect()
        ear = Ear()
        connection.request(ASK, ear)
        async with asyncio.timeout(20):
            await ear.heard.wait()
            connection.close()
            await gone.wait()

        assert ear.ends == 0
        assert not connection.is_open

    run(script, test)


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
    ear, is_kept = heard(says(answer, *[answer if answer.endswith(b"\r\n\r\n") else b"x" * 1000] * 4000))

    assert ear.broken == f"the head of the response is longer than {MAX_HEAD_BYTES} bytes"
    assert not is_kept


def test_trailers_are_passed_over() -> None:
    ear, is_kept = heard(
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + b"0\r\nx-late: 1\r\n\r\n")
    )

    assert ear.body == b"hello"
    assert "x-late" not in ear.headers
    assert is_kept


def test_a_body_that_is_coded_in_another_way_than_chunks_ends_with_the_connection() -> None:
    ear, _ = heard(says_and_closes(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", b"hello"))

    assert ear.body == b"hello"
    assert ear.broken is None


def test_what_came_before_nonsense_is_heard() -> None:
    ear, _ = heard(says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + b"nonsense\r\n"))

    assert (ear.body, ear.broken) == (b"hello", "what came is not HTTP/1.1")


# --- the pool


def test_an_idle_connection_is_used_again_and_the_last_used_comes_first() -> None:
    async def test(there: Site, connections: Connections) -> None:
        first, second = await connections.connect(), await connections.connect()
        await asks(first)
        await asks(second)

        assert connections.take_idle() is second
        assert connections.take_idle() is first
        assert connections.take_idle() is None
        assert len(there.connections) == 2

    run(says(response(b"hello")), test)


def test_connections_that_the_server_closed_are_forgotten() -> None:
    async def test(_: Site, connections: Connections) -> None:
        connection = await connections.connect()
        await asks(connection)
        async with asyncio.timeout(20):
            while connection.is_open:  # noqa: ASYNC110 (nobody is told of what an idle connection does)
                await asyncio.sleep(0)
            await asyncio.sleep(0)

        assert not connections._open
        assert not connections._idle

    run(says_and_closes(response(b"hello")), test)


def test_connections_do_not_wait_for_small_packets_to_fill() -> None:
    async def test(_: Site, connections: Connections) -> None:
        connection = await connections.connect()
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")

        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(says(), test)


# --- reaching a server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_of_several_addresses_one_that_listens_is_enough() -> None:
    async def main() -> None:
        async with site(says(response(b"hello"))) as there:
            connections = Connections(Origin("localhost", there.port, False))
            addresses = connections._addresses
            addresses._known = ["127.0.0.2", "127.0.0.1"]  # nothing listens on the first
            ears = [await asks(await connections.connect()) for _ in range(3)]
            connections.close()
            await asyncio.sleep(0)

            assert [ear.body for ear in ears] == [b"hello"] * 3
            assert addresses._known == ["127.0.0.1"]

    asyncio.run(main())


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one() -> None:
    async def main(port: int) -> None:
        async with site(says(response(b"hello")), port=port):
            connections = Connections(Origin("localhost", port, False))
            connections._addresses._known = ["127.0.0.2", "127.0.0.1"]
            ear = await asks(await connections.connect(1.0))
            connections.close()
            await asyncio.sleep(0)

            assert ear.body == b"hello"

    with socket.socket() as full:
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(("127.0.0.2", port))
        asyncio.run(main(port))
        for other in waiting:
            other.close()


def test_connections_go_to_all_addresses_of_a_name_in_turn() -> None:
    async def main() -> None:
        async with site(says(response(b"hello")), host="0.0.0.0") as there:
            connections = Connections(Origin("localhost", there.port, False))
            connections._addresses._known = ["127.0.0.1", "127.0.0.2"]
            made = [await connections.connect() for _ in range(4)]
            peers = [
                connection._transport.get_extra_info("peername")[0] for connection in made if connection._transport
            ]
            connections.close()
            await asyncio.sleep(0)

            assert sorted(peers) == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]

    asyncio.run(main())


def test_a_name_is_asked_for_anew_when_no_address_is_left() -> None:
    async def main() -> None:
        async with site(says(response(b"hello"))) as there:
            connections = Connections(Origin("localhost", there.port, False))
            connections._addresses._known = ["127.0.0.2"]
            with pytest.raises(TargetUnreachable, match="connection refused"):
                await connections.connect()
            ear = await asks(await connections.connect())
            connections.close()
            await asyncio.sleep(0)

            assert ear.body == b"hello"

    asyncio.run(main())


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


def test_names_in_other_scripts_are_asked_for_as_name_servers_know_them() -> None:
    assert parse_origin("http://bücher.example/v1").host == "xn--bcher-kva.example"


def test_a_literal_address_of_ipv6_is_connected_to() -> None:
    async def main() -> None:
        try:
            async with site(says(response(b"hello")), host="::1") as there:
                connections = Connections(parse_origin(f"http://[::1]:{there.port}/v1"))
                ear = await asks(await connections.connect())
                connections.close()
                await connections.wait_closed()

                assert ear.body == b"hello"
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")

    asyncio.run(main())


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
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


def test_tls_speaks_to_a_server_whose_certificate_is_trusted_and_to_no_other(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)

    async def main() -> None:
        async with site(says(response(b"hello")), tls=tls) as there:
            strangers = Connections(parse_origin(there.url))
            with pytest.raises(TargetUnreachable) as error:
                await strangers.connect()
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
            connections = Connections(parse_origin(there.url))
            ear = await asks(await connections.connect())
            connections.close()
            await asyncio.sleep(0.01)  # TLS is put down in more than one round of the loop

            assert ear.body == b"hello"
            assert str(error.value).startswith(
                f"127.0.0.1:{there.port} can't be spoken to by TLS: its certificate is not trusted (self"
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_tls_to_a_server_without_it_is_one_sentence() -> None:
    async def main() -> None:
        async with site(lambda wire: wire.say(response(b"", status="400 Bad Request"))) as there:
            with pytest.raises(
                TargetUnreachable, match=r"^127\.0\.0\.1:\d+ can't be (spoken to by TLS|reached): .+\.$"
            ):
                await Connections(Origin("127.0.0.1", there.port, True)).connect()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
