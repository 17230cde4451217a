"""Cards and formats that serve a load within targets, at what price; the cheapest is marked.

Not a recommendation of quality: 4 bits answer a little worse than 16, which a plan can't see. Invariant: what is marked
fits, meets the targets, and nothing that does both is cheaper.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from penstock.perf.planning.cards import Card
from penstock.perf.planning.formats import KV_FORMATS, KvFormat, WeightFormat
from penstock.perf.planning.loads import Bounds, Load, Steady, Targets, most_rps, settle
from penstock.perf.planning.memory import MemoryPlan, Setting, plan_memory
from penstock.perf.planning.money import Costs, costs_at, price_of_month
from penstock.perf.planning.roofline import StepTimes
from penstock.perf.planning.shape import ModelShape


class Place(NamedTuple):
    """A machine that a replica stands on."""

    name: str
    memory_bytes: int
    """Memory of each card."""
    parts: int
    """Cards of a replica."""
    price_per_hour: float | None
    """Price of all cards of a replica; None: not known."""


class Option(NamedTuple):
    """A way to serve the model, and what comes of it."""

    place: Place
    form: WeightFormat
    kv: KvFormat
    memory: MemoryPlan
    times: StepTimes | None
    """None: it does not fit."""
    bounds: Bounds | None
    full: Steady | None
    """One replica with as many requests as it carries within the targets; None: it carries none."""
    replicas: int | None
    """Replicas for the load; None: the targets can't be met, whatever their number."""
    steady: Steady | None
    """One of these replicas."""
    costs: Costs | None
    """Costs at full use within the targets."""
    month: float | None
    """Price of the replicas for a month."""
    reason: str
    """Why it does not serve; empty: it does."""

    @property
    def serves(self) -> bool:
        return self.replicas is not None


def weigh(place: Place, shape: ModelShape, setting: Setting, times: StepTimes, load: Load, targets: Targets) -> Option:
    """Weigh one way to serve a load. load: of the whole pool; a rate of 0 asks for one replica at its most."""
    memory = plan_memory(shape, setting, place.memory_bytes)
    nothing = Option(place, setting.form, setting.kv, memory, None, None, None, None, None, None, None, "")
    if not memory.fits:
        lacking = memory.sequence_bytes - memory.kv_bytes
        return nothing._replace(reason=f"{lacking / 1e9:.1f} GB short for one sequence")
    if shape.num_heads % setting.parts:
        return nothing._replace(reason=f"{shape.num_heads} heads can't be divided among {setting.parts} cards")
    bounds = Bounds(setting.max_num_seqs, memory.kv_tokens, setting.max_batched_tokens)
    full = most_rps(times, load, bounds, targets)
    if full is None:
        return nothing._replace(times=times, bounds=bounds, reason=_why_not(times, load, bounds, targets))
    replicas = max(1, math.ceil(load.rate_rps / full.rate_rps - 1e-9))
    own = load._replace(rate_rps=load.rate_rps / replicas) if load.rate_rps else load
    price = place.price_per_hour
    return Option(
        place,
        setting.form,
        setting.kv,
        memory,
        times,
        bounds,
        full,
        replicas,
        full if not load.rate_rps else settle(times, own, bounds),
        None if price is None else costs_at(times, load._replace(rate_rps=full.rate_rps), bounds, full, price),
        None if price is None else price_of_month(price, replicas),
        "",
    )


def _why_not(times: StepTimes, load: Load, bounds: Bounds, targets: Targets) -> str:
    rest = most_rps(times, load, bounds, Targets())
    if rest is None:
        return "keeps up with no such request"
    least = settle(times, load._replace(rate_rps=rest.rate_rps / 1000), bounds)
    if least is not None and least.tpot_p99_s > targets.tpot_s:
        return f"TPOT {1000 * least.tpot_p99_s:.0f} ms alone"
    if least is not None and least.ttft_p99_s > targets.ttft_s:
        return f"TTFT {least.ttft_p99_s:.2f} s alone"
    return "misses the targets"


def cheapest(options: Iterable[Option]) -> Option | None:
    """The one that serves at the lowest price a month; of equal ones the one with the most numbers in a weight. None:
    nothing serves, or no price is known."""
    served = [option for option in options if option.serves and option.month is not None]
    return min(served, key=_rank, default=None)


def _rank(option: Option) -> tuple[float, float, int]:
    assert option.month is not None
    return option.month, -option.form.bits, -option.kv.bytes_each


def can_compute(card: Card, form: WeightFormat, kv: KvFormat) -> bool:
    """Whether the engine computes with these formats on a card."""
    return (card.has_fp8 or form.computes_in != "fp8") and kv in kv_formats(card)


def kv_formats(card: Card | None) -> tuple[KvFormat, ...]:
    """Formats that the engine keeps keys and values in: `engine.kv_dtype`, and float32 where a CPU computes in it.
    card: None: a CPU."""
    if card is None:
        return KV_FORMATS["bf16"], KV_FORMATS["int8"], KV_FORMATS["float32"]
    return (KV_FORMATS["bf16"], KV_FORMATS["fp8"]) if card.has_fp8 else (KV_FORMATS["bf16"],)
