"""The figures of a run for the terminal, in a table of 80 columns."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock_loadtest.report.folder import Verdict
from penstock_loadtest.report.number_formats import format_duration, format_number, format_share
from penstock_loadtest.results.summary import Distribution, Summary

MAX_TENANTS = 8
MAX_ERRORS = 5


def make_summary_table(summary: Summary, ledger: Verdict | None = None) -> RenderableType:
    """Warnings first, then latencies, figures, tenants (if there are several), errors (if any) and the ledger's
    sentences. `ledger` None: there are none of those."""
    parts: list[RenderableType] = [*_warnings(summary), _latencies(summary), "", _figures(summary), ""]
    if len(summary.groups.tenant) > 1:
        parts += [_tenants(summary), ""]
    parts += [Text(f"{error.count:,} x {error.sentence}", style="red") for error in summary.errors[:MAX_ERRORS]]
    more = summary.other_errors + sum(error.count for error in summary.errors[MAX_ERRORS:])
    if more:
        parts.append(Text(f"{more:,} more errors are in summary.json and records.jsonl.", style="red"))
    return Group(*parts, *_verdict(ledger))


def describe_lateness(summary: Summary) -> str:
    late = summary.lateness
    return (
        f"Requests left {format_duration(late.p99_s)} after their intended time at p99 ({format_duration(late.max_s)} "
        "at most); over 10 ms the figures measure the tester along with the server. Use a machine with more room, or "
        "a lower rate."
    )


def _warnings(summary: Summary) -> list[Text]:
    return (
        [Text(f"The tester was late. {describe_lateness(summary)}", style="bold white on red")]
        if summary.lateness.is_late
        else []
    )


def _latencies(summary: Summary) -> Table:
    table = _plain("", "mean", "p50", "p90", "p99", "max", "of", title=summary.name)
    for name, found in (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("inter-token", summary.inter_token_s),
        ("end to end", summary.e2e_s),
    ):
        table.add_row(name, *_durations(found), f"{found.count:,}")
    return table


def _figures(summary: Summary) -> Table:
    ended, good, missed = summary.outcomes, summary.goodput, summary.goodput.misses
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    causes = {
        "TTFT": missed.ttft,
        "TPOT": missed.tpot,
        "failed": missed.failed,
        "shed": missed.shed,
        "unfinished": missed.unfinished,
    }
    missed_by = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count)
    kinds = {
        "finished": ended.finished,
        "cancelled": ended.cancelled,
        "shed": ended.shed,
        "failed": ended.failed,
        "unfinished": ended.unfinished,
    }
    sources = summary.token_sources
    verified = sources.ids / summary.output_tokens if summary.output_tokens else None
    warmup = f" ({summary.warmup_requests:,} more to warm up)" if summary.warmup_requests else ""
    rows = {
        "goodput": f"{format_share(good.share)}, {format_number(good.per_s)} requests/s"
        + (f"; missed by {missed_by}" if missed_by else ""),
        "requests": f"{summary.requests:,}{warmup}"
        + "".join(f", {count:,} {kind}" for kind, count in kinds.items() if count),
        "rate": (
            f"{format_number(summary.offered_rate)} requests/s offered, {format_number(summary.achieved_rate)} finished"
        ),
        "throughput": (
            f"{format_number(summary.output_tokens_per_s)} output and {format_number(summary.prompt_tokens_per_s)} "
            "prompt tokens/s"
        ),
        "tokens": (
            f"{summary.output_tokens:,}, {format_share(verified)} verified by ids; "
            f"{format_share(summary.shared_chunk_share)} shared a chunk"
        ),
        "hit rate": format_share(summary.hit_rate),
        "lateness": (
            f"p50 {format_duration(summary.lateness.p50_s)}, p99 {format_duration(summary.lateness.p99_s)}, max "
            f"{format_duration(summary.lateness.max_s)}"
        ),
    }
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table


def _tenants(summary: Summary) -> Table:
    tenants = summary.groups.tenant
    left = len(tenants) - MAX_TENANTS
    table = _plain("tenant", "requests", "goodput", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s")
    for group in tenants[:MAX_TENANTS]:
        latencies = [
            format_duration(value) for value in (group.ttft_s.p50, group.ttft_s.p99, group.tpot_s.p50, group.tpot_s.p99)
        ]
        table.add_row(
            Text(group.name or ""),
            f"{group.requests:,}",
            format_share(group.goodput.share),
            *latencies,
            format_number(group.output_tokens_per_s),
        )
    if left > 0:
        table.caption = f"and {left:,} more"
    return table


def _verdict(ledger: Verdict | None) -> list[Text]:
    if ledger is None:
        return []
    first, *others = ledger.sentences or [""]
    return [Text(first, style="green" if ledger.is_balanced else "bold red"), *map(Text, others)]


def _plain(*titles: str, title: str | None = None) -> Table:
    table = Table(
        title=None if title is None else Text(title, style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for place, name in enumerate(titles):
        table.add_column(name, justify="right" if place else "left", header_style="dim")
    return table


def _durations(found: Distribution) -> list[str]:
    return [format_duration(value) for value in (found.mean, found.p50, found.p90, found.p99, found.max)]
