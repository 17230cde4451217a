"""How many bytes weights, keys and values take in each format, scales included.

Not what a checkpoint is read from (`workers.compute.readers`): what the engine holds. Invariant: a format that has
scales never counts without them; EXACT4 has none, and nothing serves it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from penstock.perf.planning.shape import ModelShape

TABLE_GROUP = 32
"""Columns of a group of embedding and head, where they are rounded."""
Head = Literal["auto", "keep", "int8", "int4"]
"""How embedding and head are held, as `engine.lm_head` has it."""


class WeightFormat(NamedTuple):
    """Numbers of the layers' matrices."""

    name: str
    bits: float
    """Bits of a number; a mean where there are several formats."""
    group: int | None
    """Columns that share a scale. None: a row does, or there is none."""
    group_bits: float
    """Bits of a group's scale, and of its offset or zero point; a mean where there are several formats."""
    computes_in: Literal["float32", "bf16", "fp8"]
    """Type that products are computed in, by which a card's FLOP/s are taken."""
    checkpoint: str
    """Checkpoint that has it."""
    table_scale_bits: int = 16
    """Bits of a scale of embedding and head, where they are rounded to 8 bits."""
    parts: "tuple[tuple[WeightFormat, float], ...]" = ()
    """Formats that are mixed in it, with the share of the numbers that each has; none: it is one."""

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16


FLOAT32 = WeightFormat("float32", 32, None, 0, "float32", "safetensors, on CPUs without bfloat16")
BF16 = WeightFormat("bf16", 16, None, 0, "bf16", "safetensors in bfloat16 or float16")
FP8 = WeightFormat("fp8", 8, None, 32, "fp8", "compressed-tensors, float-quantized")
INT8 = WeightFormat("int8", 8, 128, 16, "bf16", "compressed-tensors, pack-quantized, 8 bits")
INT4 = WeightFormat(
    "int4", 4, 128, 32, "bf16", "AutoAWQ, or compressed-tensors in 4 bits; `penstock quantize` makes it"
)
EXACT4 = WeightFormat(
    "exact4", 4, None, 0, "bf16", "no checkpoint: 4 bits a parameter and nothing else, for comparison"
)
FORMATS: dict[str, WeightFormat] = {each.name: each for each in (FLOAT32, BF16, FP8, INT8, INT4, EXACT4)}


def mix(numbers: Mapping[WeightFormat, float]) -> WeightFormat:
    """The format of matrices of which some are in one format and some in another, all whose groups are equally wide.
    numbers: how many each has, of at least one format."""
    parts = sorted(numbers.items(), key=lambda part: part[1], reverse=True)
    first, total = parts[0][0], sum(numbers.values())
    if len(parts) == 1:
        return first
    groups = {form.group for form in numbers if form.group_bits}
    assert len(groups) == 1, f"groups of {groups} columns have no mean"
    return WeightFormat(
        " and ".join(dict.fromkeys(form.name for form, _ in parts)),
        sum(form.bits * number for form, number in parts) / total,
        groups.pop(),
        sum(form.group_bits * number for form, number in parts) / total,
        first.computes_in,
        "a GGUF file of several types",
        max(form.table_scale_bits for form in numbers),
        tuple((form, number / total) for form, number in parts),
    )


def held_in_float32(form: WeightFormat) -> WeightFormat:
    """The format where what is in no fewer than 16 bits is held in float32."""
    if form.parts:
        return mix({held_in_float32(part): share for part, share in form.parts})
    return FLOAT32 if form is BF16 else form


def held_on_cpu(form: WeightFormat) -> WeightFormat:
    """The format as the CPU's kernels hold it: scales of 8-bit numbers in float32; and 8-bit floats dequantized."""
    if form.parts:
        return mix({held_on_cpu(part): share for part, share in form.parts})
    if form is FP8:
        return held_on_cpu(BF16)
    return form._replace(table_scale_bits=32, group_bits=32 if form.bits == 8 else form.group_bits)


SERVED = (BF16, FP8, INT8, INT4)
"""Formats that a plan compares where none is named."""


class KvFormat(NamedTuple):
    """Numbers of keys and values."""

    name: str
    bytes_each: int
    scale_bytes: int
    """Bytes of the scale that each token's head has, once for keys and once for values."""


KV_FORMATS: dict[str, KvFormat] = {
    each.name: each
    for each in (
        KvFormat("float32", 4, 0),
        KvFormat("bf16", 2, 0),
        KvFormat("fp8", 1, 4),
        KvFormat("int8", 1, 4),
    )
}


def kv_token_bytes(shape: ModelShape, kv: KvFormat) -> int:
    """Bytes of a token's keys and values, all layers."""
    return shape.kv_heads_of_all_layers * (shape.head_dim * kv.bytes_each + kv.scale_bytes)


def matrix_bytes(shape: ModelShape, form: WeightFormat) -> float:
    """Bytes of the numbers of the layers' matrices, without scales."""
    return shape.layer_params * form.bits / 8


def scale_bytes(shape: ModelShape, form: WeightFormat) -> float:
    """Bytes of the scales of the layers' matrices, and of their offsets."""
    if not form.group_bits:
        return 0.0
    groups = sum(
        outputs * (1 if form.group is None else -(-inputs // form.group)) for outputs, inputs in shape.matrices
    )
    return shape.num_layers * groups * form.group_bits / 8


def table_bits(form: WeightFormat, head: Head, dtype_bits: int = 16) -> float:
    """Bits of a number of embedding and head, their scales included, by `engine.lm_head`."""
    if form.name == EXACT4.name:
        return form.bits
    if head == "auto":  # beside matrices of 8-bit floats an engine leaves the tables as they are
        head = "int8" if form.is_quantized and form.computes_in != "fp8" else "keep"
    if head == "int8":
        return 8 + form.table_scale_bits / TABLE_GROUP
    return 4 + 32 / TABLE_GROUP if head == "int4" else max(dtype_bits, 32 if form.name == FLOAT32.name else 16)


def table_bytes(shape: ModelShape, form: WeightFormat, head: Head) -> float:
    """Bytes of embedding and head."""
    return shape.table_params * table_bits(form, head) / 8


def vector_bytes(shape: ModelShape, form: WeightFormat) -> float:
    """Bytes of norms and biases."""
    return shape.num_vector_params * (form.bits if form.name in (EXACT4.name, FLOAT32.name) else 16) / 8


def weight_bytes(shape: ModelShape, form: WeightFormat, head: Head = "auto") -> float:
    """Bytes of a whole model."""
    return (
        matrix_bytes(shape, form)
        + scale_bytes(shape, form)
        + table_bytes(shape, form, head)
        + vector_bytes(shape, form)
    )
