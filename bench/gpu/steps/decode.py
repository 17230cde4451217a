"""Decode steps: a model of Llama-3.1-8B's shape with random weights, bfloat16 and 4 bits in groups of 128 (tables in 8
bits).

For each batch and context: tokens a second of whole steps as the engine makes them (what a step is made of goes to the
GPU, where the block tables are, a CUDA graph is replayed, the chosen ids come back), beside eager torch on the same
weights and cache (dequantize + linear, fused attention over the gathered context). It has no graph, so in small batches
it waits for launches, and the ratio flatters: the share of the copy bandwidth is what to look at. And the bytes that a
step must read, each matrix once and the context's keys and values, as a share of what copying in the GPU's memory moves
in that time.

What does not fit in the GPU's memory is left out, and said.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.rows import Rows
from bench.gpu.steps.eager import TorchStep
from bench.gpu.steps.shapes import (
    BLOCK_SIZE,
    MOST_DIFFERENCE,
    VARIANTS,
    Bench,
    Variant,
    bench_for,
    copy_rate,
    decode_batch,
    make_cache,
    make_weights,
    median_s,
    packed,
    read_bytes,
)
from bench.gpu.steps.sizes import blocks_of, decode_bytes, weight_bytes
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.replay import Recorded, Replay

CHECKED_BATCHES, CHECKED_CONTEXTS = [1, 3, 9999], [20]
"""Points of a check; the last batch is one that does not fit."""


def add_rows(rows: Rows, bench: Bench, variant: Variant, batches: Iterable[int], contexts: Sequence[int]) -> None:
    """Rows for every batch and context that fits, the smallest first. Raises RuntimeError where our logits and torch's
    differ."""
    points = sorted(itertools.product(batches, contexts), key=lambda point: point[0] * point[1])
    held = sum(weight_bytes(bench, variant))
    fitting = [point for point in points if held + decode_bytes(bench, variant, *point) <= bench.room_bytes]
    for batch, context in points:
        if (batch, context) not in fitting:
            rows.add(f"{variant.name}: batch {batch} with a context of {context} does not fit")
    if not fitting:
        return
    rate = copy_rate(bench)
    weights = make_weights(bench, is_quantized=variant.is_quantized)
    ours = {name: packed(weight, bench) for name, weight in weights.items()}
    block_bytes = KvCache.block_bytes(bench.config, BLOCK_SIZE, variant.kv_dtype)
    cache = make_cache(bench, max(blocks_of(*point) for point in fitting), variant.kv_dtype)
    model = Llama(bench.config, ours, max(contexts), threads=1, exact=False)
    replay = Replay(model, cache, Recorded(sorted({batch for batch, _ in fitting})), max(contexts))
    for batch, context in fitting:
        step = decode_batch(batch, context, bench.config.vocab_size)
        rival = TorchStep(bench, weights, cache, step, model.rope)
        check(variant, replay.on_device(step).cpu(), rival.logits().cpu(), MOST_DIFFERENCE[bench.dtype])
        step = with_tables_kept(step, replay)
        ours_s = median_s(partial(_choose, replay, step), bench.repeats, bench.device)
        rival_s = median_s(rival.best, bench.rival_repeats, bench.device)
        must_read = read_bytes(ours) + batch * context * block_bytes // BLOCK_SIZE
        name = f"{variant.name}, batch {batch}, context {context}"
        rows.add(f"{name}: decoding (ours), eager torch (rival)", batch / ours_s, batch / rival_s, "tokens/s")
        rows.add(
            f"{name}: share of copy bandwidth", 100 * must_read / ours_s / rate, 100 * must_read / rival_s / rate, "%"
        )


def _choose(replay: Replay, step: Batch) -> Tensor:
    return replay.greedy_on_device(step).cpu()


def with_tables_kept(step: Batch, replay: Replay) -> Batch:
    """The step as an engine repeats it: its block tables are on the device already."""
    tables = replay.tables.replace(step.attention.block_tables)
    tables.change(tables.places.to(tables.table.device), tables.blocks.to(tables.table.device))
    return replace(step, attention=replace(step.attention, tables=tables.unchanged()))


def check(variant: Variant, ours: Tensor, theirs: Tensor, most: float) -> None:
    """Raises RuntimeError where logits differ by more than `most` of the largest one."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= most:
        raise RuntimeError(f"{variant.name}: logits differ from torch's by {difference:.3f} of the largest")


def run(rows: Rows, *arguments: str, is_check: bool) -> bool:
    """arguments: the variant's name, batches and contexts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, nargs="+", required=True)
    options = parser.parse_args(arguments)
    batches, contexts = (CHECKED_BATCHES, CHECKED_CONTEXTS) if is_check else (options.batch, options.context)
    variant = next(variant for variant in VARIANTS if variant.name == options.variant)
    with torch.inference_mode():
        add_rows(rows, bench_for(is_check=is_check), variant, batches, contexts)
    return True
