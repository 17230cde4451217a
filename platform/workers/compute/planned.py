"""A checkpoint as the planner takes it: the shape and the format that the engine will hold it in, by headers alone.

Reads no tensor, and needs no torch, so that a plan, `penstock up` and a replica do the same sums. Invariant: what is
planned is never more than what is held, but for padding.
"""

import math
from collections import Counter
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.perf.planning.fits import Least, why_not
from penstock.perf.planning.formats import (
    BF16,
    FLOAT32,
    FP8,
    INT4,
    INT8,
    KV_FORMATS,
    Head,
    KvFormat,
    WeightFormat,
    held_on_cpu,
    kv_token_bytes,
)
from penstock.perf.planning.memory import GB, Setting, plan_memory
from penstock.perf.planning.shape import ModelShape
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.quantization_config import Awq, FloatQuantized, PackQuantized
from penstock.workers.config import EngineConfig

LEAST_CONTEXT = 128
"""Tokens of keys and values without which no replica starts."""
_GGUF_FORMATS: dict[int, WeightFormat] = {
    2: INT4._replace(group=32),
    3: INT4._replace(group=32),
    8: INT8._replace(group=32),
}
"""Formats by ggml's number of a type (Q4_0, Q4_1, Q8_0); others are held dequantized."""


class Planned(NamedTuple):
    """A checkpoint, as the engine will hold it."""

    shape: ModelShape
    form: WeightFormat
    head: Head


def plan_checkpoint(source: ModelSource, config: ModelConfig | None = None, head: Head = "auto") -> Planned:
    """Read what a checkpoint's headers say. config: where it has been read. Raises ConfigError."""
    config = read_config(source) if config is None else config
    shape = shape_of(config, source.name)
    if source.format == "gguf":
        kinds: Counter[int] = Counter()
        for tensor in source.gguf.tensors:
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                kinds[tensor.ggml_type] += math.prod(tensor.shape)
        form = _GGUF_FORMATS.get(kinds.most_common(1)[0][0], BF16) if kinds else BF16
        stored = next((tensor.ggml_type for tensor in source.gguf.tensors if tensor.name == "token_embd.weight"), None)
        return Planned(shape, form, _gguf_head(head, stored))
    return Planned(shape, format_of(config), head)


def _gguf_head(head: Head, stored: int | None) -> Head:
    """How tables are held that the file has in `stored`, ggml's number of a type; they are never held in more bits."""
    form = _GGUF_FORMATS.get(stored or 0)
    if form is None:
        return head
    return "int4" if form.bits == 4 or head == "int4" else "int8"


def format_of(config: ModelConfig) -> WeightFormat:
    """The format of the layers' matrices that a Hugging Face config.json declares."""
    match config.quantization:
        case Awq(group_size):
            return INT4._replace(group=group_size)
        case PackQuantized(4, group_size, _):
            return INT4._replace(group=group_size)
        case PackQuantized(_, group_size, _):
            return INT8._replace(group=group_size)
        case FloatQuantized(rounds_activations=True):
            return FP8
    return BF16


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    hidden, layers = config.hidden_size, config.num_layers
    query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = config.has_qkv_bias * (query + 2 * shared) + config.has_o_bias * hidden
    biases += config.has_mlp_bias * (2 * config.intermediate_size + hidden)
    vectors = layers * (2 * hidden + biases + config.has_qk_norm * 2 * config.head_dim) + hidden
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        is_tied=config.is_tied,
        max_context=config.max_full_context,
        num_vector_params=vectors,
    )


def kv_format(engine: EngineConfig, *, is_float32: bool = False) -> KvFormat:
    """The format of keys and values that the settings name. is_float32: computation is in float32."""
    auto = "float32" if is_float32 else "bf16"
    return KV_FORMATS[{"auto": auto}.get(engine.kv_dtype, engine.kv_dtype)]


def least_of(source: ModelSource, config: ModelConfig, engine: EngineConfig, *, is_float32: bool = False) -> Least:
    """The least that a replica of our own engine takes, of each part where it is divided.

    is_float32: weights that are not quantized, and what computes, are in float32.
    """
    planned = plan_checkpoint(source, config, engine.lm_head)
    form = FLOAT32 if is_float32 and planned.form is BF16 else planned.form
    if engine.device == "cpu":
        form = held_on_cpu(form)
    size = engine.kv_memory_bytes
    tokens = min(LEAST_CONTEXT, engine.max_model_len or LEAST_CONTEXT, planned.shape.max_context or LEAST_CONTEXT)
    least_kv = tokens * kv_token_bytes(planned.shape, kv_format(engine, is_float32=is_float32))
    parts = engine.tensor_parallel_size
    return Least(planned.shape, form, planned.head, size if isinstance(size, int) else least_kv // parts, parts)


def left_for_kv(source: ModelSource, config: ModelConfig, engine: EngineConfig, total_bytes: int) -> int:
    """Bytes that `engine.memory_share` of `total_bytes` leaves for keys and values by the planner's sums, for whoever
    can't measure: another engine on a CPU, which holds weights in the checkpoint's format or in 16 bits. Raises
    ConfigError where nothing useful is left."""
    planned = plan_checkpoint(source, config, "keep")
    parts = engine.tensor_parallel_size
    context = engine.max_model_len or planned.shape.max_context or LEAST_CONTEXT
    setting = Setting(
        context,
        BF16 if source.format == "gguf" else held_on_cpu(planned.form),
        head="keep",
        memory_share=engine.memory_share,
        max_num_seqs=engine.max_num_seqs,
        max_batched_tokens=engine.token_budget,
        is_gpu=False,
    )
    plan = plan_memory(planned.shape, setting, total_bytes)
    least = min(context, LEAST_CONTEXT) * plan.token_bytes
    if plan.kv_bytes < least:
        lines = ", ".join(f"{line.name} {line.num_bytes / GB:.2f} GB" for line in plan.lines)
        raise ConfigError(
            f"engine.kv_memory_bytes: auto finds no room: {lines}; engine.memory_share {engine.memory_share:g} of "
            f"{total_bytes / GB:.2f} GB leaves {plan.kv_bytes / GB:.2f} GB"
        )
    return plan.kv_bytes // parts


def check_fits(least: Least, total_bytes: int, engine: EngineConfig, memory: str) -> None:
    """Refuse a model that can't be in `total_bytes`, of which `engine.memory_share` counts where the KV cache takes
    what is left. memory: what it is. Raises ConfigError with the sum and what would fit."""
    is_auto = engine.kv_memory_bytes == "auto"
    allowed = int(total_bytes * engine.memory_share) if is_auto else total_bytes
    share = f" with engine.memory_share: {engine.memory_share:g}" if is_auto else ""
    reason = why_not(least, allowed, memory + share)
    if reason is not None:
        raise ConfigError(f"the model can't fit, so no weight is read. {reason}")
