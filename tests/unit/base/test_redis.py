import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.exceptions

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)
    server.start()
    yield server
    server.stop()


def test_a_client_speaks_bytes(server: EmbeddedRedis) -> None:
    async def main() -> bytes | None:
        client = connect(server.url)
        try:
            await client.set("k", b"\x00\xff")
            return await client.get("k")
        finally:
            await client.aclose()

    assert asyncio.run(main()) == b"\x00\xff"


def test_no_server_is_an_error_at_once_without_retries(socket_dir: Path) -> None:
    async def main() -> float:
        client = connect(f"unix://{socket_dir}/none.sock")
        start = time.monotonic()
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.get("k")
        await client.aclose()
        return time.monotonic() - start

    assert asyncio.run(main()) < 1.0
