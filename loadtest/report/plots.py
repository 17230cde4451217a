"""The figures of one run. Pure but for matplotlib's own state, which `style.drawing` restores."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from penstock_loadtest.report.number_formats import format_duration, format_number, format_share
from penstock_loadtest.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINES,
    MUTED,
    NAVY,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    SKY,
    Colour,
    Plot,
    add_legend,
    new_axes,
    set_counts_axis,
    set_seconds_axis,
)
from penstock_loadtest.results.columns import Columns, Floats, Sample, measure_token_gaps
from penstock_loadtest.results.records import Outcome
from penstock_loadtest.results.series import Percentiles, Replicas, Series
from penstock_loadtest.results.summary import Group
from penstock_loadtest.scenario import Targets

OUTCOME_COLOURS: dict[Outcome, Colour] = {
    "finished": SKY,
    "cancelled": GREY,
    "shed": ORANGE,
    "failed": RED,
    "unfinished": PURPLE,
}
MAX_TENANTS = 14
_FAR_ABOVE = 4.0  # a target so many times over the highest value would only flatten the lines
_SHARES = np.concatenate([np.linspace(0, 0.98, 197), np.linspace(0.981, 1, 77)])


class Plots(NamedTuple):
    """The figures that there is something to show in, in the report's order."""

    over_time: list[Plot]
    distributions: list[Plot]
    tenants: list[Plot]


def draw_run_plots(
    columns: Columns, over_time: Series | None, replicas: Replicas | None, tenants: list[Group], targets: Targets
) -> Plots:
    return Plots(
        list(_over_time(over_time, replicas, targets)),
        list(_distributions(columns, targets)),
        [*_tenants_shares(tenants), *_tenants_latency(tenants, targets)] if len(tenants) > 1 else [],
    )


def _over_time(found: Series | None, replicas: Replicas | None, targets: Targets) -> Iterator[Plot]:
    if found is not None:
        yield from _latencies_over_time(found, targets)
        yield _load_over_time(found)
        yield _outcomes_over_time(found)
        yield _tokens_over_time(found)
        yield _in_flight_over_time(found)
    if replicas is not None:
        yield _replicas_over_time(replicas)


def _latencies_over_time(found: Series, targets: Targets) -> Iterator[Plot]:
    for name, word, what, values, target_s in (
        ("ttft_over_time", "TTFT", "time to first token", found.ttft_s, targets.ttft_s),
        ("tpot_over_time", "TPOT", "time per output token", found.tpot_s, targets.tpot_s),
    ):
        if np.isnan(values.p50).all():
            continue
        yield _percentiles_over_time(name, word, what, values, target_s, found)


def _percentiles_over_time(
    name: str, word: str, what: str, values: Percentiles, target_s: float, found: Series
) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.edges_s)
    at = found.middle_s / scale
    drawn.fill_between(at, values.p50, values.p99, color=SKY.light, alpha=0.22, linewidth=0)
    for label, series, colour, width in (
        ("p50", values.p50, SKY, 1.8),
        ("p90", values.p90, BLUE, 1.5),
        ("p99", values.p99, NAVY, 1.5),
    ):
        _line(drawn, at, series, colour, label=label, width=width)
    highest = float(np.nanmax(values.p99))
    if target_s <= _FAR_ABOVE * highest:
        _target_line(drawn.axhline, target_s)
        highest = max(highest, target_s)
    else:
        drawn.plot([], [], linestyle="", label=f"target {format_duration(target_s)}, far above")
    set_seconds_axis(drawn, _least(values.p50), highest)
    add_legend(drawn)
    over = np.nansum(values.p99 > target_s)
    return Plot(
        name,
        f"{word} over time",
        figure,
        f"{what.capitalize()}, by intended time in windows of {format_duration(found.width_s)}: half, 9 in 10 and 99 "
        "in 100 requests were below the lines.",
        f"{word} over time: p50 between {_range(values.p50)}, p99 between {_range(values.p99)}; p99 over the target "
        f"of {format_duration(target_s)} in {over} of {len(at)} windows.",
    )


