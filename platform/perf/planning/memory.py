"""Where the memory of a card goes, line by line, and how many sequences of a context the rest holds.

Sums of shapes and formats. Three lines are rules of thumb and say so (`is_estimate`): the largest step's activations,
recorded steps, and what the process and the device's libraries take; `kv_memory_bytes: auto` measures them at start.
Invariant: lines and what is left for keys and values add up to the card's memory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.perf.planning.formats import (
    FLOAT32,
    KV_FORMATS,
    Head,
    KvFormat,
    WeightFormat,
    kv_token_bytes,
    matrix_bytes,
    scale_bytes,
    table_bits,
    table_bytes,
    vector_bytes,
    weight_bytes,
)
from penstock.perf.planning.shape import ModelShape

GB = 10**9
GPU_RUNTIME_BYTES = GB // 2
"""Memory of a CUDA context with the libraries that torch loads. Assumed, not measured."""
GPU_RECORDED_BYTES = GB // 2
"""Memory of recorded steps: places for the activations of the largest, and what the driver keeps of each. Assumed."""
CPU_RUNTIME_BYTES = 170 * 10**6
"""Resident memory of a replica's process on a CPU before any weight: Python, torch, libraries."""
DENSE_BITS = 16
DRAFTS = 4
"""Places for draft tokens behind each row, `engine.speculation.max_draft_tokens`."""
LOGIT_COPIES = 3
"""Times that a row's logits are held in float32 at once: computed, adjusted, sorted. On a CPU once more where the head
is dense, and its product is in another type."""


class Draft(NamedTuple):
    """A draft model beside the model, or the layers of one."""

    shape: ModelShape
    form: WeightFormat


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served, as far as memory depends on it."""

    context_tokens: int
    """Tokens of each sequence, prompt and answer."""
    form: WeightFormat
    kv: KvFormat = KV_FORMATS["bf16"]
    head: Head = "auto"
    parts: int = 1
    """Cards that the model is divided among."""
    memory_share: float = 0.9
    """Part of the memory that a replica may take."""
    max_num_seqs: int = 256
    """Sequences of the largest step."""
    max_batched_tokens: int = 8192
    """Tokens of the largest step."""
    block_size: int = 16
    adapter_slots: int = 0
    adapter_rank: int = 32
    draft: Draft | None = None
    draft_head_bytes: int = 0
    """Bytes of a draft head's file, if there is one; it keeps a layer of keys and values beside the model's."""
    is_gpu: bool = True


class Line(NamedTuple):
    """Something that takes memory of each card."""

    name: str
    num_bytes: int
    note: str
    is_estimate: bool = False


class Room(NamedTuple):
    """Number of sequences of a context that fit."""

    bare: int
    """All memory, weights without scales, nothing else beside: the sum on the back of an envelope."""
    reserved: int
    """The same with the share of the memory that a replica may take."""
    itemised: int
    """Sequences of that share, less every line."""
    without_adapters: int
    """Sequences of the same with no adapter in any slot."""


class MemoryPlan(NamedTuple):
    """A card's memory, of one of the cards where there are several."""

    total_bytes: int
    lines: tuple[Line, ...]
    reserve_bytes: int
    """What `memory_share` leaves alone."""
    kv_bytes: int
    """Left for keys and values; negative: so much is lacking."""
    sequence_bytes: int
    """Keys and values of one sequence of the whole context, in blocks."""
    token_bytes: int
    room: Room

    @property
    def fits(self) -> bool:
        """Whether one sequence of the context does."""
        return self.room.itemised >= 1

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv_bytes) // self.token_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of all lines."""
        return sum(line.num_bytes for line in self.lines)


