"""Fixtures of all unit tests."""

import pytest

from penstock.base import redis


@pytest.fixture(autouse=True)
def patience_with_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real Redis of a test has as long for an answer as a slow machine needs."""
    monkeypatch.setattr(redis, "CONNECT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(redis, "COMMAND_TIMEOUT_S", 30.0)
