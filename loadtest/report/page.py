"""report.html of a run: headline figures, plots, tables, the scenario, and what every figure means."""

from pathlib import Path
from shlex import quote
from typing import NamedTuple

from penstock_loadtest.report.comparison import write_comparison_report
from penstock_loadtest.report.folder import Ending, Run, Verdict, measure_wait_s, read_run
from penstock_loadtest.report.glossary import define_terms
from penstock_loadtest.report.heading import count_of, describe_run, list_banners
from penstock_loadtest.report.ladder import write_ladder_report
from penstock_loadtest.report.number_formats import NONE, format_duration, format_number, format_share
from penstock_loadtest.report.parts import Card, Column, PageHeader, Rows, Table
from penstock_loadtest.report.plots import draw_run_plots
from penstock_loadtest.report.render import render_page
from penstock_loadtest.report.rerun import dump_scenario, make_run_command
from penstock_loadtest.report.style import Picture, drawing, save_plot
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.series import collect_replicas, compute_series
from penstock_loadtest.results.summary import Distribution, Goodput, Group, Summary

MAX_GROUPS = 30


class Pictures(NamedTuple):
    """The plots of a run, drawn, by the part of the page that they stand in."""

    over_time: list[Picture]
    distributions: list[Picture]
    tenants: list[Picture]


def write_report(folder: Path) -> Path:
    """Make plots/*.png and report.html from what is in the folder of a run, ladder or comparison, and return the page's
    path. Raises RecordsInvalid."""
    kinds = (("ladder.json", write_ladder_report), ("compare.json", write_comparison_report))
    return next((write for name, write in kinds if (folder / name).exists()), write_run_report)(folder)


def write_run_report(folder: Path) -> Path:
    run = read_run(folder)
    pictures = folder / "plots"
    pictures.mkdir(exist_ok=True)
    path = folder / "report.html"
    with drawing():
        over_time = compute_series(run.columns, run.scenario.targets)
        plots = draw_run_plots(
            run.columns, over_time, collect_replicas(run.observed), run.summary.groups.tenant, run.scenario.targets
        )
        drawn = Pictures(*([save_plot(plot, pictures) for plot in part] for part in plots))
    path.write_text(render_run(run, drawn), encoding="utf-8")
    return path


def render_run(run: Run, pictures: Pictures) -> str:
    """The page as HTML."""
    summary = run.summary
    top = PageHeader(
        title=f"{run.scenario.name}: load test",
        kicker="Load test",
        heading=run.scenario.name,
        line=describe_run(run),
        banners=list_banners(run),
        cards=_list_cards(run),
    )
    sections = {
        "plots": [
            ("Over time", pictures.over_time),
            ("Distributions", pictures.distributions),
            ("Tenants", pictures.tenants),
        ],
        "latencies": _latency_table(summary),
        "outcomes": _outcome_table(summary),
        "facts": _list_facts(summary, run.ending),
        "groups": _group_table(summary),
        "errors": _error_table(summary),
        "slowest": _slowest_table(run.slowest),
        "verdict": run.verdict,
        "run_command": make_run_command(run.server),
        "scenario": dump_scenario(run.scenario),
        "report_command": f"penstock-loadtest report {quote(run.name)}",
        "terms": define_terms(run.scenario.targets),
    }
    return render_page("run.html.j2", top, sections)


def _list_cards(run: Run) -> list[Card]:
    summary, targets = run.summary, run.scenario.targets
    ended, good = summary.outcomes, summary.goodput
    errors = ended.failed + ended.shed + ended.unfinished
    return [
        Card(
            "Goodput",
            format_share(good.share),
            f"{format_number(good.per_s)} requests/s with TTFT ≤ {format_duration(targets.ttft_s)}, TPOT ≤ "
            f"{format_duration(targets.tpot_s)}",
            is_bad=good.share is not None and good.share < 0.9,
        ),
        *_latency_cards(summary),
        Card(
            "Throughput",
            f"{format_number(summary.output_tokens_per_s)} tokens/s",
            f"and {format_number(summary.prompt_tokens_per_s)} prompt tokens/s",
        ),
        Card(
            "Finished",
            f"{format_number(summary.achieved_rate)} /s",
            f"of {format_number(summary.offered_rate)} /s offered",
        ),
        Card(
            "Errors",
            f"{errors:,}",
            f"{ended.failed:,} failed, {ended.shed:,} shed, {ended.unfinished:,} unfinished",
            is_bad=errors > 0,
        ),
        Card(
            "Lateness, p99",
            format_duration(summary.lateness.p99_s),
            f"at most {format_duration(summary.lateness.max_s)}",
            is_bad=summary.lateness.is_late,
        ),
        Card("Ledger", *_describe_verdict(run.verdict)),
    ]