def _load_over_time(found: Series) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.edges_s)
    drawn.stairs(found.offered_per_s, found.edges_s / scale, fill=True, color=GREY.light, alpha=0.5, label="offered")
    drawn.stairs(found.good_per_s, found.edges_s / scale, fill=True, color=GREEN.light, alpha=0.75, label="of it good")
    _line(drawn, found.middle_s / scale, found.finished_per_s, NAVY, label="finished")
    drawn.set_ylabel("requests/s")
    set_counts_axis(drawn)
    add_legend(drawn)
    return Plot(
        "load_over_time",
        "Offered load, throughput and goodput",
        figure,
        "Offered and good by intended time, finished by the time of the end. Grey above green: load that missed its "
        "targets or was cancelled.",
        f"Requests a second over time: offered {_range(found.offered_per_s, format_number)}, finished "
        f"{_range(found.finished_per_s, format_number)}, good {_range(found.good_per_s, format_number)}.",
    )


def _outcomes_over_time(found: Series) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.edges_s)
    bottom = np.zeros(len(found.middle_s))
    for outcome, count in found.outcomes.items():
        if not count.any():
            continue
        top = bottom + count
        drawn.stairs(
            top, found.edges_s / scale, baseline=bottom, fill=True, color=OUTCOME_COLOURS[outcome].light, label=outcome
        )
        bottom = top
    drawn.set_ylabel(f"requests / {format_duration(found.width_s)}")
    set_counts_axis(drawn, is_whole=True)
    add_legend(drawn)
    totals = ", ".join(f"{int(count.sum())} {outcome}" for outcome, count in found.outcomes.items() if count.any())
    caption = f"By intended time, in windows of {format_duration(found.width_s)}."
    return Plot("outcomes_over_time", "How requests ended", figure, caption, f"Outcomes over time: {totals}.")


def _tokens_over_time(found: Series) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.edges_s)
    drawn.fill_between(found.middle_s / scale, found.output_tokens_per_s, color=BLUE.light, alpha=0.12, linewidth=0)
    _line(drawn, found.middle_s / scale, found.output_tokens_per_s, BLUE)
    drawn.set_ylabel("tokens/s")
    set_counts_axis(drawn)
    return Plot(
        "tokens_over_time",
        "Output tokens",
        figure,
        "Tokens by the time they came, of all requests.",
        f"Output tokens a second over time: {_range(found.output_tokens_per_s, format_number)}.",
    )


def _in_flight_over_time(found: Series) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.edges_s)
    drawn.stairs(found.in_flight, found.edges_s / scale, color=PURPLE.light, linewidth=1.6)
    drawn.stairs(found.in_flight, found.edges_s / scale, fill=True, color=PURPLE.light, alpha=0.12)
    drawn.set_ylabel("requests")
    set_counts_axis(drawn, is_whole=True)
    return Plot(
        "in_flight_over_time",
        "Requests in flight",
        figure,
        "The most that were sent and had not ended. A line that climbs all the way says that the server can't keep up.",
        f"Requests in flight over time: {_range(found.in_flight, format_number)} at once.",
    )


def _replicas_over_time(found: Replicas) -> Plot:
    figure, drawn = new_axes()
    scale = _time_axis(drawn, found.at_s)
    for i, (name, count) in enumerate(found.counts.items()):
        drawn.step(
            found.at_s / scale, count, where="post", color=LINES[i % len(LINES)].light, label=name, linewidth=2.0
        )
    drawn.set_ylabel("ready replicas")
    set_counts_axis(drawn, is_whole=True)
    if len(found.counts) <= 4:
        add_legend(drawn)
    else:
        drawn.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    counts = "; ".join(f"{name} {_range(count, format_number)}" for name, count in found.counts.items())
    return Plot(
        "replicas_over_time",
        "Replicas",
        figure,
        "As the server said when it was asked.",
        f"Replicas over time: {counts}.",
    )


