"""Fixtures of the batches' tests."""

import pytest

from penstock.router.batches import run, runner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times in which a test can wait; no lease ends because a machine stands still for a moment."""
    monkeypatch.setattr(run, "LEASE_S", 60.0)
    monkeypatch.setattr(run, "MARGIN_S", 1.0)
    monkeypatch.setattr(run, "RENEW_S", 0.05)
    monkeypatch.setattr(run, "REDIS_PAUSE_S", 0.02)
    monkeypatch.setattr(run, "DISK_PAUSE_S", 0.02)
    monkeypatch.setattr(run, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(runner, "LEASE_S", 60.0)
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "RETRY_S", 0.1)
