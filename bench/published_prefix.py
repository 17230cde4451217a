"""A published system prompt in front of two tenants' questions, on a real engine: what is shared, and what that saves.

    python -m bench.published_prefix [--rounds 10]

One replica of the demo model. Each round makes system prompts of some 600 tokens that nobody has sent before, publishes
one (`penstock prefix publish`), and asks the same question behind them, one token each: the first tenant behind the
published text and behind another one; then the second tenant behind the same two; then the second tenant behind a text
of its own, and again behind that. Reported: time to first token and cached tokens. What is published is cached for
everybody, up to its last full block; everything else is as cold as if nobody had ever sent it.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.support.loopback import prompt
from bench.support.platform_process import PlatformProcess, penstock, running_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.router.models.published_prefixes import PERIOD_S, own_tokens
from penstock.tenancy.tenants import Settings
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], engine: {{exact: true, kv_memory_bytes: 536870912}}}}
"""
BLOCK_SIZE = 16
SYSTEM_TOKENS = 600
QUESTION = "Which of these words names an animal, and which one a part of the body? Answer with one word each, please."
PUBLISHED = "published, computed for another tenant"
CASES = (
    "published, nobody has sent it",
    "not published, nobody has sent it",
    PUBLISHED,
    "not published, computed for another tenant",
    "the tenant's own, nobody has sent it",
    "the tenant's own, sent before",
)
"""What stands before the question, in the order of asking."""
WITHIN_S = 60.0


class Reply(NamedTuple):
    """One question's answer."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int
    text: str


class Round(NamedTuple):
    """One round: the answers by case, and what the published text makes."""

    asked: dict[str, Reply]
    public_tokens: int
    """Tokens of the published text's full blocks, as the template has them."""


def publish(platform: PlatformProcess, text: str, name: str = "system") -> None:
    """Publish a text, and wait until every gateway knows it."""
    command = penstock("prefix", "publish", name, "--file", "-", "--state", str(platform.state))
    subprocess.run(command, input=text.encode(), check=True, capture_output=True, timeout=WITHIN_S)
    time.sleep(2 * PERIOD_S + 1.0)


def ask(client: httpx.Client, system: str, max_tokens: int = 1) -> Reply:
    """Ask the question behind a system prompt. Raises httpx.HTTPStatusError."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    begun_s = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - begun_s
    response.raise_for_status()
    answer = response.json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(seconds, cached, usage["prompt_tokens"], answer["choices"][0]["message"]["content"])


def count_public_tokens(text: str) -> int:
    """Tokens of the full blocks that a published system message makes in every chat that begins with it."""
    made = own_tokens(load_tokenizer(resolve("demo")), text)
    return max(len(token_ids) for token_ids in made) // BLOCK_SIZE * BLOCK_SIZE


def run_round(platform: PlatformProcess, clients: Sequence[httpx.Client], rng: random.Random) -> Round:
    """clients: the first tenant's and the second's."""
    first, second = clients
    shared, secret, own = (prompt(rng, SYSTEM_TOKENS) for _ in range(3))
    publish(platform, shared)
    order = ((first, shared), (first, secret), (second, shared), (second, secret), (second, own), (second, own))
    asked = {case: ask(client, system) for case, (client, system) in zip(CASES, order, strict=True)}
    return Round(asked, count_public_tokens(shared))


def run(folder: Path, num_rounds: int) -> list[Round]:
    """Rounds on one platform, after one that warms it."""
    rng = random.Random(15)
    with running_platform(folder, CONFIG) as platform:
        keys = asyncio.run(make_keys(platform, {"first": Settings(), "second": Settings()}))
        clients = [
            httpx.Client(
                base_url=platform.url,
                headers={"authorization": f"Bearer {key}"},
                timeout=WITHIN_S,
                trust_env=False,
                verify=False,  # no certificates: loading them takes longer than asking
            )
            for key in keys.values()
        ]
        rounds = [run_round(platform, clients, rng) for _ in range(num_rounds + 1)]
        for client in clients:
            client.close()
    return rounds[1:]


def faults_of(found: Round) -> list[str]:
    """Cases whose cached tokens are not what they must be."""
    asked = found.asked
    wanted = dict.fromkeys(CASES, 0) | {PUBLISHED: found.public_tokens}
    repeated = asked[CASES[-1]]
    wanted[CASES[-1]] = (repeated.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    return [
        f"{case}: {asked[case].cached_tokens} tokens cached, not {wanted[case]}"
        for case in CASES
        if asked[case].cached_tokens != wanted[case]
    ]


def rows_of(rounds: Sequence[Round]) -> list[Row]:
    def median_ms(case: str) -> float:
        return 1e3 * statistics.median(each.asked[case].ttft_s for each in rounds)

    cold_ms = median_ms(CASES[1])
    rows = [Row(f"TTFT, beside cold: {case}", median_ms(case), cold_ms, "ms") for case in CASES]
    for case in CASES:
        cached = statistics.median(each.asked[case].cached_tokens for each in rounds)
        size = statistics.median(each.asked[case].prompt_tokens for each in rounds)
        rows.append(Row(f"cached, of the prompt: {case}", cached, size, "tokens"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        rounds = run(Path(folder), args.rounds)
    faults = [fault for each in rounds for fault in faults_of(each)]
    write_report("published-prefix", rows_of(rounds), notes=[f"medians of {args.rounds} rounds", *faults])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
