"""What fits in the memory of a GPU, by counting bytes before anything is allocated: planned for cards of 80 GB, smaller
ones get smaller loads, or a row that says that it does not fit."""

from typing import NamedTuple

from bench.gpu.rows import Rows
from bench.gpu.steps.shapes import BLOCK_SIZE, Bench, Variant
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.weights import TABLES, layout, parameter_shapes

TABLE_GROUP = 32
"""Columns of a group of embedding and head."""
GATHERED_COPIES = 4
"""Times that torch's side has a layer's keys and values of the context in memory, one beside the other."""
LEAST_ROWS = 2
"""A load for fewer sequences at once than this is not asked for."""


class Scale(NamedTuple):
    """How large an engine is, and what a run asks of it."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    prompt_tokens: int
    output_tokens: int
    num_requests: int


class WeightBytes(NamedTuple):
    """Bytes of a model's random weights on the device."""

    kept: int
    """What the engine keeps."""
    drawn: int
    """What is there beside that while they are made: integers of a byte each, with their scales in float32."""


def weight_bytes(bench: Bench, variant: Variant) -> WeightBytes:
    """Bytes of the model's weights, to a few per cent."""
    kept = drawn = 0.0
    for name, shape in parameter_shapes(layout(bench.config)).items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if len(shape) == 1 or not variant.is_quantized:
            kept += count * bench.dtype.itemsize
        elif name in TABLES:
            kept += count * (1 + 2 / TABLE_GROUP)
            drawn += count * (1 + 4 / TABLE_GROUP)
        else:
            kept += count * (0.5 + 4 / bench.group_size)
            drawn += count * (1 + 8 / bench.group_size)
    return WeightBytes(round(kept), round(drawn))


def decode_bytes(bench: Bench, variant: Variant, batch: int, context: int) -> int:
    """Bytes of a decode step beside the weights: keys and values of all layers, and what torch's gathers of one."""
    config = bench.config
    cache = blocks_of(batch, context) * KvCache.block_bytes(config, BLOCK_SIZE, variant.kv_dtype)
    layer = 2 * batch * context * config.num_kv_heads * config.head_dim * bench.dtype.itemsize
    return cache + GATHERED_COPIES * layer


def blocks_of(batch: int, context: int) -> int:
    """KV blocks of so many sequences with contexts of so many tokens."""
    return batch * -(-context // BLOCK_SIZE)


def fitted(scale: Scale, bench: Bench, variant: Variant, num_replicas: int = 1) -> Scale | None:
    """The scale, halved until as many replicas that share their weights fit; None where nothing sensible is left."""
    weights = weight_bytes(bench, variant)
    dtype = variant.kv_dtype if bench.device.type == "cuda" else bench.dtype
    block_bytes = KvCache.block_bytes(bench.config, BLOCK_SIZE, dtype)
    if weights.kept + weights.drawn > bench.room_bytes:
        return None
    while weights.kept + num_replicas * scale.num_blocks * block_bytes > bench.room_bytes:
        scale = scale._replace(
            max_num_seqs=scale.max_num_seqs // 2, num_blocks=scale.num_blocks // 2, num_requests=scale.num_requests // 2
        )
        is_enough = scale.num_blocks * BLOCK_SIZE >= scale.max_model_len
        if not is_enough or min(scale.max_num_seqs, scale.num_requests) < LEAST_ROWS:
            return None
    return scale


def fitted_or_said(
    rows: Rows, label: str, scale: Scale, bench: Bench, variant: Variant, num_replicas: int = 1
) -> Scale | None:
    """What `fitted` says, with a row where it is not the scale itself."""
    found = fitted(scale, bench, variant, num_replicas)
    if found is None:
        rows.add(f"{label}: does not fit", note=f"{max(0.0, bench.room_bytes) / 2**30:.1f} GiB are free for it")
    elif found != scale:
        note = f"{scale.max_num_seqs} do not fit; {found.num_requests} requests instead of {scale.num_requests}"
        rows.add(f"{label}: sequences at once", found.max_num_seqs, None, "sequences", note)
    return found
