"""`penstock prefix`, as an operator gives it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.redis_server import EmbeddedRedis, find_executable
from tests.integration.test_first_tenants import penstock


@pytest.fixture
def redis_url(tmp_path: Path, socket_dir: Path) -> Iterator[str]:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    server.start()
    yield server.url
    server.stop()


def test_a_text_is_published_listed_and_withdrawn(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Answer briefly.\n", encoding="utf-8")

    assert penstock(redis_url, "prefix", "publish", "brief", "--file", str(file)).returncode == 0
    assert "Answer briefly." in penstock(redis_url, "prefix", "list").stdout
    assert penstock(redis_url, "prefix", "withdraw", "brief").returncode == 0
    again = penstock(redis_url, "prefix", "withdraw", "brief")
    assert again.returncode == 2
    assert "no prefix 'brief' is published" in again.stderr
    both = penstock(redis_url, "prefix", "publish", "brief", "--file", str(file), "--text", "a")
    assert "one of them" in both.stderr
