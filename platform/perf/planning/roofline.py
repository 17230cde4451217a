"""How long a step takes by a roofline: each part of it by what binds there, the bytes that it reads or the products
that it computes.

The roofline model is Williams, Waterman, Patterson (2009); parts of a step are added up, since a layer's products wait
for each other. Not the performance model that replicas fit to their own steps (`perf.model`), which goes before this
wherever it is known. Invariant: no prediction falls when work is added. Times are seconds, FLOPs count a product and
its sum as two.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from penstock.perf.model import step_time_s
from penstock.perf.planning.cards import Card
from penstock.perf.planning.formats import (
    EXACT4,
    Head,
    KvFormat,
    WeightFormat,
    kv_token_bytes,
    matrix_bytes,
    scale_bytes,
    table_bits,
)
from penstock.perf.planning.shape import ModelShape
from penstock.wire.frames import StepCosts

BANDWIDTH_SHARE = 0.8
"""Part of the data sheet's bandwidth that is counted on."""
FLOPS_SHARE = 0.6
"""Part of the data sheet's FLOP/s that is counted on."""
LAUNCH_S = 3e-6
"""Time that a launch takes in a recorded step: what lies between the products of an 8B, on an H100 (BENCHMARKS.md)."""
PACKED_BANDWIDTH_SHARE = 0.75
"""Part of what is counted on of the bandwidth that products with packed 4-bit integers reach with few rows: an H100."""
PACKED_FLOPS = ((1, 0.2), (32, 0.2), (64, 0.33), (128, 0.33), (256, 0.4), (512, 0.45), (1024, 0.52), (2048, 0.6))
"""Rows, and the part of the data sheet's FLOP/s that products with packed integers reach: an H100. Beyond the last but
one the matrix is dequantized before."""
LAUNCHES_OF_LAYER = 10
LINK_SHARE = 0.7
"""Part of a link's bandwidth that sums over cards reach."""
SUM_S = 10e-6
"""Shortest time of a sum over cards. Assumed."""
SUMS_OF_LAYER = 2


class StepTimes(Protocol):
    """How long a step takes: the roofline, or the costs that a replica has fitted."""

    def __call__(self, *, rows: float, prefill_tokens: float, query_context: float, kv_tokens: float) -> float:
        """Seconds of a step; arguments as of `perf.model.step_time_s`."""


class FittedTimes(NamedTuple):
    """Step times by the costs of a running platform."""

    costs: StepCosts

    def __call__(self, *, rows: float, prefill_tokens: float, query_context: float, kv_tokens: float) -> float:
        return step_time_s(
            self.costs,
            rows=rows,  # type: ignore[arg-type]  # means of many steps
            prefill_tokens=prefill_tokens,  # type: ignore[arg-type]
            query_context=query_context,
            kv_tokens=kv_tokens,  # type: ignore[arg-type]
        )


class Speed(NamedTuple):
    """FLOP/s by the number of rows that are multiplied at once; between two points linear, beyond the last constant."""

    rows: tuple[int, ...]
    flops: tuple[float, ...]

    def at(self, rows: float) -> float:
        index = bisect_left(self.rows, rows)
        if index == 0:
            return self.flops[0] * min(1.0, rows / self.rows[0])
        if index == len(self.rows):
            return self.flops[-1]
        low, high = self.rows[index - 1], self.rows[index]
        part = (rows - low) / (high - low)
        return self.flops[index - 1] * (1 - part) + self.flops[index] * part

    def seconds(self, flops_of_row: float, rows: float) -> float:
        """Time of `rows` rows; by points in between, so that it never falls when a row is added."""
        if rows <= 0:
            return 0.0
        found = flops_of_row * rows / self.at(rows)
        before = [flops_of_row * own / speed for own, speed in zip(self.rows, self.flops, strict=True) if own < rows]
        return max([found, *before])


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine reaches, of each card where a model is in parts."""

    bandwidth: float
    """Bytes a second, read from memory."""
    products: Speed
    """Products of the layers' matrices in their format."""
    head_products: Speed
    """Products of the head."""
    attention_flops: float
    """FLOP/s of attention over a prompt."""
    row_attention_flops: float
    """FLOP/s of attention of a row that decodes."""
    step_s: float = 0.0
    """Time that a step takes for nothing: launches, Python."""
    token_s: float = 0.0
    """Time of each token beside products and attention."""
    link: float | None = None
    """Bytes a second to other cards; None: there are none."""
    weight_share: float = 1.0
    """Part of the bandwidth at which the layers' matrices are read."""


def rates_of(card: Card, shape: ModelShape, form: WeightFormat, parts: int) -> Rates:
    """Rates of a card of the table: shares of its data sheet."""
    in_fp8 = form.computes_in == "fp8" and card.fp8_tflops is not None
    own = card.fp8_tflops if in_fp8 else card.bf16_tflops
    assert own is not None
    bf16 = card.bf16_tflops * 1e12 * FLOPS_SHARE
    return Rates(
        bandwidth=card.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE,
        products=_products(form, own * 1e12),
        head_products=Speed((1,), (bf16,)),
        attention_flops=bf16,
        row_attention_flops=bf16,
        step_s=LAUNCH_S * (LAUNCHES_OF_LAYER * shape.num_layers + 5),
        link=card.link_gb_s * 1e9 * LINK_SHARE if parts > 1 else None,
        weight_share=_weight_share(form),
    )


