"""Batches of a platform with two gateways, by the unmodified `openai` client; and one that loses a gateway and Redis in
the middle."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import httpx
import openai
import psutil
from openai.types import Batch

from bench.support.more_gateways import start_gateways
from bench.support.platform_process import PlatformProcess, read_metric, running_platform

ENDED = ("completed", "failed", "expired", "cancelled")
WITHIN_S = 120.0
KINDS = ("requests", "prompt_tokens", "completion_tokens")
"""What `GET /v1/usage` counts."""

Row = dict[str, Any]
"""A line of a file."""


@dataclass(frozen=True)
class TwoGateways:
    """A platform with two gateways."""

    platform: PlatformProcess
    urls: tuple[str, str]
    """Base addresses of both, without /v1."""

    def client(self, url: str, key: str | None = None) -> openai.OpenAI:
        """key: of a tenant; None: the platform's own."""
        return openai.OpenAI(base_url=f"{url}/v1", api_key=key or self.platform.key, max_retries=8)

    def usage(self, url: str) -> dict[str, int]:
        """What the platform's own tenant has used so far, by kind."""
        headers = {"authorization": f"Bearer {self.platform.key}"}
        rows = httpx.get(f"{url}/v1/usage", headers=headers, timeout=30, trust_env=False).json()["data"]
        return {kind: sum(row[kind] for row in rows) for kind in KINDS}

    def metric(self, url: str, name: str) -> float:
        """Value of a gateway's metric; 0: it is not on its page."""
        page = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
        return read_metric(page, name) or 0.0

    def pid(self, url: str) -> int:
        """Process id of the gateway at this address. Raises LookupError."""
        port = int(url.rpartition(":")[2])
        for pid in self.platform.gateways:
            listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
            if port in [each.laddr.port for each in listening]:
                return pid
        raise LookupError(f"no gateway listens at {url}")


@contextmanager
def two_gateways(folder: Path, config: str) -> Iterator[TwoGateways]:
    """A platform by this configuration (see `running_platform`), and a second gateway."""
    with running_platform(folder, config) as platform:
        [second] = start_gateways(platform, 1)
        yield TwoGateways(platform, (platform.url, second))


def chat_line(number: int, model: str, content: str, max_tokens: int, **fields: object) -> Row:
    """A line for a chat with an answer of exactly so many tokens. fields: further ones of its body."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        **fields,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def create_batch(client: openai.OpenAI, rows: Sequence[Row], window: str = "24h") -> Batch:
    """window: also a time that OpenAI's own client has no type for, as `3s`."""
    text = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window=cast('Literal["24h"]', window),
        metadata={"for": "a test"},
    )


def read_results(client: openai.OpenAI, file_id: str | None) -> list[Row]:
    """Lines of an output or error file; none where there is no file."""
    return [] if file_id is None else [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def num_completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


def wait_until_ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """The batch when it has ended, however. Raises TimeoutError."""

    def ended() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    found = poll(ended, every_s=0.2)
    assert isinstance(found, Batch)
    return found


def poll(condition: Callable[[], object], within_s: float = WITHIN_S, every_s: float = 0.05) -> object:
    """What the condition returns, once that is true. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s} s")
        time.sleep(every_s)
    return found


class Loss(NamedTuple):
    """A batch that lost the gateway that ran it, and then Redis."""

    num_lines: int
    done_at_kill: int
    """Lines that were done when the gateway had been killed."""
    done_at_redis_kill: int
    batch: Batch
    """The batch at its end."""
    custom_ids: list[str]
    """Ids of the results, in the order of the output file."""
    answered: dict[str, int]
    """What the answers say that they used, by kind."""
    charged: dict[str, int]
    """What the tenant's usage has gained, by kind."""

    @property
    def num_missing(self) -> int:
        return self.num_lines - len(set(self.custom_ids))

    @property
    def num_doubled(self) -> int:
        return len(self.custom_ids) - len(set(self.custom_ids))

    @property
    def is_exact(self) -> bool:
        """Whether every line has one result, and counts once."""
        return not self.num_missing and not self.num_doubled and self.answered == self.charged


def lose_in_the_middle(gateways: TwoGateways, rows: Sequence[Row]) -> Loss:
    """Run a batch of these chats; kill the gateway that runs it when a tenth is done, and Redis a tenth later. Both are
    started again by the platform."""
    first = gateways.client(gateways.urls[0])
    before, tenth = gateways.usage(gateways.urls[0]), len(rows) // 10
    batch = create_batch(first, rows)
    poll(lambda: num_completed(first, batch) >= tenth)
    [runs] = [url for url in gateways.urls if gateways.metric(url, "penstock_batches_running") > 0]
    [other] = [url for url in gateways.urls if url != runs]
    client = gateways.client(other)
    os.kill(gateways.pid(runs), signal.SIGKILL)
    done_at_kill = num_completed(client, batch)
    poll(lambda: num_completed(client, batch) > done_at_kill + tenth)
    done_at_redis_kill = num_completed(client, batch)
    [redis] = gateways.platform.redis
    os.kill(redis, signal.SIGKILL)
    ended = wait_until_ended(client, batch)
    results = read_results(client, ended.output_file_id)
    charged = gateways.usage(other)
    used = [row["response"]["body"]["usage"] for row in results]
    answered = {kind: sum(each[kind] for each in used) for kind in KINDS[1:]}
    return Loss(
        len(rows),
        done_at_kill,
        done_at_redis_kill,
        ended,
        [row["custom_id"] for row in results],
        {"requests": len(results)} | answered,
        {kind: charged[kind] - before[kind] for kind in charged},
    )
