"""The token stream by mutual TLS: the real ends of both sides, a replica's and a router's."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.base.errors import ConfigError
from penstock.base.tls import TlsContexts, TlsFiles
from penstock.router.replicas.link import Greeting, connect
from penstock.wire import channel
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import DownFrame
from penstock.wire.proof import MAX_OPENING_BYTES
from penstock.wire.stream_config import GATEWAY_NAME, REPLICA_NAME, StreamConfig
from penstock.workers.serving import session
from penstock.workers.serving.opening import Door
from tests.certificates import Authority
from tests.unit.workers.stream_fakes import EPOCH, IDLE, SECRET, TIMEOUT_S, Bench, gain, soon, submit

pytestmark = pytest.mark.uvloop
ME = Greeting("gateway-1", EPOCH, SECRET)


class Place(NamedTuple):
    bench: Bench
    gateway: TlsFiles
    authority: Authority


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Place]:
    """A replica that takes streams by TLS only."""
    authority = Authority()
    files = authority.issue(folder / "replica", REPLICA_NAME)
    bench = Bench()
    bench.server.door = Door(SECRET, EPOCH, router_name=GATEWAY_NAME)
    tls = TlsContexts(files, is_server=True).newest
    bench.address = f"127.0.0.1:{await bench.server.start(bench.engine, IDLE, '127.0.0.1', tls=tls)}"
    try:
        yield Place(bench, authority.issue(folder / "gateway", GATEWAY_NAME), authority)
    finally:
        bench.server.stop()


async def try_to_connect(bench: Bench, files: TlsFiles | None) -> None:
    tls = None if files is None else TlsContexts(files, is_server=False).newest
    async with connect(bench.address, ME, lambda _: None, lambda: None, tls):
        pass


async def test_a_sequence_is_served_by_tls(tmp_path: Path) -> None:
    frames: asyncio.Queue[DownFrame] = asyncio.Queue()
    async with serving(tmp_path) as place:
        tls = TlsContexts(place.gateway, is_server=False).newest
        async with connect(place.bench.address, ME, frames.put_nowait, lambda: None, tls) as link:
            link.submit(submit(1, num_tokens=50_000))
            sequence = await soon(place.bench.engine.submitted)
            place.bench.engine.step(gain(sequence, 7))
            async with asyncio.timeout(TIMEOUT_S):
                while not (deltas := (await frames.get()).deltas):
                    pass

            assert len(sequence.token_ids) == 50_001
            assert deltas[0].token_ids == [7]


async def test_a_gateway_without_tls_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        with pytest.raises(ReplicaLost):
            await try_to_connect(place.bench, None)


async def test_a_gateway_with_a_certificate_of_another_ca_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        stranger = Authority("another CA").issue(tmp_path / "stranger", GATEWAY_NAME, ca=place.authority)

        with pytest.raises(ReplicaLost):
            await try_to_connect(place.bench, stranger)


async def test_a_replicas_certificate_is_no_gateways(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        replica = place.authority.issue(tmp_path / "another", REPLICA_NAME)

        with pytest.raises(ReplicaLost, match=GATEWAY_NAME):
            await try_to_connect(place.bench, replica)


async def test_a_gateway_shows_itself_to_no_server_of_another_ca_or_role(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        doubting = place.authority.issue(tmp_path / "doubting", GATEWAY_NAME, ca=Authority("another CA"))
        with pytest.raises(ReplicaLost):
            await try_to_connect(place.bench, doubting)

    gateway = Authority()
    files = gateway.issue(tmp_path / "false", GATEWAY_NAME)
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, "127.0.0.1", 0, ssl=TlsContexts(files, is_server=True).newest
    )
    with pytest.raises(ReplicaLost):
        async with connect(
            f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            ME,
            lambda _: None,
            lambda: None,
            TlsContexts(files, is_server=False).newest,
        ):
            pass
    server.close()


async def test_a_certificate_without_the_secret_opens_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        tls = TlsContexts(place.gateway, is_server=False).newest
        wrong = ME._replace(secret=b"t" * 32)

        with pytest.raises(ReplicaLost, match="not the replica of this platform"):
            async with connect(place.bench.address, wrong, lambda _: None, lambda: None, tls):
                pass


async def test_connections_that_never_come_to_tls_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OPENING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(channel, "TLS_S", 0.2)
    async with serving(tmp_path) as place:
        host, _, port = place.bench.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""

        assert place.bench.server._connections == set()
        assert len(place.bench.server._lobby) == 0
        writer.close()


async def test_an_opening_too_long_is_no_better_by_tls(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        host, _, port = place.bench.address.rpartition(":")
        tls = TlsContexts(place.gateway, is_server=False).newest
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=REPLICA_NAME)
        writer.write((MAX_OPENING_BYTES + 1).to_bytes(4, "little") + b"x")
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(ConnectionError, ssl.SSLError):  # cut without TLS's goodbye
                assert await reader.read() == b""

        writer.close()


def test_a_stream_by_tls_names_a_ca() -> None:
    with pytest.raises(ConfigError, match=r"stream\.tls\.ca"):
        StreamConfig(tls=TlsFiles(certificate="c", key="k"))
