"""All that replicas cost is accounted for, under aborts, resumed answers, drafts, an adapter, a killed replica and a
drained one: a short course of `bench.cost`, without the pool that computes."""

from pathlib import Path

import pytest

from bench.cost import play, rows_of

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(400)]


def test_receipts_and_the_time_that_nobody_asked_for_are_the_lives_of_the_processes(tmp_path: Path) -> None:
    found = play(tmp_path, ["timed"], seconds=30.0, workers=6)

    rows = {row.name.removeprefix("timed: "): row for row in rows_of(found)}
    sums, accounts = [rows[name].ratio for name in ("receipts", "usage")], rows["all accounts"].ratio
    assert all(ratio == pytest.approx(1.0, rel=0.01) for ratio in sums)
    assert accounts is not None
    assert 0.93 < accounts < 1.01, "all but the ends of two processes after their last reports (docs/cost.md)"
    assert found.num_resumed
    assert found.num_drafted
