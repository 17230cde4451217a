"""The terminal's table of a run."""

from io import StringIO

import msgspec
from rich.console import Console

from penstock_loadtest.report import number_formats
from penstock_loadtest.report.folder import Checked
from penstock_loadtest.report.table import make_summary_table
from penstock_loadtest.results.summary import Summary, summarize
from tests.unit.loadtest.report.pages import SHORT, finished
from tests.unit.loadtest.simulated import TENANTS, simulate


def test_the_terminals_table_says_the_same_as_the_summary() -> None:
    summary = summarize(simulate(SHORT), SHORT)

    text = _printed(summary, Checked(is_balanced=True, sentences=["The ledger balances.", "All is well."]))

    for value in (summary.ttft_s.p50, summary.ttft_s.p99, summary.tpot_s.p90, summary.e2e_s.max):
        assert number_formats.format_duration(value).replace("\N{NO-BREAK SPACE}", " ") in text.replace(
            "\N{NO-BREAK SPACE}", " "
        )
    assert number_formats.format_share(summary.goodput.share) in text
    assert "The ledger balances." in text
    assert all(name in text for name in TENANTS)
    assert "late" not in text.replace("lateness", "")


def test_the_terminals_table_fits_eighty_columns_and_prints_markup_as_text() -> None:
    records = [finished(n, tenant="[red]a[/red]" if n % 2 else "b", error="[bold]broken[/nonsense]") for n in range(4)]

    text = _printed(summarize(records, SHORT), None)

    assert max(map(len, text.splitlines())) <= 80
    assert "[red]a[/red]" in text
    assert "[bold]broken[/nonsense]" in text


def test_the_terminals_table_of_an_empty_or_late_run() -> None:
    late = summarize([msgspec.structs.replace(finished(0), sent_s=0.5)], SHORT)

    assert "The tester was late." in _printed(late, None)
    assert number_formats.NONE in _printed(summarize([], SHORT), None)


def _printed(summary: Summary, ledger: Checked | None) -> str:
    console = Console(width=80, color_system=None, file=StringIO())
    console.print(make_summary_table(summary, ledger))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
