"""The `penstock-loadtest` command."""

import json
import os
import sys
from datetime import datetime
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.errors import LoadtestError
from penstock_loadtest.fake.server import fake_server
from penstock_loadtest.report.table import make_summary_table
from penstock_loadtest.scenario import load_scenario
from penstock_loadtest.studies.compare import compare
from penstock_loadtest.studies.ladder import ladder
from penstock_loadtest.studies.measure import EXIT_INTERRUPTED, Measurement, measure, must_have_plots
from penstock_loadtest.studies.overhead import overhead

VIOLATED = 1
"""Exit status of a run whose ledger does not balance."""
REFUSED = 2
"""Exit status where the scenario, the server or a file made the command impossible."""
RESULTS = Path("loadtest-results")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Load tests for any OpenAI-compatible server.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(installed_version("penstock"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The installed version.")
    ] = False,
) -> None:
    """Load tests for any OpenAI-compatible server."""


@app.command()
def run(
    scenario: Annotated[
        Path | None, typer.Argument(help="A YAML file, or the name of an example. None: 1 request/s for 60 s.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Base URL, http://HOST:PORT/v1. Default: OPENAI_BASE_URL. The key: OPENAI_API_KEY."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first one.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in arrivals.rate=4; may be repeated."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second (arrivals.rate).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop with so many requests at once.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of load (duration_s).")] = None,
    requests: Annotated[int | None, typer.Option(help="No more than so many requests.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed: other prompts, other times.")] = None,
    name: Annotated[str | None, typer.Option(help="What the run is called.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: loadtest-results/NAME-DATE-TIME.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots and write report.html.")] = True,
) -> None:
    """Run a load; leaves a table, JSON, plots and a report."""
    shortcuts = {
        "arrivals.rate": rate,
        "concurrency": concurrency,
        "duration_s": duration,
        "requests": requests,
        "seed": seed,
    }
    overrides = [*(settings or []), *(f"{key}={value}" for key, value in shortcuts.items() if value is not None)]
    if concurrency is not None:
        overrides.append("loop=closed")
    if name is not None:
        overrides.append(f"name={json.dumps(name)}")  # a text, even where YAML would read a number
    loaded = load_scenario(scenario, overrides)
    target = find_destination(loaded, url, model, os.environ)
    folder = out or RESULTS / f"{_file_name(loaded.name)}-{datetime.now():%Y%m%d-%H%M%S}"
    console = Console(file=sys.stdout)
    console.print(f"{loaded.name} against {target.url}, {target.model}", markup=False, highlight=False)
    try:
        measured = measure(loaded, target, folder, console=console, plots=plots)
    except KeyboardInterrupt:  # while the report was being written: a load that runs takes Ctrl-C itself
        print(
            f"penstock-loadtest: {folder} has what was recorded; the rest is made by: penstock-loadtest report "
            f"{folder}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _conclude(measured, console)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="What a run left, even one that was killed.")]) -> None:
    """Write plots and report.html of a run once more."""
    must_have_plots()
    # matplotlib may be absent, and takes half a second that only this command needs
    from penstock_loadtest.report.page import write_report  # noqa: PLC0415 (matplotlib is optional)

    print(write_report(folder))


for command in (ladder, compare, overhead):
    app.command()(command)
app.command("fake-server")(fake_server)


def _conclude(measured: Measurement, console: Console) -> None:
    console.print(make_summary_table(measured.summary, measured.ledger))
    if measured.interrupted:
        console.print(
            "Interrupted: requests under way were cut and count as unfinished.", style="yellow", soft_wrap=True
        )
    if measured.turns_not_sent:
        sentence = (
            f"{measured.turns_not_sent:,} later turns of sessions never left: a turn before them did not finish, or "
            "the run ended first."
        )
        console.print(sentence, style="yellow", highlight=False, soft_wrap=True)
    page = measured.folder / "report.html"
    console.print(str(page if page.exists() else measured.folder), markup=False, highlight=False, soft_wrap=True)
    if not measured.ledger.is_balanced:
        raise typer.Exit(VIOLATED)
    if measured.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip("-.") or "load"


def main() -> None:
    """Errors made on purpose are printed as one sentence."""
    try:
        app()
    except LoadtestError as error:
        print(f"penstock-loadtest: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
