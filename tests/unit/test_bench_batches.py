"""bench.batches: what its figures are made of, and what it calls a fault."""

import pytest
from openai.types import Batch

from bench.batches import TIMED, Seen, Window, faults_of, rows_of, rows_of_loss
from bench.support.batch_files import Loss

ENDED = Batch(
    id="batch_1",
    completion_window="24h",
    created_at=1,
    endpoint="/v1/chat/completions",
    input_file_id="file-1",
    object="batch",
    status="completed",
)
USED = {"requests": 3, "prompt_tokens": 30, "completion_tokens": 12}


def seen(beside_ms: float, **fields: int) -> Seen:
    alone = Window([0.010] * 99 + [0.5], seconds=10.0)
    beside = Window([beside_ms / 1e3] * 50 + [0.5], num_lines=80, seconds=5.0, **fields)
    return Seen(40.0, alone, beside, [])


def loss(custom_ids: list[str], charged: dict[str, int]) -> Loss:
    return Loss(3, 1, 2, ENDED, custom_ids, USED, charged)


def test_rows_hold_the_time_beside_a_batch_against_that_alone_and_what_the_batch_gets_against_the_pool() -> None:
    rows = {row.name: row for row in rows_of(seen(12.0), TIMED)}

    assert rows["TTFT p90 beside a batch, beside that alone"].ratio == pytest.approx(1.2)
    assert rows["lines of the batch, of the same"].ours == pytest.approx(16.0)
    assert rows["lines of the batch, of the same"].ratio == pytest.approx(0.4)
    assert rows["output of the batch"].ours == pytest.approx(16.0 * TIMED.answer_tokens)


def test_a_batch_that_is_noticed_and_requests_without_an_answer_are_faults() -> None:
    assert faults_of(seen(13.0), None) == []
    assert [fault[:37] for fault in faults_of(seen(14.0), None)] == ["p90 of the time to first token is 1.4"]
    assert faults_of(seen(13.0, num_failed=1), None) == ["requests were not answered"]
    assert faults_of(seen(13.0)._replace(faults=["The batch ended."]), None) == ["The batch ended."]


@pytest.mark.parametrize(
    ("custom_ids", "charged", "num_missing", "num_doubled"),
    [
        (["a", "b", "c"], USED, 0, 0),
        (["a", "b"], USED, 1, 0),
        (["a", "b", "b", "c"], USED, 0, 1),
        (["a", "b", "c"], USED | {"requests": 4}, 0, 0),
    ],
)
def test_a_line_without_a_result_or_with_two_or_charged_twice_is_a_fault(
    custom_ids: list[str], charged: dict[str, int], num_missing: int, num_doubled: int
) -> None:
    found = loss(custom_ids, charged)
    is_exact = charged == USED and not num_missing and not num_doubled

    assert (found.num_missing, found.num_doubled, found.is_exact) == (num_missing, num_doubled, is_exact)
    assert bool(faults_of(seen(13.0), found)) is not is_exact
    rows = {row.name: row for row in rows_of_loss(found)}
    assert rows["through the losses: requests, charged, beside answered"].ours == charged["requests"]
