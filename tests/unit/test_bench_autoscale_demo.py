"""bench.autoscale_demo: what it takes for a run to be as it should."""

import pytest

from bench.autoscale_demo import EXAMPLE, MOST, POOL, TTFT_TARGET_S, gauges, steps, wrongs
from penstock.cli.config import load_platform
from penstock_loadtest.scenario import load_scenario

FINISHED = ["finished"] * 3


@pytest.mark.parametrize("counts", [[1, 3, 1], [1, 2, 3, 2, 1], [1, 3, 2, 1]])
def test_up_to_three_replicas_and_back_is_right(counts: list[int]) -> None:
    assert wrongs(counts, FINISHED, is_balanced=True) == []


@pytest.mark.parametrize(
    "counts",
    [[], [1], [1, 2, 1], [1, 3], [1, 3, 2], [2, 3, 1], [1, 2, 1, 3, 1], [1, 3, 2, 3, 1], [1, 3, 4, 1], [1, 3, 0, 1]],
)
def test_any_other_way_is_wrong(counts: list[int]) -> None:
    (sentence,) = wrongs(counts, FINISHED, is_balanced=True)

    assert "not from 1 up to 3 and down to 1" in sentence


def test_a_request_that_did_not_finish_and_books_that_do_not_balance_are_wrong() -> None:
    assert wrongs([1, 3, 1], [*FINISHED, "failed", "shed"], is_balanced=True) == [
        "2 requests did not finish: failed, shed"
    ]
    assert len(wrongs([1, 3, 1], FINISHED, is_balanced=False)) == 1


def test_gauges_are_of_the_pool_that_is_asked_for() -> None:
    page = """# TYPE penstock_replicas gauge
penstock_replicas{pool="played",tier="cloud"} 2.0
penstock_replicas{pool="real",tier="edge"} 1.0
# TYPE penstock_queue_length gauge
penstock_queue_length{pool="played"} 7.0
"""

    assert gauges(page, "played") == {"replicas": 2.0, "queued": 7.0}
    assert steps([1.0, 1.0, 3.0, 1.0]) == [1, 3, 1]


def test_the_examples_two_files_load_and_agree() -> None:
    pools = {pool.name: pool for pool in load_platform(EXAMPLE / "penstock.yaml").pools}
    scenario = load_scenario(EXAMPLE / "load.yaml", [])

    scaled = pools[POOL].autoscale
    assert scaled is not None
    assert (scaled.min_replicas, scaled.max_replicas, scaled.ttft_target_s) == (1, MOST, TTFT_TARGET_S)
    assert scenario.targets.ttft_s == TTFT_TARGET_S
    assert {model.name for model in scenario.models} == {name for pool in pools.values() for name in pool.names}
    assert [pool.engine.runner for pool in pools.values()].count("timed") == 1, "one pool computes for real"
