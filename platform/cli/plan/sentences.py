"""The conclusions of a plan, a sentence each: only what its sums give."""

import math
from collections.abc import Iterator

from penstock.cli.plan.make import Plan
from penstock.perf.planning.choice import Option
from penstock.perf.planning.memory import GB
from penstock.perf.planning.money import HOURS_OF_MONTH
from penstock.perf.planning.roofline import Roofline


def conclude(plan: Plan) -> Iterator[str]:
    """Sentences about the option that is shown, the most important first."""
    option = plan.shown
    if option is None:
        return
    yield say_choice(plan, option)
    yield say_room(plan, option)
    if isinstance(option.times, Roofline):
        yield say_bound(option.times, option)
    if option.steady is not None:
        yield say_load(option)
    if plan.tariff is not None:
        tariff = plan.tariff
        yield (
            f"A tariff of {tariff.input:.3g} a million input, {tariff.cached:.3g} cached and {tariff.output:.3g} "
            f"output tokens pays for it with {100 * tariff.margin:.0f} % on top, if {100 * tariff.utilisation:.0f} % "
            "of what it can carry is used."
        )


def name_of(option: Option) -> str:
    """An option in words: 2 H100, int4, KV in fp8."""
    count = "" if option.place.parts == 1 else f"{option.place.parts} "
    return f"{count}{option.place.name}, {option.form.name}, KV in {option.kv.name}"


def say_choice(plan: Plan, option: Option) -> str:
    targets = _targets(plan)
    if not option.serves:
        return f"Nothing that was asked about serves it{targets}: the best, {name_of(option)}, {_short(option)}."
    if option.month is None:
        return f"{name_of(option)} serves it{targets}; without a price nobody knows what it costs (--price-per-hour)."
    replicas = "one replica" if option.replicas == 1 else f"{option.replicas} replicas"
    return (
        f"The cheapest that serves it{targets} is {name_of(option)}: {replicas}, {option.month:,.0f} a month "
        f"({HOURS_OF_MONTH} hours)."
    )


def _short(option: Option) -> str:
    return f"does not: {option.reason}" if option.reason else "does not"


def say_room(plan: Plan, option: Option) -> str:
    """How many sequences, and what the sum on the back of an envelope leaves out."""
    memory, room = option.memory, option.memory.room
    total = memory.total_bytes * option.place.parts / GB
    context = _tokens(plan.question.context_tokens)
    extras = memory.taken_bytes - option_weights(option)
    held = (
        f"{room.itemised}" if room.itemised == room.without_adapters else f"{room.itemised} to {room.without_adapters}"
    )
    if room.bare <= room.itemised:
        return f"{total:.0f} GB holds {held} of these at {context}."
    return (
        f"{total:.0f} GB holds {held} of these at {context}, not {room.bare}: {memory.reserve_bytes / GB:.1f} GB of "
        f"each card stay free (that alone leaves {room.reserved}), and scales, activations and the rest take "
        f"{extras / GB:.1f} GB beside the weights."
    )


def option_weights(option: Option) -> int:
    """Bytes of the matrices, without scales and tables."""
    return sum(line.num_bytes for line in option.memory.lines if line.name == "weights")


def say_bound(times: Roofline, option: Option) -> str:
    knee = times.knee_rows
    rows = option.memory.room.itemised or 1
    binds = (
        "memory's bandwidth binds decoding at any batch"
        if knee is None
        else f"products bind a decode step from {knee} rows on, below that the bandwidth does"
    )
    context = times.knee_context(max(1, min(rows, knee or rows)))
    return f"Prompts are bound by FLOP/s; {binds}; beyond {context:,} tokens of context a row, its keys and values do."


def say_load(option: Option) -> str:
    steady = option.steady
    assert steady is not None
    assert option.full is not None
    return (
        f"Each replica carries {option.full.rate_rps:.3g} such requests a second within the targets and gets "
        f"{steady.rate_rps:.3g}: {steady.rows:.1f} decode at once, TTFT {_time(steady.ttft_s)} "
        f"(99 of 100 within {_time(steady.ttft_p99_s)}), TPOT {_time(steady.tpot_s)} ({_time(steady.tpot_p99_s)})."
    )


def _targets(plan: Plan) -> str:
    targets = plan.question.targets
    named = [
        f"{name} {_time(value)}"
        for name, value in (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s))
        if math.isfinite(value)
    ]
    return f" within {' and '.join(named)}" if named else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _tokens(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens} tokens"
