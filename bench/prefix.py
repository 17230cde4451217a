"""What prefix reuse saves through the whole platform: chats that share a long system prompt, on the demo model and two
replicas.

    python -m bench.prefix

Each round: one cold chat with a system prompt of about 1,000 tokens that nobody has sent before, then chats that share
it, one after the other. Reported: median TTFT cold and warm, and what share of the warm chats' prompt tokens came from
the cache.
"""

import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.support.loopback import WORDS, Answer, ChatClient
from bench.support.platform_process import running_platform
from bench.support.report import Row, write_report

CONFIG = """
gateway: {{port: {port}}}
pools:
  - {{name: demo, model: demo, served_names: [demo], tier: edge, replicas: 2}}
"""
SYSTEM_TOKENS = 1000
ROUNDS, CHATS = 4, 20


class Reuse(NamedTuple):
    cold: Answer
    warm: list[Answer]

    @property
    def cached_share(self) -> float:
        num_tokens: int = sum(a.usage["prompt_tokens"] for a in self.warm)
        return sum(cached(a) for a in self.warm) / num_tokens


def cached(answer: Answer) -> int:
    tokens: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def share_a_prompt(client: ChatClient, seed: int, chats: int) -> Reuse:
    """One cold chat and `chats` that share its system prompt, in turn."""
    rng = random.Random(seed)
    system = " ".join([f"{rng.getrandbits(64):x}", *rng.choices(WORDS, k=SYSTEM_TOKENS - 20)])
    answers = [await client.chat(f"Question {number}: name a city.", 4, system=system) for number in range(chats + 1)]
    return Reuse(answers[0], answers[1:])


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), CONFIG) as platform,
        asyncio.Runner() as loop,
    ):
        client = ChatClient(platform.url, "demo", platform.key, extra={"temperature": 0})
        loop.run(client.chat("Hello", 4))
        rounds = [loop.run(share_a_prompt(client, seed, CHATS)) for seed in range(ROUNDS)]
        client.close()
    cold = statistics.median(r.cold.ttft_s for r in rounds)
    warm = statistics.median(a.ttft_s for r in rounds for a in r.warm)
    rows = [
        Row("TTFT warm (ours) and cold (the same platform without a hit)", 1e3 * warm, 1e3 * cold, "ms"),
        Row(
            "share of prompt tokens from the cache, warm",
            100 * statistics.fmean(r.cached_share for r in rounds),
            None,
            "%",
        ),
    ]
    write_report(
        "prefix",
        rows,
        notes=[f"{ROUNDS} rounds of 1 cold and {CHATS} warm chats, SmolLM2-135M-Instruct, two CPU replicas"],
    )


if __name__ == "__main__":
    main()
