"""Time to ready: a checkpoint of Llama-3.1-8B's shape in AutoAWQ's layout, random, is written, then loaded as a replica
loads one, its file in the page cache.

Cold: nothing is compiled and no kernel was ever chosen, as on a machine that has not seen this code. Warm: the next
process, which finds what the first one has kept. Each is a process of its own (`python -m bench.gpu.steps.ready`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.rows import Rows
from bench.gpu.steps.checkpoint import write_checkpoint
from bench.gpu.steps.shapes import VARIANTS, bench_for
from bench.gpu.steps.sizes import weight_bytes
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport

LOAD_S = 180.0
"""Longest time for loading once, seconds."""
SPARE_BYTES = 2**30
"""Bytes of the disk that are left."""


def load(folder: Path, *, is_check: bool) -> dict[str, float]:
    """Seconds from the call of the loader until the weights are there and all is warmed, and until the engine serves;
    and the tokens of the KV cache."""
    settings = EngineConfig(
        device="cpu" if is_check else "cuda",
        kv_memory_bytes=2**20 if is_check else "auto",
        max_num_seqs=8 if is_check else 256,
        max_batched_tokens=64 if is_check else 2048,
    )
    begun_s = time.perf_counter()
    runner = load_runner(ModelSource("safetensors", folder, "random"), settings)
    loaded_s = time.perf_counter() - begun_s
    engine = Engine(runner, settings, ChainHasher(bytes(32), settings.block_size), _drop)
    engine.start()
    ready_s = time.perf_counter() - begun_s
    engine.stop()
    return {"loaded_s": loaded_s, "ready_s": ready_s, "kv_tokens": runner.num_blocks * settings.block_size}


def _drop(_report: StepReport) -> None:
    """Nobody asks anything."""


def environment_of(cache: Path, *, is_check: bool) -> dict[str, str]:
    """Variables of a process whose caches lie below `cache`; in a check Triton's alone, because the CPU's kernels would
    be built anew too."""
    own = {"TRITON_CACHE_DIR": str(cache / "triton")}
    if not is_check:
        own |= {"XDG_CACHE_HOME": str(cache), "CUDA_CACHE_PATH": str(cache / "cuda")}
    return dict(os.environ) | own


def run(rows: Rows, *, is_check: bool) -> bool:
    """Rows of a cold start and of a warm one."""
    bench = bench_for(is_check=is_check)
    variant = next(variant for variant in VARIANTS if variant.is_quantized)
    with tempfile.TemporaryDirectory(prefix="model-") as text:
        folder = Path(text)
        wanted, free = weight_bytes(bench, variant).kept, shutil.disk_usage(folder).free
        if wanted > bench.room_bytes or 2 * wanted + SPARE_BYTES > free:
            note = f"{bench.room_bytes / 2**30:.1f} GiB of the GPU are free, {free / 2**30:.1f} of the disk"
            rows.add("time to ready: the checkpoint does not fit", note=note)
            return True
        num_bytes = write_checkpoint(bench, folder)
        rows.add("a random checkpoint in AutoAWQ's layout", num_bytes / 2**30, None, "GiB")
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        for label in ("cold, nothing compiled", "warm, compiled by another process"):
            _add_start(rows, label, folder, is_check=is_check)
    return True


def _add_start(rows: Rows, label: str, folder: Path, *, is_check: bool) -> None:
    """Rows of a start in a process of its own. Raises subprocess.SubprocessError where it fails."""
    command = [sys.executable, "-m", "bench.gpu.steps.ready", str(folder), *(["--check"] if is_check else [])]
    environment = environment_of(folder / "cache", is_check=is_check)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LOAD_S)
    found = json.loads(done.stdout.splitlines()[-1])
    what = "weights on the device, memory measured, graphs captured, steps warmed"
    rows.add(f"loading it, {label}: {what}", found["loaded_s"], None, "s")
    rows.add(f"time to ready, {label}, the file in the page cache", found["ready_s"], None, "s")
    rows.add(f"tokens of its KV cache, {label}", found["kv_tokens"], None, "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a checkpoint once and say how long it took.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="on the CPU")
    options = parser.parse_args()
    print(json.dumps(load(options.folder, is_check=options.check)))


if __name__ == "__main__":
    main()