def _latency_cards(summary: Summary) -> list[Card]:
    """Cards of TTFT and TPOT; where nothing was streamed, the time of the whole answers in place of both."""
    if not summary.ttft_s.count and summary.e2e_s.count:
        return [_latency_card("End to end", "whole answers: nothing was streamed", summary.e2e_s)]
    return [
        _latency_card("TTFT", "time to first token", summary.ttft_s),
        _latency_card("TPOT", "time per output token", summary.tpot_s),
    ]


def _latency_card(name: str, meaning: str, found: Distribution) -> Card:
    return Card(
        f"{name}, median and p99", format_duration(found.p50), meaning, second=f"p99 {format_duration(found.p99)}"
    )


def _describe_verdict(verdict: Verdict | None) -> tuple[str, str, bool]:
    if verdict is None:
        return "Not checked", "the run did not get that far", False
    return (
        ("Balances", "nothing was found amiss; what was checked is below", False)
        if verdict.is_balanced
        else ("Does not balance", "see below", True)
    )


def _latency_table(summary: Summary) -> Table:
    columns = [Column("", is_text=True), *(Column(title) for title in ("mean", "p50", "p90", "p99", "max", "of"))]
    rows = [
        [
            name,
            *(format_duration(value) for value in (found.mean, found.p50, found.p90, found.p99, found.max)),
            _counted(found, unit),
        ]
        for name, found, unit in (
            ("TTFT", summary.ttft_s, "request"),
            ("TPOT", summary.tpot_s, "request"),
            ("Inter-token", summary.inter_token_s, "gap"),
            ("End to end", summary.e2e_s, "request"),
        )
    ]
    return Table("Latencies", columns, [Rows("", rows)])


def _outcome_table(summary: Summary) -> Table:
    ended, good = summary.outcomes, summary.goodput
    columns = [Column("", is_text=True), Column("requests"), Column("share"), Column("what it means", is_text=True)]
    missed = good.misses
    rows = [
        ("good", good.good, "finished within both targets"),
        ("missed TTFT", missed.ttft, "first token over its target, or none"),
        ("missed TPOT", missed.tpot, "TTFT in target, tokens too slow"),
        ("failed", missed.failed, "an error, a broken connection or stream"),
        ("shed", missed.shed, "declined before any token"),
        ("unfinished", missed.unfinished, "no end before the timeout or the end of the run"),
        (
            "cancelled in time",
            summary.requests - good.judged,
            f"left out of goodput; {ended.cancelled:,} were cancelled in all",
        ),
    ]
    cells = [[name, f"{n:,}", _part(n, summary.requests), what] for name, n, what in rows]
    return Table("What became of the requests", columns, [Rows("", cells)])


def _list_facts(summary: Summary, ending: Ending | None) -> list[str]:
    sources = summary.token_sources
    counted = (
        f"{sources.ids:,} verified by their ids, {sources.usage:,} by the server's usage, {sources.chunks:,} as one a "
        "chunk"
    )
    facts = [f"{summary.output_tokens:,} output tokens: {counted}."]
    if summary.hit_rate is not None:
        facts.append(f"Prefix hit rate {format_share(summary.hit_rate)} of {summary.prompt_tokens:,} prompt tokens.")
    if summary.shared_chunk_share:
        facts.append(
            f"{format_share(summary.shared_chunk_share)} of the tokens came with others in one chunk: their time is "
            "the chunk's."
        )
    if ending and ending.turns_not_sent:
        facts.append(
            f"{count_of(ending.turns_not_sent, 'later turn')} of conversations never left: one before them did not "
            "finish, or the run ended first."
        )
    facts.append(
        f"Lateness: p50 {format_duration(summary.lateness.p50_s)}, p99 {format_duration(summary.lateness.p99_s)}, max "
        f"{format_duration(summary.lateness.max_s)}."
    )
    return facts


