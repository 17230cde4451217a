"""What tokens cost, and what to charge for them: prices an hour over tokens a second.

Not an account (`tenancy`), whose sums are whole numbers: a plan is an estimate, in the unit of the price. Invariant: a
replica's tokens at these costs add up to its price.
"""

from typing import NamedTuple

from penstock.perf.planning.loads import Bounds, Load, Steady, prefill_s
from penstock.perf.planning.roofline import StepTimes

HOURS_OF_MONTH = 730
"""Hours of a year, 8760, over twelve."""
MILLION = 1_000_000


class Costs(NamedTuple):
    """Cost of a million tokens, by kind."""

    input: float
    cached: float
    """Cost of prompt tokens whose keys and values are found: that the others attend to them."""
    output: float


class Proposed(NamedTuple):
    """A tariff, per million tokens, and what it rests on."""

    input: float
    cached: float
    output: float
    utilisation: float
    """Part of the paid capacity that is expected to be used."""
    margin: float
    """Added to the cost, as a part of it."""


def cost_of_million(price_per_hour: float, tokens_s: float) -> float:
    """Cost of a million tokens, where so many a second come of what is paid by the hour."""
    return MILLION * price_per_hour / (3600 * tokens_s)


def costs_at(times: StepTimes, load: Load, bounds: Bounds, steady: Steady, price_per_hour: float) -> Costs:
    """Costs of a replica's tokens under a load. Its time is shared out by what each kind would take by itself: a prompt
    alone, an output's rows among those that decode. Time in which nothing runs is shared out in the same way."""
    prompt_s = prefill_s(times, load, bounds, 0)
    output_s = load.output_tokens * steady.decode_s / max(1.0, steady.rows)
    request = price_per_hour / 3600 / steady.rate_rps
    prompt_part = prompt_s / (prompt_s + output_s)
    cached_part = _cached_s(times, load, bounds) * load.cached_tokens / prompt_s if load.cached_tokens else 0.0
    per_prompt = MILLION * request * prompt_part
    cached = MILLION * request * prompt_part * _cached_s(times, load, bounds) / prompt_s
    return Costs(
        per_prompt * (1 - min(1.0, cached_part)) / max(1.0, load.prompt_tokens),
        cached,
        MILLION * request * (1 - prompt_part) / max(1.0, load.output_tokens),
    )


def _cached_s(times: StepTimes, load: Load, bounds: Bounds) -> float:
    """Seconds that a cached token adds to a prompt: twice as many tokens before it beside none."""
    tokens = max(1.0, load.prompt_tokens)
    behind = load._replace(prompt_tokens=tokens, cached_tokens=tokens)
    plain = load._replace(prompt_tokens=tokens, cached_tokens=0.0)
    return max(0.0, prefill_s(times, behind, bounds, 0) - prefill_s(times, plain, bounds, 0)) / tokens


def propose_tariff(costs: Costs, utilisation: float, margin: float) -> Proposed:
    """Costs at full use, over the part that is expected to be used, and a margin on top."""
    factor = (1 + margin) / utilisation
    return Proposed(costs.input * factor, costs.cached * factor, costs.output * factor, utilisation, margin)


def price_of_month(price_per_hour: float, replicas: int) -> float:
    """Price of replicas that are always there."""
    return price_per_hour * replicas * HOURS_OF_MONTH
