"""A pool that vLLM serves beside one of our own engine, through the same platform: time to ready, time to first token,
tokens a second.

    PENSTOCK_VLLM_PYTHON=.../bin/python python -m bench.vllm_pool [--eager]

Both pools compute the demo model on the same cores for the same client, in turn: while one is measured the other is
idle, and who comes first changes from round to round. Prompts of about 250 tokens that nobody has sent before, answers
of 128 tokens, ROUNDS rounds after one that warms. Ours is the column `ours`, vLLM's is `rival`; the notes have the
median and range of the rounds' own ratios, in which a slow minute of the machine is on both sides. Before that, a whole
answer and the chunks of a stream of both pools are compared: the same fields of the same types. About six minutes on
two cores.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from bench.support.cpu import command_line, descendants
from bench.support.loopback import WORDS, ChatClient
from bench.support.platform_process import running_platform
from bench.support.report import Row, write_report

OURS = (
    "{name: ours, model: demo, served_names: [ours], "
    "engine: {threads: 2, max_num_seqs: 16, kv_memory_bytes: 268435456}}"
)
VLLM = (
    "{name: vllm, model: demo, served_names: [vllm], "
    "engine: {runner: vllm, threads: 2, max_num_seqs: 16, kv_memory_bytes: 268435456, dtype: bfloat16, "
    "adapters: {slots: %d}, vllm: {args: %s}}}"
)
EAGER = "{enforce_eager: true}"


def config(*pools: str) -> str:
    """`{port}` stands for the gateway's."""
    return "gateway: {{port: {port}}}\npools:\n" + "".join(
        f"- {pool}\n" for pool in (pool.replace("{", "{{").replace("}", "}}") for pool in pools)
    )


CONFIG = config(OURS, VLLM % (2, EAGER))
"""Configuration of the tests: without compiling, vLLM is sooner ready, and slower; so it is with room for adapters."""
START_S = 900.0
ROUNDS = 6
PROMPT_WORDS, ANSWER_TOKENS = 210, 128
STREAMS = (1, 8)


MODELS = ("ours", "vllm")


class Speed(NamedTuple):
    ttft_s: float
    tokens_per_s: float


class Pair(NamedTuple):
    """One round."""

    ours: Speed
    vllm: Speed


def bridges(root: int) -> list[int]:
    """The processes below `root` that run vLLM."""
    return [process.pid for process in descendants(root) if _is_bridge(process)]


def _is_bridge(process: psutil.Process) -> bool:
    return any(part.endswith("vllm/bridge.py") for part in command_line(process))


async def measure(client: ChatClient, streams: int, rng: random.Random) -> Speed:
    """All streams at once."""
    prompts = [" ".join([f"{rng.getrandbits(64):x}", *rng.choices(WORDS, k=PROMPT_WORDS)]) for _ in range(streams)]
    begin = time.perf_counter()
    answers = await asyncio.gather(*[client.chat(prompt, ANSWER_TOKENS, timeout_s=600) for prompt in prompts])
    seconds = time.perf_counter() - begin
    return Speed(
        statistics.median(answer.ttft_s for answer in answers),
        sum(answer.usage["completion_tokens"] for answer in answers) / seconds,
    )


def shape(value: Any) -> Any:
    """Fields and types of an answer, without what they say."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def shapes(url: str, key: str, model: str) -> list[Any]:
    """Field names and types of a whole answer, and of a stream's first, second and last chunk."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False) as client:
        whole = client.post("/v1/chat/completions", json=body)
        stream = client.post(
            "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    events = [
        json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line.startswith("data: {")
    ]
    return [shape(answer) for answer in (whole.json(), events[0], events[1], events[-1])]


def ready_s() -> float:
    """Seconds until a platform with our pool alone is ready."""
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), config(OURS), start_s=START_S),
    ):
        return time.perf_counter() - begin


def run(args: str) -> tuple[float, dict[int, list[Pair]]]:
    """Seconds to ready with both pools, and the rounds for each number of streams. Raises RuntimeError where answers
    differ in their shape."""
    rng = random.Random(1)
    begin = time.perf_counter()
    text = config(OURS, VLLM % (0, args))
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), text, start_s=START_S) as platform,
    ):
        both_ready_s = time.perf_counter() - begin
        ours, theirs = (shapes(platform.url, platform.key, model) for model in MODELS)
        if ours != theirs:
            raise RuntimeError(f"answers differ in their shape:\n{ours}\n{theirs}")
        clients = {
            name: ChatClient(platform.url, name, platform.key, extra={"temperature": 0, "ignore_eos": True})
            for name in MODELS
        }
        with asyncio.Runner() as loop:
            found = {
                streams: [loop.run(a_round(clients, streams, rng, number)) for number in range(ROUNDS + 1)][1:]
                for streams in STREAMS
            }
            for client in clients.values():
                client.close()
    return both_ready_s, found


async def a_round(clients: dict[str, ChatClient], streams: int, rng: random.Random, number: int) -> Pair:
    """One model after the other."""
    speeds = {name: await measure(clients[name], streams, rng) for name in (MODELS if number % 2 else MODELS[::-1])}
    return Pair(**speeds)


def main() -> None:
    if not os.environ.get("PENSTOCK_VLLM_PYTHON"):
        sys.exit("PENSTOCK_VLLM_PYTHON names no interpreter with vLLM (docs/vllm.md)")
    args = EAGER if "--eager" in sys.argv else "{}"
    alone_s = ready_s()
    both_ready_s, found = run(args)
    rows = [Row("platform ready: our pool alone, and with the vLLM pool", alone_s, both_ready_s, "s")]
    notes = [
        f"SmolLM2-135M-Instruct, bf16 both (ours from Q4_1, vLLM from the same weights), 2 threads; {ROUNDS} rounds "
        f"in turn; EngineArgs {args}",
        "answers of both pools have the same fields of the same types, whole and as a stream",
    ]
    for streams, pairs in found.items():
        for name, field, scale, unit in (
            ("TTFT", "ttft_s", 1e3, "ms"),
            ("output tokens/s", "tokens_per_s", 1.0, "tokens/s"),
        ):
            row, spread = summary(
                f"{name}, {streams} streams",
                [(scale * getattr(pair.ours, field), scale * getattr(pair.vllm, field)) for pair in pairs],
                unit,
            )
            rows.append(row)
            notes.append(spread)
    write_report("vllm_pool", rows, notes=notes)


def summary(name: str, pairs: list[tuple[float, float]], unit: str) -> tuple[Row, str]:
    """Medians, and in words the median and range of the rounds' own ratios."""
    ratios = [ours / theirs for ours, theirs in pairs]
    row = Row(
        name, statistics.median(ours for ours, _ in pairs), statistics.median(theirs for _, theirs in pairs), unit
    )
    return (
        row,
        f"{name}: ours / vLLM round by round {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )


if __name__ == "__main__":
    main()
