import msgspec
import pytest

from penstock.router.batches.batch_record import BatchCounts, new_record, window_s
from penstock.wire.batches import BatchCreate, BatchError, ExpiresAfter
from penstock.wire.errors import InvalidRequest

WANTED = BatchCreate(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("90s", 90), ("5m", 300), ("7d", 604800)])
def test_a_window_is_a_number_of_some_unit(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


def test_a_window_is_bounded() -> None:
    for window in ("8d", "169h", "604801s"):
        with pytest.raises(InvalidRequest, match="at most 7d"):
            window_s(window)


def test_outputs_live_as_long_as_was_asked_for() -> None:
    wanted = msgspec.structs.replace(WANTED, output_expires_after=ExpiresAfter(anchor="created_at", seconds=7200))

    assert new_record("batch_1", WANTED, 3, 500, 10.0).output_seconds == 500
    assert new_record("batch_1", wanted, 3, 500, 10.0).output_seconds == 7200


def test_a_batch_shows_its_lines_once_they_were_read_and_when_it_ended() -> None:
    record = new_record("batch_1", WANTED, 3, 500, 10.5)
    begun = record.move_to("in_progress", 12.0)
    ended = begun.move_to("completed", 20.0)
    counts = BatchCounts(completed=2, failed=1, prompt_tokens=5, cached_tokens=1, completion_tokens=7)

    assert (record.has_ended, begun.has_ended, ended.has_ended) == (False, False, True)
    assert (record.ended_at, ended.ended_at) == (None, 20)
    assert record.describe(BatchCounts()).request_counts.total == 0
    shown = ended.describe(counts)
    assert (shown.request_counts.total, shown.request_counts.completed, shown.request_counts.failed) == (3, 2, 1)
    assert shown.usage is not None
    assert (shown.usage.input_tokens, shown.usage.output_tokens, shown.usage.total_tokens) == (5, 7, 12)
    assert (shown.created_at, shown.in_progress_at, shown.completed_at, shown.expires_at) == (10, 12, 20, 86410)


def test_a_failed_batch_names_a_bounded_number_of_errors() -> None:
    errors = [BatchError(code="x", message="y", line=number) for number in range(100)]

    failed = new_record("batch_1", WANTED, 3, 500, 10.0).fail(errors, 11.0)

    assert (failed.status, failed.failed_at, len(failed.errors)) == ("failed", 11, 32)
    shown = failed.describe(BatchCounts())
    assert shown.errors is not None
    assert shown.errors.data[0] == errors[0]