def _distributions(columns: Columns, targets: Targets) -> Iterator[Plot]:
    for name, title, what, sample, target_s in (
        ("ttft_cdf", "TTFT", "requests", Sample(columns.ttft_s), targets.ttft_s),
        ("tpot_cdf", "TPOT", "requests", Sample(columns.tpot_s), targets.tpot_s),
        ("inter_token_cdf", "Time between tokens", "gaps", measure_token_gaps(columns), None),
        ("e2e_cdf", "End to end", "finished requests", Sample(columns.e2e_s), None),
    ):
        if len(sample):
            yield _distribution(name, title, what, sample, target_s)


def _distribution(name: str, title: str, what: str, sample: Sample, target_s: float | None) -> Plot:
    figure, drawn = new_axes()
    values = sample.quantiles(_SHARES)
    p50, p90, p99 = sample.quantiles(np.array([0.5, 0.9, 0.99]))
    low, high = _least(values), max(float(values[-1]), target_s or 0.0)
    is_log = low > 0 and high / low > 30
    drawn.plot(np.maximum(values, low) if is_log else values, _SHARES, color=BLUE.light, linewidth=2.0)
    for value, level in ((p50, 0.5), (p90, 0.9), (p99, 0.99)):
        drawn.plot([max(value, low) if is_log else value], [level], "o", color=NAVY.light, markersize=4, zorder=4)
    if target_s is not None:
        _target_line(drawn.axvline, target_s)
    set_seconds_axis(drawn, low, high, is_x=True)
    drawn.grid(visible=True, axis="x")
    drawn.set_ylim(0, 1.03)
    drawn.yaxis.set_major_formatter(PercentFormatter(1.0))
    drawn.yaxis.set_major_locator(MultipleLocator(0.25))
    drawn.set_ylabel(f"of {len(sample):,} {what}")
    figures = (
        f"p50 {format_duration(p50)}, p90 {format_duration(p90)}, p99 {format_duration(p99)}, max "
        f"{format_duration(sample.max)}"
    )
    return Plot(
        name, title, figure, f"{figures}. Dots: p50, p90, p99.", f"Cumulative distribution of {title}: {figures}."
    )


def _tenants_shares(tenants: list[Group]) -> Iterator[Plot]:
    goodput = [group.goodput.share or 0.0 for group in tenants]
    total = sum(group.output_tokens for group in tenants)
    yield _tenants_bars(
        "tenants_goodput", "Goodput", "Share of each tenant's requests within both targets.", tenants, goodput, GREEN
    )
    if total:
        tokens = [group.output_tokens / total for group in tenants]
        yield _tenants_bars(
            "tenants_tokens", "Share of the output", "Of all output tokens that came.", tenants, tokens, BLUE
        )


def _tenants_bars(
    name: str, title: str, caption: str, tenants: list[Group], values: list[float], colour: Colour
) -> Plot:
    shown, values = tenants[:MAX_TENANTS][::-1], values[:MAX_TENANTS][::-1]
    figure, drawn = new_axes(height_in=_bars_height_in(shown))
    drawn.barh(range(len(shown)), values, color=colour.light, height=0.62, tick_label=_names(shown))
    for place, value in enumerate(values):
        drawn.text(value + 0.01, place, format_share(value), va="center", color=MUTED.light, fontsize=8)
    drawn.set_xlim(0, 1.12)
    drawn.xaxis.set_major_formatter(PercentFormatter(1.0))
    drawn.xaxis.set_major_locator(MultipleLocator(0.25))
    drawn.grid(visible=False, axis="y")
    drawn.tick_params(axis="y", labelcolor=INK.light)
    alt = ", ".join(
        f"{group.name} {format_share(value)}" for group, value in zip(shown[::-1], values[::-1], strict=True)
    )
    return Plot(name, title, figure, _of_most(tenants, caption), f"{title} by tenant: {alt}.")


