"""A plan for people: the memory as lines and a bar, the times, every option, and a sentence for each conclusion."""

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.plan.make import Plan
from penstock.cli.plan.sentences import conclude, name_of
from penstock.perf.planning.cards import PRICE_DATE, PRICE_SOURCE
from penstock.perf.planning.choice import Option
from penstock.perf.planning.loads import decode_alone, prefill_s
from penstock.perf.planning.memory import GB

BAR_WIDTH = 72
COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "red", "bright_blue", "bright_magenta")
MOST_OPTIONS = 16
BATCHES = (1, 8, 32, 128)
"""Rows whose times are shown, as far as they fit."""


def show_plan(plan: Plan, console: Console) -> None:
    shape, option = plan.found.shape, plan.shown
    console.print(
        f"{shape.name}: {shape.num_params / 1e9:.2f} billion parameters, {shape.num_layers} layers, "
        f"{shape.num_kv_heads} key/value heads of {shape.head_dim}, by {plan.found.origin}",
        highlight=False,
        markup=False,
    )
    for note in _notes(plan):
        console.print(note, highlight=False, markup=False)
    assert option is not None
    console.print(f"\nMemory of {name_of(option)}", highlight=False, markup=False)
    console.print(memory_table(option))
    console.print(memory_bar(option))
    if option.times is not None:
        console.print(times_table(plan, option))
    console.print(options_table(plan))
    for line in refusals(plan):
        console.print(line, highlight=False, markup=False)
    for sentence in conclude(plan):
        console.print(sentence, highlight=False, markup=False)


def _notes(plan: Plan) -> list[str]:
    notes = []
    if plan.machine is not None:
        notes.append(f"This machine: {plan.machine.note}")
    if plan.measured is not None:
        notes.append(f"Step times: fitted by the {plan.measured.replicas} replicas of pool {plan.measured.pool}")
    if plan.question.price_per_hour is None and any(option.place.price_per_hour for option in plan.options):
        notes.append(f"Prices: {PRICE_SOURCE}, read {PRICE_DATE}; --price-per-hour gives your own")
    return notes


def memory_table(option: Option) -> Table:
    memory = option.memory
    table = Table("of each card" if option.place.parts > 1 else "", "GB", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for line in memory.lines:
        table.add_row(line.name, _gb(line.num_bytes), line.note + (" (estimate)" if line.is_estimate else ""))
    table.add_row("reserve", _gb(memory.reserve_bytes), f"{100 * memory.reserve_bytes / memory.total_bytes:.0f} %")
    sequences = f"{memory.room.itemised} sequences of {_gb(memory.sequence_bytes)}"
    table.add_row(
        "keys and values", _gb(memory.kv_bytes), f"{memory.kv_tokens:,} tokens in {option.kv.name}: {sequences}"
    )
    table.add_row("", _gb(memory.total_bytes), "")
    return table


def memory_bar(option: Option) -> Text:
    """A bar of the memory, to scale, and what its colours mean."""
    memory = option.memory
    parts = [(line.name, line.num_bytes) for line in memory.lines]
    parts += [("keys and values", max(0, memory.kv_bytes)), ("reserve", memory.reserve_bytes)]
    whole = max(memory.total_bytes, sum(num_bytes for _, num_bytes in parts))
    bar, legend = Text(), Text()
    for index, (name, width) in enumerate(zip((name for name, _ in parts), _widths(parts, whole), strict=True)):
        colour = "white" if name == "reserve" else COLOURS[index % len(COLOURS)]
        bar.append(("░" if name == "reserve" else "█") * width, colour)
        if width:
            legend.append("■ ", colour)
            legend.append(f"{name}  ")
    return Text("\n").join((bar, legend))


def _widths(parts: Sequence[tuple[str, int]], whole: int) -> list[int]:
    """Characters of each part: by where it ends, so that they add up."""
    ends, total = [0], 0
    for _, num_bytes in parts:
        total += num_bytes
        ends.append(round(BAR_WIDTH * total / whole))
    return [end - begin for begin, end in itertools.pairwise(ends)]


def times_table(plan: Plan, option: Option) -> Table:
    """Steps of a replica that decodes so many sequences, each in the middle of its answer, and a prompt alone."""
    assert option.times is not None
    assert option.bounds is not None
    load = plan.question.load
    context = max(1, round(load.context_tokens))
    most = max(1, int(option.bounds.rows_for(load)))
    first_s = prefill_s(option.times, load, option.bounds, 0)
    title = f"A prompt of {load.prompt_tokens:.0f} tokens alone: {1000 * first_s:.3g} ms"
    table = Table("rows", "TPOT, ms", "tokens/s", "TTFT beside them, ms", title=title, box=None, pad_edge=False)
    for rows in sorted({*(rows for rows in BATCHES if rows < most), most}):
        found = decode_alone(option.times, rows, context)
        beside_s = found.tpot_s / 2 + prefill_s(option.times, load, option.bounds, rows)
        table.add_row(f"{rows}", f"{1000 * found.tpot_s:.3g}", f"{found.tokens_s:,.0f}", f"{1000 * beside_s:.3g}")
    return table


def options_table(plan: Plan) -> Table:
    load = plan.question.load
    title = (
        f"In the prices' unit, of a million tokens; requests of {load.prompt_tokens:.0f} and {load.output_tokens:.0f}"
    )
    table = Table("", "option", "req/s", "replicas", "TTFT p99", "TPOT p99", "input", "output", "a month", title=title)
    table.box, table.pad_edge = None, False
    served = sorted((option for option in plan.options if option.serves), key=_rank)
    for option in served[:MOST_OPTIONS]:
        table.add_row("*" if option is plan.best else "", name_of(option), *_figures(option))
    if len(served) > MOST_OPTIONS:
        table.caption = f"{len(served) - MOST_OPTIONS} more, which cost more, are in --json"
    return table


def refusals(plan: Plan) -> list[str]:
    """Options that do not serve, a line each, those with the least reason first."""
    refused = [option for option in plan.options if not option.serves]
    lines = [f"not {name_of(option)}: {option.reason}" for option in refused[:MOST_OPTIONS]]
    more = len(refused) - MOST_OPTIONS
    return [*lines, f"and {more} more in --json"] if more > 0 else lines


def _rank(option: Option) -> tuple[float, float]:
    return option.month or 0.0, -option.form.bits


def _figures(option: Option) -> list[str]:
    assert option.full is not None
    steady = option.steady or option.full
    costs = option.costs
    return [
        f"{option.full.rate_rps:.3g}",
        str(option.replicas),
        f"{steady.ttft_p99_s:.2f} s",
        f"{1000 * steady.tpot_p99_s:.3g} ms",
        "-" if costs is None else f"{costs.input:.3g}",
        "-" if costs is None else f"{costs.output:.3g}",
        "-" if option.month is None else f"{option.month:,.0f}",
    ]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f}"
