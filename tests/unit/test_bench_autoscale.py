"""bench.autoscale: what it takes for a run to be as it should."""

import pytest

from bench.autoscale import gauges, steps, wrongs

FINISHED = ["finished"] * 3


@pytest.mark.parametrize("counts", [[1, 3, 1], [1, 2, 3, 2, 1], [1, 3, 2, 1]])
def test_up_to_three_replicas_and_back_is_right(counts: list[int]) -> None:
    assert wrongs(counts, FINISHED, is_balanced=True) == []


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 1], [1, 3], [1, 3, 2], [2, 3, 1], [1, 2, 1, 3, 1], [1, 3, 2, 3, 1], [1, 3, 4, 1], [1, 3, 0, 1]])
def test_any_other_way_is_wrong(counts: list[int]) -> None:
    (sentence,) = wrongs(counts, FINISHED, is_balanced=True)

    assert "not from 1 up to 3 and down to 1" in sentence


def test_a_request_that_did_not_finish_and_books_that_do_not_balance_are_wrong() -> None:
    assert wrongs([1, 3, 1], [*FINISHED, "failed", "shed"], is_balanced=True) == ["2 requests did not finish: failed, shed"]
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
