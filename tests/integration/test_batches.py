"""Batches as tenants meet them: by the unmodified `openai` client, on a running platform with two gateways, through the
loss of a gateway and of Redis in the middle. Timed replicas."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest

from bench.support.more_gateways import start_gateways
from bench.support.platform_process import PlatformProcess, read_metric, running_platform, timed_platform
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = timed_platform("max_num_seqs: 32, max_batched_tokens: 2048, timed: {base_s: 0.01, num_blocks: 8192}")
MODEL = "sim"
NUM_LINES = 500
MARK = "a-word-of-a-prompt"
"""Stands in every prompt, and must stand nowhere but in the folder of batches."""
WITHIN_S = 120.0


@dataclass(frozen=True)
class Gateways:
    """A platform with two of them."""

    platform: PlatformProcess
    urls: tuple[str, str]

    def client(self, url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key=self.platform.key, max_retries=8)

    def usage(self, url: str) -> dict[str, int]:
        """What the tenant has used so far, by kind."""
        headers = {"authorization": f"Bearer {self.platform.key}"}
        rows = httpx.get(f"{url}/v1/usage", headers=headers, timeout=30, trust_env=False).json()["data"]
        kinds = ("requests", "prompt_tokens", "completion_tokens")
        return {kind: sum(row[kind] for row in rows) for kind in kinds}

    def running(self, url: str) -> float:
        """Batches that a gateway runs."""
        page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
        return read_metric(page, "penstock_batches_running") or 0.0

    def pid(self, url: str) -> int:
        port = int(url.rpartition(":")[2])
        for pid in self.platform.gateways:
            listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
            if port in [each.laddr.port for each in listening]:
                return pid
        raise AssertionError(f"no gateway listens at {url}")


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with running_platform(tmp_path_factory.mktemp("batches"), CONFIG) as platform:
        [second] = start_gateways(platform, 1)
        yield Gateways(platform, (platform.url, second))


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{MARK} {number}"}],
        "max_tokens": 12,
        "ignore_eos": True,
        "seed": number,
        **fields,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def create(client: openai.OpenAI, rows: list[dict[str, Any]], window: Any = "24h") -> openai.types.Batch:
    text = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, metadata={"for": "a test"}
    )


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def wait_until_ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    def ended() -> openai.types.Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    found = wait_for(ended, within_s=WITHIN_S, every_s=0.2)
    assert isinstance(found, openai.types.Batch)
    return found


def test_a_batch_goes_from_a_file_to_files_through_either_gateway(gateways: Gateways) -> None:
    first, second = map(gateways.client, gateways.urls)
    rows = [line(number) for number in range(20)]
    rows[5]["body"]["model"] = "unknown"

    ended = wait_until_ended(second, create(first, rows))

    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (20, 19, 1)
    output = results(second, ended.output_file_id)
    assert [row["custom_id"] for row in output] == [f"line-{number}" for number in range(20) if number != 5]
    [error] = results(first, ended.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "model_not_found"
    assert {ended.output_file_id, ended.error_file_id, ended.input_file_id} <= {each.id for each in first.files.list()}
    assert ended.id in {each.id for each in first.batches.list(limit=1)}
    first.files.delete(ended.output_file_id or "")
    with pytest.raises(openai.NotFoundError):
        second.files.content(ended.output_file_id or "")


def test_a_gateway_killed_in_the_middle_loses_no_line_and_doubles_none(gateways: Gateways) -> None:
    """Redis is killed too."""
    platform = gateways.platform
    client = gateways.client(gateways.urls[0])
    before = gateways.usage(gateways.urls[0])
    batch = create(client, [line(number) for number in range(NUM_LINES)])

    def num_done(url: str) -> int:
        counts = gateways.client(url).batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    wait_for(lambda: num_done(gateways.urls[0]) >= NUM_LINES // 10, within_s=WITHIN_S)
    [runs] = [url for url in gateways.urls if gateways.running(url) > 0]
    [other] = [url for url in gateways.urls if url != runs]
    os.kill(gateways.pid(runs), signal.SIGKILL)
    at_kill = num_done(other)
    wait_for(lambda: num_done(other) > at_kill + NUM_LINES // 10, within_s=WITHIN_S)
    [redis] = platform.redis
    os.kill(redis, signal.SIGKILL)
    ended = wait_until_ended(gateways.client(other), batch)

    assert NUM_LINES // 10 <= at_kill < NUM_LINES
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (NUM_LINES, 0)
    output = results(gateways.client(other), ended.output_file_id)
    assert [row["custom_id"] for row in output] == [f"line-{number}" for number in range(NUM_LINES)]
    answers = [row["response"]["body"]["usage"] for row in output]
    used = gateways.usage(other)
    assert {kind: used[kind] - before[kind] for kind in used} == {
        "requests": NUM_LINES,
        "prompt_tokens": sum(answer["prompt_tokens"] for answer in answers),
        "completion_tokens": sum(answer["completion_tokens"] for answer in answers),
    }
    assert ended.usage is not None
    assert ended.usage.output_tokens == sum(answer["completion_tokens"] for answer in answers)


def test_a_batch_is_cancelled_and_one_expires(gateways: Gateways) -> None:
    client = gateways.client(gateways.urls[1])
    long = [line(number, max_tokens=4000) for number in range(4)]
    cancelled, expired = create(client, long), create(client, long, window="3s")

    wait_for(lambda: client.batches.retrieve(cancelled.id).status == "in_progress", within_s=WITHIN_S)
    assert client.batches.cancel(cancelled.id).status == "cancelling"
    for batch, status in ((cancelled, "cancelled"), (expired, "expired")):
        ended = wait_until_ended(client, batch)

        assert ended.status == status
        codes = {row["error"]["code"] for row in results(client, ended.error_file_id)}
        assert codes == {f"batch_{status}"}


def test_no_text_of_a_batch_is_anywhere_but_in_its_folder(gateways: Gateways) -> None:
    state = gateways.platform.state
    wait_until_ended(client := gateways.client(gateways.urls[1]), create(client, [line(1)]))

    holders = {
        path.relative_to(state).parts[0]
        for path in state.rglob("*")
        if path.is_file() and not path.is_symlink() and MARK.encode() in path.read_bytes()
    }

    assert holders == {"batches"}
    folders = [path for path in [state / "batches", *(state / "batches").rglob("*")] if path.is_dir()]
    assert {path.stat().st_mode & 0o077 for path in folders} == {0}
