"""All that replicas cost is accounted for, under aborts, resumed answers, drafts, an adapter, a killed replica and a
drained one: a short course of `bench.cost`, without the pool that computes."""

from pathlib import Path

import pytest

from bench.cost import faults_of, play

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(400)]


def test_receipts_and_the_time_that_nobody_asked_for_are_the_lives_of_the_processes(tmp_path: Path) -> None:
    found = play(tmp_path, ["timed"], seconds=30.0, workers=6)

    assert faults_of(found) == []
