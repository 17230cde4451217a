"""What a terminal shows while a run goes on: a panel, redrawn every second; where there is no terminal, a line every
five seconds.

Counting up and drawing happen in a thread, so that neither they nor a slow terminal hold up the load.
"""

import asyncio
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock_loadtest.results.records import Outcome
from penstock_loadtest.results.summary import MAX_LATENESS_S
from penstock_loadtest.run.progress import Percentiles, Progress, Snapshot

PANEL_S = 1.0
LINE_S = 5.0
BAR_COLUMNS = 40
_STYLES: dict[Outcome, str] = {
    "finished": "green",
    "cancelled": "cyan",
    "shed": "yellow",
    "failed": "bold red",
    "unfinished": "red",
}


async def show(progress: Progress, now: Callable[[], float], console: Console) -> None:
    """Shows the progress until cancelled."""
    await (_panels if console.is_terminal else _lines)(progress, now, console)


async def _panels(progress: Progress, now: Callable[[], float], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.to_thread(lambda: live.update(panel(progress.snapshot(now())), refresh=True))
            await asyncio.sleep(PANEL_S)


async def _lines(progress: Progress, now: Callable[[], float], console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        await asyncio.to_thread(
            lambda: console.print(line(progress.snapshot(now())), markup=False, highlight=False, soft_wrap=True)
        )


def line(now: Snapshot) -> str:
    """The figures in one line, for logs."""
    outcomes = ", ".join(f"{count:,} {name}" for name, count in now.outcomes.items()) or "none ended"
    parts = [
        _time(now),
        f"sent {now.sent:,} ({now.offered_per_s:.1f}/s)",
        f"finished {now.achieved_per_s:.1f}/s",
        f"in flight {now.in_flight:,}",
        f"TTFT {_pair(now.ttft_s)}",
        f"TPOT {_pair(now.tpot_s)}",
        f"{now.tokens_per_s:,.0f} tokens/s",
        outcomes,
    ]
    return "  ".join(parts) + (f"  LATE: {_late(now)}" if now.is_late else "")


def panel(now: Snapshot) -> RenderableType:
    """The figures for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("rate", "dim"),
        f"{now.offered_per_s:.1f}/s offered, {now.achieved_per_s:.1f}/s finished, {now.tokens_per_s:,.0f} tokens/s",
    )
    table.add_row(Text("requests", "dim"), f"{now.sent:,} sent, {now.in_flight:,} in flight")
    table.add_row(Text("TTFT", "dim"), _pair(now.ttft_s))
    table.add_row(Text("TPOT", "dim"), _pair(now.tpot_s))
    table.add_row(Text("ended", "dim"), _outcomes(now))
    table.add_row(Text("lateness", "dim"), Text(_late(now), "bold red" if now.is_late else ""))
    return Group(_bar(now), table)


def _bar(now: Snapshot) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    if now.total_s is None:
        row.add_row(Text(_time(now), "bold"))
    else:
        row.add_row(
            ProgressBar(total=now.total_s, completed=min(now.elapsed_s, now.total_s), width=BAR_COLUMNS),
            Text(_time(now), "bold"),
        )
    return row


def _time(now: Snapshot) -> str:
    elapsed = _clock(now.elapsed_s)
    if not now.is_sending:
        return f"{elapsed} waiting for answers"
    return (
        elapsed
        if now.total_s is None
        else f"{elapsed} of {_clock(now.total_s)}, {_clock(max(0.0, now.total_s - now.elapsed_s))} left"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _pair(values: Percentiles | None) -> str:
    return "-" if values is None else f"p50 {1e3 * values.p50:,.1f} ms, p99 {1e3 * values.p99:,.1f} ms"


def _late(now: Snapshot) -> str:
    if now.lateness_p99_s is None:
        return "-"
    figure = f"p99 {1e3 * now.lateness_p99_s:.1f} ms"
    return (
        f"{figure}, over {1e3 * MAX_LATENESS_S:.0f} ms: this machine can't keep up with the load"
        if now.is_late
        else figure
    )


def _outcomes(now: Snapshot) -> Text:
    parts = [Text(f"{count:,} {name}", _STYLES[name]) for name, count in now.outcomes.items()]
    return Text(", ").join(parts) if parts else Text("-")
