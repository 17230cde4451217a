"""Batches as tenants meet them: by the unmodified `openai` client, on a running platform with two gateways, through the
loss of a gateway and of Redis in the middle. Timed replicas."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.support.batch_files import (
    TwoGateways,
    chat_line,
    create_batch,
    lose_in_the_middle,
    read_results,
    two_gateways,
    wait_until_ended,
)
from bench.support.platform_process import timed_platform
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = timed_platform("max_num_seqs: 32, max_batched_tokens: 2048, timed: {base_s: 0.01, num_blocks: 8192}")
NUM_LINES = 500
MARK = "a-word-of-a-prompt"
"""Stands in every prompt, and must stand nowhere but in the folder of batches."""
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    with two_gateways(tmp_path_factory.mktemp("batches"), CONFIG) as found:
        yield found


def line(number: int, **fields: Any) -> dict[str, Any]:
    return chat_line(number, "sim", f"{MARK} {number}", **{"max_tokens": 12, **fields})


def test_a_batch_goes_from_a_file_to_files_through_either_gateway(gateways: TwoGateways) -> None:
    first, second = map(gateways.client, gateways.urls)
    rows = [line(number) for number in range(20)]
    rows[5]["body"]["model"] = "unknown"

    ended = wait_until_ended(second, create_batch(first, rows))

    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (20, 19, 1)
    output = read_results(second, ended.output_file_id)
    assert [row["custom_id"] for row in output] == [f"line-{number}" for number in range(20) if number != 5]
    [error] = read_results(first, ended.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "model_not_found"
    assert {ended.output_file_id, ended.error_file_id, ended.input_file_id} <= {each.id for each in first.files.list()}
    assert ended.id in {each.id for each in first.batches.list(limit=1)}
    first.files.delete(ended.output_file_id or "")
    with pytest.raises(openai.NotFoundError):
        second.files.content(ended.output_file_id or "")


def test_a_gateway_killed_in_the_middle_loses_no_line_and_doubles_none(gateways: TwoGateways) -> None:
    """Redis is killed too."""
    loss = lose_in_the_middle(gateways, [line(number) for number in range(NUM_LINES)])

    assert NUM_LINES // 10 <= loss.done_at_kill < loss.done_at_redis_kill < NUM_LINES
    assert loss.batch.status == "completed"
    assert loss.batch.request_counts is not None
    assert (loss.batch.request_counts.completed, loss.batch.request_counts.failed) == (NUM_LINES, 0)
    assert loss.custom_ids == [f"line-{number}" for number in range(NUM_LINES)]
    assert loss.charged == loss.answered
    assert loss.is_exact
    assert loss.batch.usage is not None
    assert loss.batch.usage.output_tokens == loss.answered["completion_tokens"]


def test_a_batch_is_cancelled_and_one_expires(gateways: TwoGateways) -> None:
    client = gateways.client(gateways.urls[1])
    long = [line(number, max_tokens=4000) for number in range(4)]
    cancelled, expired = create_batch(client, long), create_batch(client, long, window="8s")

    wait_for(lambda: client.batches.retrieve(cancelled.id).status == "in_progress", within_s=WITHIN_S)
    assert any(gateways.metric(url, "penstock_batches_running") for url in gateways.urls)
    assert client.batches.cancel(cancelled.id).status == "cancelling"
    for batch, status in ((cancelled, "cancelled"), (expired, "expired")):
        ended = wait_until_ended(client, batch)

        assert ended.status == status
        codes = {row["error"]["code"] for row in read_results(client, ended.error_file_id)}
        assert codes == {f"batch_{status}"}


def test_no_text_of_a_batch_is_anywhere_but_in_its_folder(gateways: TwoGateways) -> None:
    state = gateways.platform.state
    wait_until_ended(client := gateways.client(gateways.urls[1]), create_batch(client, [line(1)]))

    def is_held_by(path: Path) -> bool:
        try:
            return path.is_file() and not path.is_symlink() and MARK.encode() in path.read_bytes()
        except FileNotFoundError:  # what a finished batch needs no more is being removed
            return False

    files = [Path(at) / name for at, _, names in os.walk(state) for name in names]
    assert {path.relative_to(state).parts[0] for path in files if is_held_by(path)} == {"batches"}
    modes = [Path(at).stat().st_mode for at, _, _ in os.walk(state / "batches")]
    assert {mode & 0o077 for mode in modes} == {0}
