"""Several gateways beside one: `bench.gateways` in short. CPU is left to the bench: a busy machine tells nothing of
it."""

import statistics
from pathlib import Path

import pytest

from bench.gateways import MAX_REQUESTS_A_MINUTE, MAX_TOKENS_A_MINUTE, run, simulate_spread

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(400)]


def test_simulated_connections_get_even_and_placed_ones_are_not() -> None:
    after, before = simulate_spread(4, 64)

    assert before > 1.2
    assert after < 1.12


def test_four_gateways_share_connections_keep_limits_and_find_what_replicas_hold(tmp_path: Path) -> None:
    one, four = run(tmp_path, (1, 4), rounds=3, requests=256, cache_requests=320)

    for fleet in (one, four):
        assert fleet.requests_let_in == MAX_REQUESTS_A_MINUTE
        assert fleet.tokens_let_in == MAX_TOKENS_A_MINUTE
    assert statistics.median(four.fullest) <= 1.25, "1.2 over the longer slices of `make bench-gateways`"
    assert one.cached_share > 0.65, "0.76 here; half where what replicas hold did not matter (BENCHMARKS.md)"
    assert four.cached_share >= 0.9 * one.cached_share, "0.97; 0.98 with the bench's more requests"
    assert len(four.cpu_ms) == 3
    assert min(four.cpu_ms) > 0
