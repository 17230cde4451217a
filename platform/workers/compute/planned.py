"""A checkpoint as the planner takes it: the shape and the format that the engine will hold it in, by headers alone.

Reads no tensor, and needs no torch, so that a plan, `penstock up` and a replica do the same sums. Invariant: what is
planned is never more than what is held, but for padding.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.perf.planning.fits import Least, why_not
from penstock.perf.planning.formats import (
    BF16,
    FP8,
    INT4,
    INT8,
    KV_FORMATS,
    Head,
    KvFormat,
    WeightFormat,
    held_in_float32,
    held_on_cpu,
    kv_token_bytes,
    mix,
)
from penstock.perf.planning.memory import GB, Setting, plan_memory
from penstock.perf.planning.shape import ModelShape
from penstock.text.gguf_header import TensorInfo
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
_STACKED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}
"""Matrices that are held as one, dequantized where they are in different formats; by their names in GGUF files."""


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
        matrices = {tensor.name: tensor for tensor in source.gguf.tensors if len(tensor.shape) == 2}
        return Planned(shape, _gguf_form(matrices), _gguf_head(head, matrices))
    return Planned(shape, format_of(config), head)


def _gguf_form(matrices: Mapping[str, TensorInfo]) -> WeightFormat:
    """The format of the layers' matrices of a GGUF file, by how many numbers are in each."""
    stacked: dict[tuple[str, str], Counter[WeightFormat]] = {}
    for name, tensor in matrices.items():
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4:
            kinds = stacked.setdefault((parts[1], _STACKED.get(parts[2], parts[2])), Counter())
            kinds[_GGUF_FORMATS.get(tensor.ggml_type, BF16)] += math.prod(tensor.shape)
    held: Counter[WeightFormat] = Counter()
    for kinds in stacked.values():
        held[next(iter(kinds)) if len(kinds) == 1 else BF16] += kinds.total()
    return mix(held) if held else BF16


def _gguf_head(head: Head, matrices: Mapping[str, TensorInfo]) -> Head:
    """How a GGUF file's tables are held: never in more bits than the file has them in; rounded to 8 bits by `auto`
    where any matrix stays quantized. The fewer bits count where the two tables differ."""
    if head == "auto" and any(tensor.ggml_type in _GGUF_FORMATS for tensor in matrices.values()):
        head = "int8"
    tables = (matrices.get(name) for name in ("token_embd.weight", "output.weight"))
    bits = [_GGUF_FORMATS[table.ggml_type].bits for table in tables if table and table.ggml_type in _GGUF_FORMATS]
    if not bits or head == "int4":
        return head
    return "int4" if min(bits) == 4 else "int8"


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
    form = held_in_float32(planned.form) if is_float32 else planned.form
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
