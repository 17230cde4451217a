"""A pool that vLLM serves beside one of our own engine, through the same platform: time to ready, time to first token, tokens a second.

    PENSTOCK_VLLM_PYTHON=.../bin/python python -m bench.vllm_pool

Both pools compute the demo model on the same cores, in turn: while one is measured the other is idle. Prompts of about 250 tokens that nobody
has sent before, answers of 128 tokens; medians of ROUNDS rounds. Ours is the column `ours`, vLLM's is `rival`.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.cpu import descendants
from bench.loopback import WORDS, ChatClient
from bench.platform_process import running_platform
from bench.report import Row, write_report

OURS = "{name: ours, model: demo, served_names: [ours], engine: {threads: 2, max_num_seqs: 16, kv_memory_bytes: 268435456}}"
VLLM = (
    "{name: vllm, model: demo, served_names: [vllm], "
    "engine: {runner: vllm, threads: 2, max_num_seqs: 16, kv_memory_bytes: 268435456, dtype: bfloat16, vllm: {args: %s}}}"
)
EAGER = "{enforce_eager: true}"


def config(*pools: str) -> str:
    """`{port}` stands for the gateway's."""
    return "gateway: {{port: {port}}}\npools:\n" + "".join(f"- {pool}\n" for pool in (pool.replace("{", "{{").replace("}", "}}") for pool in pools))


CONFIG = config(OURS, VLLM % EAGER)
"""For the tests: without compiling, vLLM is sooner ready, and slower."""
START_S = 900.0
ROUNDS = 3
PROMPT_WORDS, ANSWER_TOKENS = 210, 128
STREAMS = (1, 8)


class Speed(NamedTuple):
    ttft_s: float
    tokens_per_s: float


def bridges(root: int) -> list[int]:
    """The processes below `root` that run vLLM."""
    return [process.pid for process in descendants(root) if _is_bridge(process)]


def _is_bridge(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(part.endswith("vllm_bridge.py") for part in process.cmdline())
    except psutil.Error:
        return False


async def measure(client: ChatClient, streams: int, rng: random.Random) -> Speed:
    """All streams at once."""
    prompts = [" ".join([f"{rng.getrandbits(64):x}", *rng.choices(WORDS, k=PROMPT_WORDS)]) for _ in range(streams)]
    begin = time.perf_counter()
    answers = await asyncio.gather(*[client.chat(prompt, ANSWER_TOKENS, timeout_s=600) for prompt in prompts])
    seconds = time.perf_counter() - begin
    return Speed(statistics.median(answer.ttft_s for answer in answers), sum(answer.usage["completion_tokens"] for answer in answers) / seconds)


def run(pools: tuple[str, ...]) -> tuple[float, dict[tuple[str, int], list[Speed]]]:
    """Seconds to ready, and for each model and number of streams the rounds; models by turns."""
    found: dict[tuple[str, int], list[Speed]] = {}
    rng = random.Random(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, running_platform(Path(folder), config(*pools), start_s=START_S) as platform:
        ready_s = time.perf_counter() - begin
        clients = {name: ChatClient(platform.url, name, platform.key, extra={"temperature": 0, "ignore_eos": True}) for name in ("ours", "vllm")}
        if len(pools) > 1:
            with asyncio.Runner() as loop:
                for number in range(-1, ROUNDS):
                    for streams in STREAMS:
                        for name, client in clients.items():
                            speed = loop.run(measure(client, streams, rng))
                            if number >= 0:  # the first round warms what the others use
                                found.setdefault((name, streams), []).append(speed)
                for client in clients.values():
                    client.close()
    return ready_s, found


def main() -> None:
    if not os.environ.get("PENSTOCK_VLLM_PYTHON"):
        sys.exit("PENSTOCK_VLLM_PYTHON names no interpreter with vLLM (docs/vllm.md)")
    args = EAGER if "--eager" in sys.argv else "{}"
    ours_ready_s, _ = run((OURS,))
    ready_s, found = run((OURS, VLLM % args))
    rows = [Row("platform ready: our pool alone, and with the vLLM pool", ours_ready_s, ready_s, "s")]
    for streams in STREAMS:
        ours, theirs = found[("ours", streams)], found[("vllm", streams)]
        rows.append(Row(f"TTFT, {streams} streams", 1e3 * _median(ours, "ttft_s"), 1e3 * _median(theirs, "ttft_s"), "ms"))
        rows.append(Row(f"output tokens/s, {streams} streams", _median(ours, "tokens_per_s"), _median(theirs, "tokens_per_s"), "tokens/s"))
    notes = [f"SmolLM2-135M-Instruct, bf16 both (ours from Q4_1, vLLM from the same weights), 2 threads, {ROUNDS} rounds; EngineArgs {args}"]
    write_report("vllm_pool", rows, notes=notes)


def _median(speeds: list[Speed], name: str) -> float:
    return statistics.median(getattr(speed, name) for speed in speeds)


if __name__ == "__main__":
    main()
