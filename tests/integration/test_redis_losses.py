"""Redis lost under load, by a whole platform: `bench.redis_losses` in short, but for the Cluster, which test_redis_many
takes part by part."""

from pathlib import Path

import pytest

from bench.redis_losses import run

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = 6.0
"""Load before and after the loss."""


def test_a_failover_by_sentinel_refuses_no_known_key_and_its_usage_is_charged(tmp_path: Path) -> None:
    seen = run("sentinel", tmp_path, SECONDS)

    assert seen.faults("sentinel") == []
    assert seen.statuses["200"] > 200
    # a Sentinel that stood still for two seconds does nothing for thirty
    assert 0.5 < seen.away_s < 60.0, "the master was away, and another one is there"
    assert 0.8 * seen.received_tokens < seen.charged_tokens <= seen.received_tokens


def test_an_empty_redis_refuses_no_known_key_and_an_export_brings_the_others_back(tmp_path: Path) -> None:
    seen = run("empty", tmp_path, SECONDS)

    assert seen.faults("empty") == []
    assert seen.statuses["200"] > 200
    assert seen.back_s is not None
    assert seen.back_s < 10.0