def _group_table(summary: Summary) -> Table | None:
    """The figures by tenant, kind, model, endpoint, tier and replica; None where no grouping has two groups."""
    groups = summary.groups
    named = (
        ("Tenants", groups.tenant),
        ("Kinds of request", groups.kind),
        ("Models", groups.model),
        ("Endpoints", groups.endpoint),
        ("Tiers", groups.tier),
        ("Replicas", groups.replica),
    )
    shown = [
        (title, found)
        for place, (title, found) in enumerate(named)
        if len(found) > 1 and not any(_are_same(found, other) for _, other in named[:place])
    ]
    parts = [Rows(title, [_group_row(group) for group in found[:MAX_GROUPS]]) for title, found in shown]
    left = [f"{len(found) - MAX_GROUPS:,} more {title.lower()}" for title, found in shown if len(found) > MAX_GROUPS]
    note = f"In summary.json: {', '.join(left)}." if left else ""
    return Table("Main figures of each group", _group_columns(), parts, note) if parts else None


def _are_same(some: list[Group], others: list[Group]) -> bool:
    """Whether two groupings hold the same requests under other names, so that a second table would repeat figures."""
    return [(group.requests, group.ttft_s) for group in some] == [(group.requests, group.ttft_s) for group in others]


def _group_columns() -> list[Column]:
    return [
        Column("", is_text=True),
        Column("requests"),
        Column("finished"),
        Column("goodput"),
        Column("good/s"),
        Column("most missed by", is_text=True, note="the commonest cause"),
        Column("TTFT p50"),
        Column("p99"),
        Column("TPOT p50"),
        Column("p99"),
        Column("tokens/s"),
        Column("hit rate"),
    ]


def _group_row(group: Group) -> list[str]:
    return [
        group.name or "not said",
        f"{group.requests:,}",
        f"{group.outcomes.finished:,}",
        format_share(group.goodput.share),
        format_number(group.goodput.per_s),
        _commonest_miss(group.goodput),
        format_duration(group.ttft_s.p50),
        format_duration(group.ttft_s.p99),
        format_duration(group.tpot_s.p50),
        format_duration(group.tpot_s.p99),
        format_number(group.output_tokens_per_s),
        format_share(group.hit_rate),
    ]


def _commonest_miss(good: Goodput) -> str:
    misses = {
        "TTFT": good.misses.ttft,
        "TPOT": good.misses.tpot,
        "failed": good.misses.failed,
        "shed": good.misses.shed,
        "unfinished": good.misses.unfinished,
    }
    cause = max(misses, key=lambda name: misses[name])
    return f"{cause} ({misses[cause]:,})" if misses[cause] else NONE


def _error_table(summary: Summary) -> Table | None:
    if not summary.errors:
        return None
    columns = [
        Column("what happened", is_text=True),
        Column("status"),
        Column("outcome", is_text=True),
        Column("requests"),
    ]
    rows = [[error.sentence, str(error.status or NONE), error.outcome, f"{error.count:,}"] for error in summary.errors]
    others = count_of(summary.other_errors, "request")
    note = f"{others} with other errors: see records.jsonl." if summary.other_errors else ""
    return Table("Errors by what they said", columns, [Rows("", rows)], note)


def _slowest_table(slowest: list[Record]) -> Table | None:
    if not slowest:
        return None
    columns = [
        Column("request", is_text=True),
        Column("TTFT"),
        Column("predicted", note="TTFT as the server predicted it on admission"),
        Column("TPOT"),
        Column("intended at"),
        Column("prompt"),
        Column("cached"),
        Column("tokens"),
        Column("outcome", is_text=True),
        Column("tenant", is_text=True),
        Column("tier", is_text=True),
        Column("replica", is_text=True),
    ]
    note = "By the wait for the first token; “none” is followed by how long it took to end."
    rows = [_slow_row(record) for record in slowest]
    return Table("The longest waits for a first token", columns, [Rows("", rows)], note)


def _slow_row(record: Record) -> list[str]:
    return [
        record.request_id or f"no. {record.index}",
        format_duration(record.ttft_s)
        if record.ttft_s is not None
        else f"none, {format_duration(measure_wait_s(record))}",
        format_duration(record.predicted_ttft_s),
        format_duration(record.tpot_s),
        f"{record.intended_s:,.1f}\N{NO-BREAK SPACE}s",
        format_number(record.prompt_tokens),
        format_number(record.cached_tokens),
        f"{record.tokens:,}",
        record.outcome,
        record.tenant,
        record.tier or NONE,
        record.replica or NONE,
    ]


def _counted(found: Distribution, unit: str) -> str:
    return count_of(found.count, unit)


def _part(count: int, whole: int) -> str:
    return format_share(count / whole) if whole else NONE
