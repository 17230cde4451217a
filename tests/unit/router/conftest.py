"""Fixtures of the router's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.redis_roles import ROLES, RoleName, make_password
from penstock.base.redis_server import EmbeddedRedis, find_executable
from tests.unit.router.traces import Traces

PASSWORDS: dict[RoleName, str] = {role: make_password(bytes(range(32)), role) for role in ROLES}


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.tracing.close()


@pytest.fixture(scope="session")
def batch_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Redis with a gateway's rights, for files and batches."""
    folder = tmp_path_factory.mktemp("b")
    server = EmbeddedRedis(
        executable=find_executable(), data_dir=folder / "data", socket_dir=folder, passwords=PASSWORDS
    )
    server.start()
    yield server.url_for("gateway")
    server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where batches keep their texts; made by whoever is first."""
    return tmp_path / "batches"