def _is_packed(form: WeightFormat) -> bool:
    """Whether the engine multiplies by the integers as they are packed."""
    return form.bits < 16 and form.computes_in == "bf16" and form.name != EXACT4.name


def _products(form: WeightFormat, flops: float) -> Speed:
    """Products of a format, or of several that are mixed in it, on a card of so many FLOP/s."""
    parts = form.parts or ((form, 1.0),)
    if not any(_is_packed(part) for part, _ in parts):
        return Speed((1,), (flops * FLOPS_SHARE,))
    found = [
        1 / sum(count / (flops * (share if _is_packed(part) else FLOPS_SHARE)) for part, count in parts)
        for _, share in PACKED_FLOPS
    ]
    return Speed(tuple(rows for rows, _ in PACKED_FLOPS), tuple(found))


def _weight_share(form: WeightFormat) -> float:
    """Part of the bandwidth at which a format's matrices are read, or those of several that are mixed in it."""
    parts = form.parts or ((form, 1.0),)
    num_bits = [count * part.bits for part, count in parts]
    slow = [PACKED_BANDWIDTH_SHARE if _is_packed(part) and part.bits < 8 else 1.0 for part, _ in parts]
    return sum(num_bits) / sum(bits / share for bits, share in zip(num_bits, slow, strict=True))


class Part(NamedTuple):
    """A part of a step."""

    name: str
    bytes_s: float
    """Time of what it reads."""
    flops_s: float
    """Time of what it computes."""

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.flops_s)


class _Work(NamedTuple):
    """Work of each card."""

    layer_flops: float
    """FLOPs of a token in the layers' products."""
    head_flops: float
    """FLOPs of a row in the head."""
    head_bytes: float
    kv_bytes: float
    """Bytes of a context token's keys and values."""
    pair_flops: float
    """FLOPs of attention of a token to another."""


@dataclass(frozen=True)
class Roofline:
    """Step times of a model on a machine."""

    shape: ModelShape
    form: WeightFormat
    kv: KvFormat
    rates: Rates
    head: Head = "auto"
    parts: int = 1

    def __call__(self, *, rows: float, prefill_tokens: float, query_context: float, kv_tokens: float) -> float:
        tokens = rows + prefill_tokens
        found = self.list_parts(rows, prefill_tokens, query_context, kv_tokens)
        fixed = self.rates.step_s + tokens * self.rates.token_s
        return fixed + sum(part.seconds for part in found) + self._sums_s(tokens)

    def list_parts(self, rows: float, prefill_tokens: float, query_context: float, kv_tokens: float) -> list[Part]:
        """Parts of a step: layers, head, attention of rows, attention of prompts."""
        rates, work = self.rates, self._work
        tokens, sampled = rows + prefill_tokens, rows + (1 if prefill_tokens else 0)
        return [
            Part(
                "layers",
                self.layer_bytes / (rates.bandwidth * rates.weight_share),
                rates.products.seconds(work.layer_flops, tokens),
            ),
            Part("head", work.head_bytes / rates.bandwidth, rates.head_products.seconds(work.head_flops, sampled)),
            Part(
                "context",
                kv_tokens * work.kv_bytes / rates.bandwidth,
                kv_tokens * work.pair_flops / rates.row_attention_flops,
            ),
            Part("prompt's attention", 0.0, query_context * work.pair_flops / rates.attention_flops),
        ]

    @cached_property
    def _work(self) -> "_Work":
        shape, parts = self.shape, self.parts
        return _Work(
            2 * shape.layer_params / parts,
            2 * shape.head_params / parts,
            shape.head_params * table_bits(self.form, self.head) / 8 / parts,
            kv_token_bytes(shape, self.kv) / min(parts, shape.num_kv_heads),
            4 * shape.num_layers * shape.num_heads * shape.head_dim / parts,
        )

    @cached_property
    def layer_bytes(self) -> float:
        """Bytes of the layers' matrices and scales on each card."""
        return (matrix_bytes(self.shape, self.form) + scale_bytes(self.shape, self.form)) / self.parts

    @property
    def knee_rows(self) -> int | None:
        """Fewest rows from which on products bind a decode step and no longer the bytes of the weights; None: no
        number of rows that a pool has."""
        for rows in range(1, 4097):
            layers = self.list_parts(rows, 0, 0, 0)[0]
            if layers.flops_s >= layers.bytes_s:
                return rows
        return None

    def knee_context(self, rows: int) -> int:
        """Tokens of context of each row from which on keys and values take longer than the weights."""
        parts = {part.name: part for part in self.list_parts(rows, 0, 0, rows)}
        return max(1, round((parts["layers"].seconds + parts["head"].seconds) / parts["context"].seconds))

    def _sums_s(self, tokens: float) -> float:
        """Time of sums over the cards: a ring sends 2 (parts - 1) / parts of the numbers, in 16 bits."""
        if self.rates.link is None or self.parts == 1:
            return 0.0
        sent = 2 * (self.parts - 1) / self.parts * tokens * self.shape.hidden_size * 2
        return self.shape.num_layers * SUMS_OF_LAYER * (SUM_S + sent / self.rates.link)
