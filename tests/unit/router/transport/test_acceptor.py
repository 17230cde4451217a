"""Peers that open a connection and agree on nothing; beside them those who do, on both kinds of event loop."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvloop

from penstock.base.tls import TlsContexts, TlsFiles
from penstock.router.transport.connections import ConnectionLimits
from penstock.router.transport.listener import Listener
from tests.certificates import Authority
from tests.unit.router.transport.test_listener import App, free_port, rest_of

TIMEOUT_S = 10.0
SHORT_S = 0.05

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Awaitable[None]], None]


class Door:
    """A listener that speaks TLS, and what connects to it."""

    def __init__(self, listener: Listener, port: int, trusting: ssl.SSLContext) -> None:
        self.listener = listener
        self.port = port
        self.trusting = trusting
        self._writers: list[asyncio.StreamWriter] = []

    async def knock(self, data: bytes = b"") -> asyncio.StreamReader:
        """Open a connection and send something that is no TLS."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(data)
        return reader

    async def get(self) -> str:
        async with httpx.AsyncClient(verify=self.trusting, trust_env=False, timeout=TIMEOUT_S) as client:
            return (await client.get(f"https://localhost:{self.port}/")).text

    async def until_empty(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.listener.connections):  # noqa: ASYNC110  # the register has no event
                await asyncio.sleep(0.001)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def door(folder: Path, limits: ConnectionLimits) -> AsyncIterator[Door]:
    files = Authority().issue(folder, "localhost")
    app, port = App(), free_port()
    app.may_finish.set()
    anyone = TlsFiles(certificate=files.certificate, key=files.key)
    listener = Listener(app, "127.0.0.1", [port], 1, limits, tls=TlsContexts(anyone, is_server=True).newest)
    listener.start()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(files.ca)
    subject = Door(listener, port, trusting)
    try:
        yield subject
    finally:
        subject.hang_up()
        await listener.stop()


@LOOPS
def test_connections_that_never_agree_on_a_key_are_as_few_as_any_without_one(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with door(tmp_path, ConnectionLimits(max_connections=20)) as subject:
            readers = [await subject.knock() for _ in range(60)]

            assert await subject.get() == "begundone"
            assert len(subject.listener.connections) <= 10
            with suppress(ConnectionError):
                assert not await rest_of(readers[0])

    run(main())


@LOOPS
@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "part", "plain"])
def test_a_handshake_has_a_deadline(run: Run, tmp_path: Path, data: bytes) -> None:
    async def main() -> None:
        async with door(tmp_path, ConnectionLimits(head_timeout_s=SHORT_S)) as subject:
            reader = await subject.knock(data)

            with suppress(ConnectionError):
                await rest_of(reader)
            await subject.until_empty()

    run(main())


@LOOPS
def test_many_that_agree_at_once_are_all_answered(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with door(tmp_path, ConnectionLimits()) as subject:
            answers = await asyncio.gather(*[subject.get() for _ in range(20)])

            assert set(answers) == {"begundone"}
            await subject.until_empty()

    run(main())
