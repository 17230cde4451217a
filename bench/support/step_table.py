"""Step times of an engine on this machine as a table for `engine.timed.table`, in a process of its own: `python -m
bench.support.step_table MODEL CONFIG CORES`.

CONFIG: an EngineConfig as JSON; CORES: the cores to run on, like 1 or 0,1. Prints a JSON object: `table`, what
`penstock.workers.engine.timed` reads, and `num_blocks` and `max_model_len` of the runner. Each point of the grid is the
median of its repetitions; the spread of the repetitions about it is the table's noise.
"""

import os
import statistics
import sys
import time
from functools import cache
from itertools import count

import msgspec

from penstock.text.source import resolve
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import make_chunk
from penstock.workers.engine.sequence import Step
from penstock.workers.engine.timed import StepTable

DECODE_ROWS = (0, 1, 4, 5, 8, 16)
PREFILL_TOKENS = (0, 8, 16, 32, 64, 96, 128, 192, 256, 512)
SHORT_PROMPT_TOKENS = 128
"""Length below which a prompt's end makes its whole step take longer: its activations are rounded with more digits
(`engine.activations`)."""
KV_TOKENS = (0, 2048, 8192)
REPEATS, REPEATS_S = 5, 0.4
"""Times that a step is measured, at the least, and seconds in which quick ones are measured more often."""


def measure_table(runner: TorchRunner, block_size: int, source: str) -> StepTable:
    """The table of a runner's step times. Raises RuntimeError where its KV cache holds less than the grid."""
    if runner.num_blocks * block_size < KV_TOKENS[-1] + PREFILL_TOKENS[-1]:
        raise RuntimeError(f"{runner.num_blocks} blocks of {block_size} tokens do not hold {KV_TOKENS[-1]} tokens")
    spreads: list[float] = []

    @cache
    def measure(rows: int, prefill: int, kv_tokens: int, has_short: bool) -> float:
        times = _times(runner, block_size, rows, prefill, kv_tokens, has_short=has_short)
        if len(times) > 1:
            spreads.append(statistics.stdev(times) / statistics.mean(times))
        return round(statistics.median(times), 7) if times else 0.0

    seconds, short_seconds = (
        [
            [[measure(rows, prefill, kv, has_short and prefill > 0) for kv in KV_TOKENS] for prefill in PREFILL_TOKENS]
            for rows in DECODE_ROWS
        ]
        for has_short in (False, True)
    )
    return StepTable(
        list(DECODE_ROWS),
        list(PREFILL_TOKENS),
        list(KV_TOKENS),
        seconds,
        noise=round(statistics.median(spreads), 4),
        source=source,
        short_prompt_tokens=SHORT_PROMPT_TOKENS,
        short_seconds=short_seconds,
    )


def _times(
    runner: TorchRunner, block_size: int, rows: int, prefill: int, kv_tokens: int, *, has_short: bool
) -> list[float]:
    """Seconds of a step, several times. A step without rows reads no context: its time does not depend on it. Without a
    short prompt, few prompt tokens are the rest of a longer one."""
    if not rows + prefill:
        return []
    blocks = count()
    context = min(max(1, kv_tokens // max(1, rows)), runner.max_model_len - 1)
    chunks = [make_chunk(context, 1, blocks, runner.num_blocks, block_size) for _ in range(rows)]
    short = min(prefill, SHORT_PROMPT_TOKENS // 2) if has_short else 0
    if short:
        chunks.append(make_chunk(0, short, blocks, runner.num_blocks, block_size))
    if prefill > short:
        behind = max(0, SHORT_PROMPT_TOKENS - (prefill - short))
        chunks.append(make_chunk(behind, prefill - short, blocks, runner.num_blocks, block_size))
    times: list[float] = []
    until_s = time.perf_counter() + REPEATS_S
    while len(times) <= REPEATS or time.perf_counter() < until_s:
        begin_s = time.perf_counter()
        runner.launch(Step(chunks, []))()
        times.append(time.perf_counter() - begin_s)
    for chunk in chunks:
        runner.forget(chunk.seq)
    return times[1:]  # the first one warms


def main() -> None:
    model, config_json, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    config = msgspec.json.decode(config_json, type=EngineConfig)
    runner = load_runner(resolve(model), config)
    table = measure_table(runner, config.block_size, f"{model} on core {cores}, measured before")
    found = {"table": table, "num_blocks": runner.num_blocks, "max_model_len": runner.max_model_len}
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