def _tenants_latency(tenants: list[Group], targets: Targets) -> Iterator[Plot]:
    for name, word, figures, target_s in (
        ("tenants_ttft", "TTFT", [group.ttft_s for group in tenants], targets.ttft_s),
        ("tenants_tpot", "TPOT", [group.tpot_s for group in tenants], targets.tpot_s),
    ):
        rows = [(group, found) for group, found in zip(tenants, figures, strict=True) if found.count][:MAX_TENANTS][
            ::-1
        ]
        if not rows:
            continue
        figure, drawn = new_axes(height_in=_bars_height_in([group for group, _ in rows]))
        places = np.arange(len(rows))
        p50, p99 = (
            np.array([getattr(found, share) for _, found in rows], dtype=np.float64) for share in ("p50", "p99")
        )
        drawn.hlines(places, p50, p99, color=SKY.light, linewidth=3)
        drawn.plot(p50, places, "o", color=BLUE.light, markersize=6, label="p50", markeredgecolor=PAPER.light)
        drawn.plot(p99, places, "D", color=NAVY.light, markersize=5, label="p99", markeredgecolor=PAPER.light)
        drawn.set_yticks(places, _names([group for group, _ in rows]))
        drawn.set_ylim(-0.6, len(rows) - 0.4)
        _target_line(drawn.axvline, target_s)
        set_seconds_axis(drawn, _least(p50), max(float(p99.max()), target_s), is_x=True)
        drawn.grid(visible=True, axis="x")
        drawn.grid(visible=False, axis="y")
        drawn.tick_params(axis="y", labelcolor=INK.light)
        add_legend(drawn)
        alt = ", ".join(
            f"{group.name} p50 {format_duration(found.p50)}, p99 {format_duration(found.p99)}"
            for group, found in rows[::-1]
        )
        yield Plot(
            name,
            word,
            figure,
            _of_most(tenants, f"Median and p99 of each tenant's {word}."),
            f"{word} by tenant: {alt}.",
        )


def _time_axis(drawn: Axes, edges_s: Floats) -> float:
    """Label the x axis with time since the start; returns the seconds in its unit."""
    last_s = float(edges_s[-1])
    scale, unit = next(
        (scale, unit)
        for limit_s, scale, unit in ((300, 1, "seconds"), (10800, 60, "minutes"), (np.inf, 3600, "hours"))
        if last_s <= limit_s
    )
    drawn.set_xlabel(f"{unit} since the start")
    drawn.set_xlim(float(edges_s[0]) / scale, max(last_s, float(edges_s[0]) + 1e-3) / scale)
    drawn.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 3, 6, 10]))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return scale


def _target_line(draw: Callable[..., object], target_s: float) -> None:
    draw(
        target_s,
        color=RED.light,
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        label=f"target {format_duration(target_s)}",
        zorder=1.5,
    )


def _line(drawn: Axes, at: Floats, values: Floats, colour: Colour, *, label: str = "", width: float = 1.6) -> None:
    """Draw a line; few values get markers, so that one without a neighbour is visible."""
    marker = "o" if np.isfinite(values).sum() <= 24 else ""
    drawn.plot(at, values, color=colour.light, label=label, linewidth=width, marker=marker, markersize=3.5)


def _least(values: Floats) -> float:
    """The value at which a logarithmic axis may begin: the smallest above zero, but not below 1/10,000 of the
    largest."""
    above = values[values > 0]
    return max(float(above.min()), float(above.max()) / 10_000) if len(above) else 0.0


def _range(values: Floats, word: Callable[[float], str] = format_duration) -> str:
    return f"{word(float(np.nanmin(values)))} to {word(float(np.nanmax(values)))}"


def _bars_height_in(groups: list[Group]) -> float:
    return 1.1 + 0.3 * max(len(groups), 2)


def _names(groups: list[Group]) -> list[str]:
    """Cut to fit; made different again where cutting made them equal."""
    names = [group.name or "unnamed" for group in groups]
    return [name if len(name) <= 22 else f"{name[:18]}… {i}" for i, name in enumerate(names)]


def _of_most(tenants: list[Group], caption: str) -> str:
    return (
        caption
        if len(tenants) <= MAX_TENANTS
        else f"{caption} The {MAX_TENANTS} of {len(tenants)} with the most requests."
    )
