"""Speculation through the whole platform: the same seeded requests to a pool without, one with look-up, one with a draft model.

    python -m bench.speculation

Three pools of the demo model in one platform, all exact. Requests are half greedy, half at temperature 0.8, some with penalties, half of them
about a text that the answer may quote. Reported: answers whose token ids are the plain pool's, the share of draft tokens accepted as /metrics
counts it, and tokens per second, the pools asked one after the other.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.loopback import WORDS
from bench.platform_process import PlatformProcess, running_platform
from bench.report import Row, write_report

POOLS = ("plain", "ngram", "draft")
CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: plain
    served_names: [plain]
    engine: &engine {{dtype: float32, exact: true, kv_memory_bytes: 300000000, max_num_seqs: 8, max_batched_tokens: 64}}
  - name: ngram
    served_names: [ngram]
    engine: {{<<: *engine, speculation: {{method: ngram, adaptive: false}}}}
  - name: draft
    served_names: [draft]
    engine: {{<<: *engine, speculation: {{method: draft, model: demo, draft_layers: 25, adaptive: false}}}}
"""
REQUESTS, STREAMS, MAX_TOKENS = 200, 8, 16
REPORT_S = 1.5
"""A replica's counts are on /metrics by then: it reports at least once a second."""


class Run(NamedTuple):
    """A pool's answers, in the order of the requests."""

    token_ids: list[list[int]]
    seconds: float
    drafted: float
    accepted: float

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def request(number: int, max_tokens: int) -> dict[str, Any]:
    """The number-th request, without its model."""
    rng = random.Random(number)
    text = " ".join(rng.choices(WORDS, k=24))
    content = f"Repeat this text twice, word by word: {text}" if number % 2 else f"What is a {rng.choice(WORDS)} {rng.choice(WORDS)}? Question {number}."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "seed": number, "return_token_ids": True}
    body["temperature"] = 0.8 if number % 4 > 1 else 0
    if number % 5 == 4:
        body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 4}
    return body


async def ask_all(platform: PlatformProcess, pool: str, requests: int, max_tokens: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(requests)]
    numbers = iter(range(requests))
    headers = {"authorization": f"Bearer {platform.key}"}
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=300, trust_env=False) as http:

        async def stream() -> None:
            for number in numbers:
                response = await http.post("/v1/chat/completions", json=request(number, max_tokens) | {"model": pool})
                response.raise_for_status()
                answers[number] = response.json()["choices"][0]["token_ids"]

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(stream())
    return answers


def counted(platform: PlatformProcess, pool: str) -> tuple[float, float]:
    """Draft tokens of a pool, verified and accepted, on /metrics."""
    text = httpx.get(f"{platform.url}/metrics", timeout=10, trust_env=False).text
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("penstock_")}
    drafted, accepted = (found.get(f'penstock_{name}_total{{pool="{pool}"}}', 0.0) for name in ("draft_tokens", "accepted_draft_tokens"))
    return drafted, accepted


def run(platform: PlatformProcess, pool: str, requests: int, max_tokens: int) -> Run:
    began_s = time.perf_counter()
    token_ids = asyncio.run(ask_all(platform, pool, requests, max_tokens))
    seconds = time.perf_counter() - began_s
    time.sleep(REPORT_S)
    return Run(token_ids, seconds, *counted(platform, pool))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, running_platform(Path(folder), CONFIG) as platform:
        runs = {pool: run(platform, pool, REQUESTS, MAX_TOKENS) for pool in POOLS}
    plain = runs.pop("plain")
    rows = [Row(f"{pool}: answers with the plain pool's token ids, of all", _equal(found, plain), REQUESTS, "") for pool, found in runs.items()]
    rows += [Row(f"{pool}: draft tokens accepted", 100 * found.acceptance, None, "%") for pool, found in runs.items()]
    rows += [Row(f"{pool}: draft tokens verified", found.drafted, None, "") for pool, found in runs.items()]
    rows += [Row(f"{pool}: output (rival: plain)", found.tokens_per_s, plain.tokens_per_s, "tokens/s") for pool, found in runs.items()]
    notes = [f"{REQUESTS} requests of up to {MAX_TOKENS} tokens, {STREAMS} at a time, SmolLM2-135M-Instruct in float32, exact, one CPU replica a pool"]
    write_report("speculation", rows, notes=notes)


def _equal(found: Run, plain: Run) -> int:
    return sum(mine == theirs for mine, theirs in zip(found.token_ids, plain.token_ids, strict=True))


if __name__ == "__main__":
    main()
