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


async def test_a_client_speaks_bytes(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        await client.set("k", b"\x00\xff")

        assert await client.get("k") == b"\x00\xff"


async def test_no_server_is_an_error_at_once_without_retries(socket_dir: Path) -> None:
    client = connect(f"unix://{socket_dir}/none.sock")
    start = time.monotonic()
    with pytest.raises(redis.exceptions.ConnectionError):
        await client.get("k")
    await client.aclose()

    assert time.monotonic() - start < 1.0