def plan_memory(shape: ModelShape, setting: Setting, total_bytes: int) -> MemoryPlan:
    """Plan one card of `total_bytes`, which holds its part of the model."""
    lines = tuple(line for line in list_lines(shape, setting) if line.num_bytes)
    token_bytes = kv_bytes_of_token(shape, setting)
    sequence_bytes = -(-setting.context_tokens // setting.block_size) * setting.block_size * token_bytes
    allowed = int(total_bytes * setting.memory_share)
    left = allowed - sum(line.num_bytes for line in lines)
    adapters = sum(line.num_bytes for line in lines if line.name == "adapters")
    plain = math.ceil(shape.num_params * setting.form.bits / 8 / setting.parts)
    own = setting.context_tokens * token_bytes
    room = Room(
        _count(total_bytes - plain, own),
        _count(allowed - plain, own),
        _count(left, sequence_bytes),
        _count(left + adapters, sequence_bytes),
    )
    return MemoryPlan(total_bytes, lines, total_bytes - allowed, left, sequence_bytes, token_bytes, room)


def _count(num_bytes: int, each: int) -> int:
    return max(0, num_bytes // each)


def kv_bytes_of_token(shape: ModelShape, setting: Setting) -> int:
    """Bytes of a token's keys and values on one card, those of a draft model or head included. Heads are divided among
    the cards, as far as there are as many."""
    own = -(-kv_token_bytes(shape, setting.kv) // min(setting.parts, shape.num_kv_heads))
    if setting.draft is not None:
        own += kv_token_bytes(setting.draft.shape, setting.kv)
    if setting.draft_head_bytes:
        own += kv_token_bytes(shape, setting.kv) // shape.num_layers
    return own


def list_lines(shape: ModelShape, setting: Setting) -> list[Line]:
    """What takes memory beside the model's keys and values, on each card."""
    form, parts = setting.form, setting.parts
    share = (
        ""
        if parts == 1
        else f", a {parts}th of them"
        if parts > 3
        else ", half of them"
        if parts == 2
        else ", a third of them"
    )
    scale_note = f"a scale for each {form.group or 'row'}" if form.group_bits else ""
    lines = [
        Line(
            "weights",
            round(matrix_bytes(shape, form) / parts),
            f"{shape.layer_params / 1e9:.2f} billion, {form.name}{share}",
        ),
        Line("scales", round(scale_bytes(shape, form) / parts), scale_note),
        Line(
            "embedding, head",
            round(table_bytes(shape, form, setting.head) / parts),
            f"{shape.table_params / 1e9:.2f} billion{', one table' if shape.is_tied else ''}",
        ),
        Line("norms, biases", round(vector_bytes(shape, form)), "on every card" if parts > 1 else ""),
    ]
    if setting.adapter_slots:
        lines.append(_adapters(shape, setting))
    if setting.draft is not None:
        lines.append(
            Line("draft model", round(weight_bytes(setting.draft.shape, setting.draft.form)), setting.draft.shape.name)
        )
    if setting.draft_head_bytes:
        lines.append(Line("draft head", setting.draft_head_bytes, "as its file has it"))
    lines.append(_activations(shape, setting))
    if setting.is_gpu:
        lines.append(Line("recorded steps", GPU_RECORDED_BYTES, "assumed", is_estimate=True))
        lines.append(Line("device's libraries", GPU_RUNTIME_BYTES, "assumed", is_estimate=True))
    else:
        lines.append(Line("process", CPU_RUNTIME_BYTES, "Python, torch, libraries", is_estimate=True))
    return lines


def _adapters(shape: ModelShape, setting: Setting) -> Line:
    """Adapters of the highest rank for every matrix, in all slots: two factors in 16 bits, and a float32 for each
    output, as `engine.adapters` keeps room for."""
    rank = setting.adapter_rank
    each = sum(2 * rank * (outputs + inputs) + 4 * outputs for outputs, inputs in shape.matrices) * shape.num_layers
    note = f"{setting.adapter_slots} of rank {rank}"
    return Line("adapters", round(setting.adapter_slots * each / setting.parts), note)


def _activations(shape: ModelShape, setting: Setting) -> Line:
    """The largest step: of each token what a layer holds at once, of each row its logits. Rows are those of sequences
    with their drafts, which requests may bring themselves, or of a scored prompt."""
    hidden, inner = shape.hidden_size, shape.intermediate_size or 4 * shape.hidden_size
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    number_bytes = 2 if setting.is_gpu and setting.form.name != FLOAT32.name else 4
    token = number_bytes * (3 * hidden + (heads + 3 * inner) / setting.parts)
    copies, written = LOGIT_COPIES, 0.0
    if not setting.is_gpu:  # where memory is taken when it is written to, so that a step's keys and values count too
        copies += table_bits(setting.form, setting.head) >= DENSE_BITS
        written = kv_token_bytes(shape, setting.kv)
    row = 4 * shape.vocab_size * copies
    tokens = setting.max_batched_tokens
    rows = min(tokens, max(setting.max_num_seqs * (1 + DRAFTS), MAX_SCORED_TOKENS))
    num_bytes = round(tokens * (token + written) + rows * row)
    return Line("activations", num_bytes, f"a step of {tokens} tokens, {rows} rows' logits", is_estimate=True)
