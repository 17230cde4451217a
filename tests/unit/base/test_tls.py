import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.base.tls import CHECK_S, TlsContexts, TlsFiles
from tests.certificates import Authority

TIMEOUT_S = 10.0
SERVER, CLIENT = "replica.penstock", "gateway.penstock"
LOOPS = [pytest.param(None, id="asyncio"), pytest.param("uvloop", marks=pytest.mark.uvloop, id="uvloop")]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def greeting_server(contexts: TlsContexts) -> AsyncIterator[int]:
    """Say hello to whoever comes in; gives the port."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=contexts.newest)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def is_greeted(port: int, files: TlsFiles, name: str = SERVER) -> bool:
    """Whether a client with these files is served, and accepts the server."""
    context = TlsContexts(files, is_server=False).newest
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
            found = await reader.read()
            writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return found == b"hello"


def crossed(own: TlsFiles, other: TlsFiles) -> TlsFiles:
    """The certificate of one, checking by the other's CA."""
    return TlsFiles(certificate=own.certificate, key=own.key, ca=other.ca)


@pytest.mark.parametrize("loop", LOOPS)
async def test_both_sides_need_a_certificate_of_the_ca(loop: str | None, tmp_path: Path) -> None:
    ours, theirs = Authority(), Authority("another CA")
    server, client = ours.issue(tmp_path / "server", SERVER), ours.issue(tmp_path / "client", CLIENT)
    stranger = theirs.issue(tmp_path / "stranger", CLIENT)

    async with greeting_server(TlsContexts(server, is_server=True)) as port:
        assert await is_greeted(port, client)
        assert not await is_greeted(port, stranger), "it trusts another CA than the server's"
        assert not await is_greeted(port, crossed(stranger, client)), "its certificate is of another CA"
        assert not await is_greeted(port, client, name="another.name")


async def test_who_has_no_certificate_or_no_tls_is_refused(tmp_path: Path) -> None:
    server = Authority().issue(tmp_path / "server", SERVER)

    async with greeting_server(TlsContexts(server, is_server=True)) as port:
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(server.ca)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # noqa: PT012 (TLS 1.3 tells it with the first read)
            reader, _ = await asyncio.open_connection("127.0.0.1", port, ssl=bare, server_hostname=SERVER)
            if not await reader.read():
                raise ConnectionResetError
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            assert b"hello" not in await reader.read()
        writer.close()


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_listening_server_takes_rotated_files_and_forgets_the_old_ca(loop: str | None, tmp_path: Path) -> None:
    before, after, clock = Authority(), Authority("the next CA"), Clock()
    server = before.issue(tmp_path / "server", SERVER)
    old, new = before.issue(tmp_path / "old", CLIENT), after.issue(tmp_path / "new", CLIENT)

    async with greeting_server(TlsContexts(server, is_server=True, clock=clock)) as port:
        assert await is_greeted(port, old)
        after.issue(tmp_path / "server", SERVER)
        assert await is_greeted(port, old), "not looked at again so soon"
        clock.now_s += CHECK_S

        assert await is_greeted(port, new)
        assert not await is_greeted(port, old)
        assert not await is_greeted(port, crossed(old, new)), "a certificate of the CA that is gone"


async def test_a_session_of_before_is_not_resumed_past_the_check_of_its_certificate(tmp_path: Path) -> None:
    """A server of TLS 1.2 resumes what it remembers without looking at the client's certificate again."""
    before, after, clock = Authority(), Authority("the next CA"), Clock()
    server = before.issue(tmp_path / "server", SERVER)
    old, new = before.issue(tmp_path / "old", CLIENT), after.issue(tmp_path / "new", CLIENT)
    client = TlsContexts(old, is_server=False).newest
    client.load_verify_locations(new.ca)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    contexts = TlsContexts(server, is_server=True, clock=clock)

    async with greeting_server(contexts) as port:
        first, session = await asyncio.to_thread(greeted, port, client, None)
        after.issue(tmp_path / "server", SERVER)
        clock.now_s += CHECK_S

        assert not (await asyncio.to_thread(greeted, port, client, session))[0]
        assert not first, "a client that can't do better is not let in at all"


def greeted(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
    """Whether a client is served, and the session that it could resume."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as plain:
        try:
            connection = context.wrap_socket(plain, server_hostname=SERVER, session=session)
            return connection.recv(5) == b"hello", connection.session
        except (ssl.SSLError, ConnectionError):
            return False, None


async def test_a_client_takes_rotated_files(tmp_path: Path) -> None:
    before, after, clock = Authority(), Authority("the next CA"), Clock()
    files = before.issue(tmp_path / "client", CLIENT)
    contexts = TlsContexts(files, is_server=False, clock=clock)
    first = contexts.newest
    clock.now_s += CHECK_S
    assert contexts.newest is first, "nothing has changed"

    after.issue(tmp_path / "client", CLIENT)
    clock.now_s += CHECK_S

    assert contexts.newest is not first
    assert contexts.newest.get_ca_certs()[0]["subject"] == ((("commonName", "the next CA"),),)


def test_files_half_written_leave_what_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, clock = Authority(), Clock()
    files = authority.issue(tmp_path / "client", CLIENT)
    contexts = TlsContexts(files, is_server=False, clock=clock)
    first = contexts.newest
    other = authority.issue(tmp_path / "other", CLIENT)

    Path(files.certificate).write_bytes(Path(other.certificate).read_bytes())
    clock.now_s += CHECK_S
    assert contexts.newest is first
    assert "tls files can't be used" in caplog.messages

    Path(files.key).write_bytes(Path(other.key).read_bytes())
    clock.now_s += CHECK_S
    assert contexts.newest is not first


@pytest.mark.parametrize("content", [None, b"", b"no certificate"], ids=["missing", "empty", "garbage"])
def test_files_that_are_no_good_at_the_start_are_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "server", SERVER)
    Path(files.certificate).unlink()
    if content is not None:
        Path(files.certificate).write_bytes(content)

    with pytest.raises(ConfigError, match=r"TLS can't be had with .*tls\.crt"):
        TlsContexts(files, is_server=True)
