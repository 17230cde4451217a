"""A model in two parts, where there are two GPUs: its logits beside the whole one's, as steps come and recorded, how
long a step takes, and how soon a replica ends that has lost a rank in the middle of one.

`python -m bench.gpu.steps.parallel FOLDER [--check]` is the replica of the last.
"""

import random
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.rows import Rows
from bench.gpu.steps.checkpoint import write_checkpoint
from bench.gpu.steps.engines import prompt_of
from bench.gpu.steps.shapes import MOST_DIFFERENCE, bench_for
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.parallel.steps import ParallelStepModel
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import make_chunk
from penstock.workers.engine.sequence import Chunk, Step

SIZE = 2
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
TOKEN = 3
NUM_STEPS = 50
END_S = 60.0
"""Time in which a replica must have ended that has lost a rank, seconds."""


class Scale(NamedTuple):
    batches: tuple[int, ...]
    context: int


def scale_for(*, is_check: bool) -> Scale:
    return Scale((1, 3), 20) if is_check else Scale((1, 64), 1024)


def settings_for(size: int, *, is_check: bool) -> EngineConfig:
    if is_check:
        return EngineConfig(
            dtype="float32", threads=1, tensor_parallel_size=size, kv_memory_bytes=2**20, max_num_seqs=8,
            max_batched_tokens=64,
        )  # fmt: skip
    return EngineConfig(
        device="cuda", tensor_parallel_size=size, kv_memory_bytes=10 * 2**30, max_num_seqs=64, max_batched_tokens=2048
    )


def load(folder: Path, size: int, *, is_check: bool) -> TorchRunner:
    return load_runner(ModelSource("safetensors", folder, "random"), settings_for(size, is_check=is_check))


def prompts_of(runner: TorchRunner, num_rows: int, length: int) -> list[Chunk]:
    """Whole prompts, each in blocks of its own with room for a token more. The same whenever they are drawn."""
    draw, blocks, size = random.Random(5), count(), runner._steps.cache.block_size
    chunks = [make_chunk(0, length, blocks, runner.num_blocks, size, 1, GREEDY, None) for _ in range(num_rows)]
    for chunk in chunks:
        chunk.seq.token_ids[:] = prompt_of(draw, runner._steps.model.config.vocab_size, length)
    return chunks


def next_of(prompts: list[Chunk]) -> list[Chunk]:
    """A decode row behind each prompt, whose token is the same for all."""
    for chunk in prompts:
        chunk.seq.token_ids.append(TOKEN)
    return [Chunk(chunk.seq, chunk.seq.num_tokens - 1, 1) for chunk in prompts]


def logits_of(runner: TorchRunner, scale: Scale) -> list[Tensor]:
    """Logits of prompts, then of decode rows behind them, which are recorded on a GPU."""
    found: list[Tensor] = []
    for rows in scale.batches:
        prompts = prompts_of(runner, rows, scale.context // rows)
        found.append(runner.forward(Step(prompts, []))[1].clone())
        found.append(runner.forward(Step(next_of(prompts), []))[1].clone())
    return found


def seconds_a_step(runner: TorchRunner, num_rows: int, context: int) -> float:
    """Time of a greedy decode step, as they come one after the other."""
    chunks = next_of(prompts_of(runner, num_rows, context))
    begun_s = 0.0
    for number in range(2 * NUM_STEPS):
        if number == NUM_STEPS:
            begun_s = time.perf_counter()
        runner.launch(Step(chunks, []))()
    return (time.perf_counter() - begun_s) / NUM_STEPS


def run(rows: Rows, *, is_check: bool) -> bool:
    """Whether logits are alike, and a replica without one of its ranks has ended in time."""
    if not is_check and torch.cuda.device_count() < SIZE:
        rows.add("a model in two parts", note="not tried: one GPU")
        return True
    scale, bench = scale_for(is_check=is_check), bench_for(is_check=is_check)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-model-") as text:
        folder = Path(text)
        write_checkpoint(bench, folder)
        found: dict[int, tuple[list[Tensor], list[float]]] = {}
        for size in (1, SIZE):
            begun_s = time.perf_counter()
            runner = load(folder, size, is_check=is_check)
            rows.add(f"parts: {size}, until ready", time.perf_counter() - begun_s, None, "s")
            try:
                times = [seconds_a_step(runner, batch, scale.context // batch) for batch in scale.batches]
                found[size] = logits_of(runner, scale), times
            finally:
                runner.close()
        for place, batch in enumerate(scale.batches):
            name = f"a step of {batch} rows: two parts (ours), the whole model (rival)"
            rows.add(name, 1e3 * found[SIZE][1][place], 1e3 * found[1][1][place], "ms")
        difference = max(
            float((ours - whole).abs().max() / whole.abs().max())
            for ours, whole in zip(found[SIZE][0], found[1][0], strict=True)
        )
        rows.add("largest difference of logits in two parts, as a share of the largest", difference)
        end_s = seconds_to_end(folder, is_check=is_check)
        rows.add("from a rank's death in a step until its replica has ended", end_s, None, "s")
    return difference <= MOST_DIFFERENCE[torch.bfloat16] and end_s < END_S


def seconds_to_end(folder: Path, *, is_check: bool) -> float:
    """Seconds from the moment when a rank of a replica that computes is killed to the replica's end. Raises
    RuntimeError where it does not come up, subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "bench.gpu.steps.parallel", str(folder), *(["--check"] if is_check else [])]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as replica:
        try:
            assert replica.stdout is not None
            line = replica.stdout.readline()
            if not line.startswith("rank "):
                raise RuntimeError(f"the replica said {line!r}")
            begun_s = time.perf_counter()
            subprocess.run(["kill", "-KILL", line.split()[1]], check=True)
            replica.wait(END_S)
        finally:
            replica.kill()
    return time.perf_counter() - begun_s


def main() -> None:
    """A replica that computes until it is ended. Says the process id of rank 1 when it has begun to."""
    runner = load(Path(sys.argv[1]), SIZE, is_check="--check" in sys.argv)
    steps = runner._steps
    assert isinstance(steps, ParallelStepModel)
    chunks = next_of(prompts_of(runner, 1, 8))
    for number in count():
        runner.launch(Step(chunks, []))()
        if number == 2:  # what is compiled at first is
            print("rank", steps.rank_pids[0], flush=True)


if __name__ == "__main__":
    main()
