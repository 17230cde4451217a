import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from bench.support.free_ports import free_port
from penstock.base.errors import ConfigError
from penstock.base.tls import TlsContexts, TlsFiles
from penstock.router.transport.listener import Listener, bind
from tests.certificates import Authority

TIMEOUT_S = 10.0
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers `begun`, and `done` once it may."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await self.may_finish.wait()
        await send({"type": "http.response.body", "body": b"done"})


async def asking(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which an answer has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    async with asyncio.timeout(TIMEOUT_S):
        await reader.readuntil(b"begun\r\n")
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


def test_it_listens_on_several_ports() -> None:
    async def main() -> None:
        app, ports = App(), [free_port(), free_port()]
        listener = Listener(app, "127.0.0.1", ports, 10)
        listener.start()
        connections = [await asking(port) for port in ports]
        app.may_finish.set()
        stopping = asyncio.create_task(listener.stop())

        for reader, writer in connections:
            assert b"done" in await rest_of(reader)
            writer.close()
        await stopping

    uvloop.run(main())


def test_an_answer_under_way_is_finished_before_the_listener_stops() -> None:
    async def main() -> None:
        app, port = App(), free_port()
        listener = Listener(app, "127.0.0.1", [port], 10)
        serving = listener.start()
        reader, writer = await asking(port)
        stopping = asyncio.create_task(listener.stop())
        app.may_finish.set()

        assert b"done" in await rest_of(reader)
        await stopping
        assert serving.done()
        writer.close()

    uvloop.run(main())


def test_an_answer_that_takes_too_long_is_cut() -> None:
    async def main() -> None:
        port = free_port()
        listener = Listener(App(), "127.0.0.1", [port], 1)
        listener.start()
        reader, writer = await asking(port)
        async with asyncio.timeout(TIMEOUT_S):
            await listener.stop()

        assert b"done" not in await rest_of(reader)
        writer.close()

    uvloop.run(main())


def test_the_port_can_be_had_again_at_once_after_connections_were_closed_from_this_side() -> None:
    port = free_port()
    first = bind("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = first.accept()
        accepted.close()
        first.close()
        assert client.recv(1) == b""  # and this side's connection is in TIME_WAIT after this block

    bind("127.0.0.1", port).close()


def test_a_port_in_use_is_refused_with_a_sentence() -> None:
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]

    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        bind("127.0.0.1", port)
    taken.close()


async def test_by_tls_it_speaks_https_and_nothing_else(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "http", "localhost")
    app, port = App(), free_port()
    app.may_finish.set()
    anyone = TlsFiles(certificate=files.certificate, key=files.key)
    listener = Listener(app, "127.0.0.1", [port], 10, tls=TlsContexts(anyone, is_server=True).newest)
    listener.start()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(files.ca)

    async with httpx.AsyncClient(verify=trusting, trust_env=False) as client:
        answer = await client.get(f"https://localhost:{port}/", timeout=TIMEOUT_S)
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://localhost:{port}/", timeout=TIMEOUT_S)
    async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as doubting:
        with pytest.raises(httpx.ConnectError):
            await doubting.get(f"https://localhost:{port}/", timeout=TIMEOUT_S)
    await listener.stop()

    assert answer.text == "begundone"


async def test_with_a_ca_it_lets_in_who_has_a_certificate_of_it(tmp_path: Path) -> None:
    authority = Authority()
    server, client_files = authority.issue(tmp_path / "http", "localhost"), authority.issue(tmp_path / "client", "me")
    app, port = App(), free_port()
    app.may_finish.set()
    listener = Listener(app, "127.0.0.1", [port], 10, tls=TlsContexts(server, is_server=True).newest)
    listener.start()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(server.ca)

    async with httpx.AsyncClient(verify=bare, trust_env=False) as stranger:
        with pytest.raises(httpx.TransportError):
            await stranger.get(f"https://localhost:{port}/", timeout=TIMEOUT_S)
    own = TlsContexts(client_files, is_server=False).newest
    async with httpx.AsyncClient(verify=own, trust_env=False) as client:
        answer = await client.get(f"https://localhost:{port}/", timeout=TIMEOUT_S)
    await listener.stop()

    assert answer.status_code == 200
