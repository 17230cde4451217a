"""`penstock tiers`: its commands and their options."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.base.errors import ConfigError
from penstock.cli.refusals import refusing
from penstock.cli.tiers.curve import Match, Prices
from penstock.cli.tiers.server import Server
from penstock.cli.tiers.tune import Plan
from penstock.cli.tiers.tune import tune as run

API_KEY = "OPENAI_API_KEY"
INTERRUPTED = 130

tiers = typer.Typer(help="Tiers: what escalating hard requests gives, and from which doubt on.", no_args_is_help=True)


@tiers.callback()
def _group() -> None:
    """Keep `tune` a word of the command line, though it is the only one."""


@tiers.command()
def tune(
    prompts: Annotated[
        Path, typer.Argument(help="JSON lines with messages, prompt, question or text, and if known the answer.")
    ],
    edge: Annotated[str, typer.Option(help="The edge's checkpoint; with --url, the name under which it is served.")],
    cloud: Annotated[str, typer.Option(help="The cloud's, likewise.")],
    out: Annotated[Path, typer.Option(help="Folder of answers, curve and rule.")],
    agreement: Annotated[
        float | None, typer.Option(help="Wanted share of requests that get the cloud's final answer, such as 0.95.")
    ] = None,
    share: Annotated[float | None, typer.Option(help="Or the share of requests that may be sent on.")] = None,
    tokens: Annotated[int, typer.Option(help="First tokens that are held back and judged.", min=1, max=256)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    match: Annotated[
        str, typer.Option(help="What must be the same: number (the last one), text, or auto: as the label ends.")
    ] = "auto",
    url: Annotated[
        str | None, typer.Option(help="Of a running platform, up to /v1; its key is read from OPENAI_API_KEY.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Without --url: threads to compute with.")] = None,
    edge_price: Annotated[str | None, typer.Option(help="IN,OUT per million tokens, at the edge.")] = None,
    cloud_price: Annotated[str | None, typer.Option(help="IN,OUT per million tokens, in the cloud.")] = None,
) -> None:
    """Find the threshold of a pool's `escalation`. One that was interrupted goes on where it was when the command is
    given again."""
    # as for quantize
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with refusing():
        plan = Plan(
            prompts=prompts,
            edge=edge,
            cloud=cloud,
            out=out,
            num_tokens=tokens,
            max_tokens=max_tokens,
            agreement=agreement,
            share=share,
            match=_match(match),
            server=None if url is None else Server(url, _key()),
            threads=threads,
            edge_prices=_prices("--edge-price", edge_price),
            cloud_prices=_prices("--cloud-price", cloud_price),
        )
        try:
            run(plan, Console())
        except KeyboardInterrupt:
            print("Interrupted; the same command goes on where this one was.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _match(name: str) -> Match:
    for known in ("auto", "number", "text"):
        if name == known:
            return known
    raise ConfigError(f"--match is auto, number or text, not {name!r}")


def _key() -> str:
    key = os.environ.get(API_KEY, "")
    if not key:
        raise ConfigError(f"{API_KEY} is not set: a platform is asked with the key of a tenant")
    return key


def _prices(option: str, text: str | None) -> Prices | None:
    if text is None:
        return None
    try:
        of_input, of_output = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} is two prices per million tokens, such as 0.1,0.4, not {text!r}") from error
    return Prices(of_input, of_output)
