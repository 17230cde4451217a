"""The `penstock` command."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import httpx
import msgspec
import typer
from rich.console import Console

from penstock.base.errors import ConfigError, PenstockError
from penstock.cli.cluster import StartFailed
from penstock.cli.config import load_platform
from penstock.cli.refusals import REFUSED, complain
from penstock.cli.state import StateDir
from penstock.cli.status import observe, show
from penstock.cli.tenant_commands import keys, tenants, usage
from penstock.cli.up import up as run

FAILED = 1
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
        complain(error)
        if error.detail:
            print(error.detail, file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except PenstockError as error:
        complain(error)
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
        complain(error)
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
def quantize(
    model: Annotated[str, typer.Argument(help="GGUF file, safetensors directory, hub id, or demo.")],
    out: Annotated[Path, typer.Argument(help="Folder of the 4-bit checkpoint; must not exist.")],
    calibration: Annotated[Path, typer.Option(help="Text that the model will be used for: plain, or JSON lines with prompt, text, question or turns.")],
    evaluation: Annotated[Path | None, typer.Option(help="Other text, whose perplexity is printed before and after.")] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 128,
    sequences: Annotated[int, typer.Option(help="Sequences of 512 tokens to calibrate with, at most.")] = 32,
    method: Annotated[str, typer.Option(help="awq, or rtn (round to nearest), for comparison.")] = "awq",
) -> None:
    """Make a 4-bit AWQ checkpoint."""
    from penstock.cli import quantize as command  # here: torch takes seconds to import

    try:
        if method not in ("awq", "rtn"):
            raise ConfigError(f"the method is awq or rtn, not {method!r}")
        chosen: Literal["awq", "rtn"] = "awq" if method == "awq" else "rtn"
        command.quantize(model, out, calibration, evaluation, group_size=group_size, sequences=sequences, method=chosen, console=Console())
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error


@app.command()
def version() -> None:
    """The installed version."""
    print(installed_version("penstock"))


app.add_typer(tenants, name="tenant")
app.add_typer(keys, name="key")
app.command()(usage)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
