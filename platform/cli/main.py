"""The `penstock` command."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console

from penstock.base.errors import PenstockError
from penstock.cli.cluster import StartFailed
from penstock.cli.config import load_platform
from penstock.cli.state import StateDir
from penstock.cli.status import observe, show
from penstock.cli.up import up as run

FAILED = 1
REFUSED = 2
"""Exit status where nothing was started: a configuration, port or state folder that can't be used."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Multi-replica LLM serving.")
StateOption = Annotated[Path, typer.Option("--state", help="State folder: key, Redis data, what runs.")]
DEFAULT_STATE = Path(".penstock")


@app.command()
def up(
    config: Annotated[Path, typer.Option("--config", help="What to start; penstock.yaml documents every field.")] = Path("penstock.yaml"),
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Start Redis, Ray, the pools and a gateway; Ctrl-C stops everything."""
    console = Console(file=sys.stdout)
    try:
        run(load_platform(config), config, StateDir(state), console)
    except StartFailed as error:
        _complain(error)
        if error.detail:
            print(error.detail, file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except PenstockError as error:
        _complain(error)
        raise typer.Exit(REFUSED) from error


@app.command()
def status(
    state: StateOption = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """What runs here, and whether it is well; exit status 0 only when ready."""
    try:
        found = StateDir(state).read()
    except PenstockError as error:
        _complain(error)
        raise typer.Exit(REFUSED) from error
    if found is None:
        print("null" if as_json else f"Nothing runs with the state folder {state}; start it with: penstock up")
        raise typer.Exit(FAILED)
    with httpx.Client(trust_env=False) as client:
        health = observe(found, client)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(health)).decode())
    else:
        show(health, Console())
    raise typer.Exit(0 if health.is_ready else FAILED)


@app.command()
def version() -> None:
    """The installed version."""
    print(installed_version("penstock"))


def _complain(error: PenstockError) -> None:
    message = error.message if error.message.endswith((".", "!", "?")) else f"{error.message}."
    print(f"penstock: {message}", file=sys.stderr)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
