"""Limits and usage to the token, through losses: `bench.limits` in short."""

from pathlib import Path

import pytest

from bench.limits import LIMIT, Charge, fullest_window, mean_share, run_limits, run_usage

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]


def test_windows_are_weighed_wherever_they_begin() -> None:
    charges = [Charge(0.0, 0.1, 10), Charge(5.0, 5.1, 20), Charge(9.9, 10.2, 30), Charge(10.1, 10.2, 40)]

    assert fullest_window(charges, 10.0) == 90
    assert fullest_window(charges, 0.25) == 40, "what may lie outside is not counted"
    even = [Charge(second, second, 5) for second in range(31)]
    assert mean_share(even, 10.0, 50, 30.0) == pytest.approx(1.0)
    assert mean_share(even, 10.0, 100, 30.0) == pytest.approx(0.5)


def test_four_gateways_one_of_them_killed_never_exceed_a_limit_and_use_it_up(tmp_path: Path) -> None:
    found = run_limits(tmp_path, bucket_ms=100, num_buckets=50, seconds=20.0)

    # a machine so busy that Redis does not answer within 0.5 s: each gateway decides alone, by its share
    assert found.fullest <= (2 * LIMIT if found.num_alone else LIMIT)
    assert found.mean_share > 0.85, "97 % with windows of a minute, in which a moment weighs less: `make bench-limits`"
    assert found.num_unsettled > 0, "the killed gateway had let some in"


def test_usage_is_what_was_received_through_kills_resumes_departures_and_failing_steps(tmp_path: Path) -> None:
    found = run_usage(tmp_path, 12.0)

    assert found.faults() == []
    assert found.num_resumed > 0
    assert all(account.num_requests > 0 for account in found.accounts.values())
    assert min(found.accounts[name].delivered for name in ("ended", "left", "choices", "cut")) > 0
    assert found.accounts["failing"].charged_output == 0
