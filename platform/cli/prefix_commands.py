"""`penstock prefix`: publishes texts whose KV all tenants share."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.cli import tenant_backup
from penstock.cli.refusals import refusing
from penstock.cli.state import StateDir
from penstock.cli.tenant import redis_of, with_redis
from penstock.cli.tenant_commands import DEFAULT_STATE, Config, State
from penstock.prefix.published import Prefix, publish, read_published, withdraw

SHOWN_CHARS = 60

prefixes = typer.Typer(no_args_is_help=True, help="Published prefixes: texts whose KV all tenants share.")
Name = Annotated[str, typer.Argument(help="A name for it, which requests need not know.")]


@prefixes.command("publish")
def publish_prefix(
    name: Name,
    text: Annotated[str | None, typer.Option("--text", help="Content of the system message.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with it, taken as it is; - is stdin.")] = None,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Publish a text: prompts that begin with it share its KV, whosever they are. All behind it stays private."""
    with refusing():
        if (text is None) == (file is None):
            raise ConfigError("the text comes by --text or by --file, one of them")
        found = text if text is not None else tenant_backup.text(_path(file), tenant_backup.read(_path(file)))
        with_redis(redis_of(StateDir(state), config), lambda client: publish(client, name, found, time.time()))
    print(f"published {name}; gateways know it within two seconds")


@prefixes.command("list")
def list_prefixes(state: State = DEFAULT_STATE, config: Config = None) -> None:
    """All that is published."""
    with refusing():
        found = with_redis(redis_of(StateDir(state), config), read_published)
        table = Table("prefix", "characters", "published", "begins with")
        for prefix in found.prefixes if found is not None else ():
            table.add_row(*_row(prefix))
        Console().print(table)


@prefixes.command("withdraw")
def withdraw_prefix(name: Name, state: State = DEFAULT_STATE, config: Config = None) -> None:
    """Withdraw a text: requests that come later share nothing of it."""
    with refusing():
        with_redis(redis_of(StateDir(state), config), lambda client: withdraw(client, name))
    print(f"withdrew {name}")


def _path(file: Path | None) -> Path:
    assert file is not None
    return file


def _row(prefix: Prefix) -> tuple[str, str, str, str]:
    begin = " ".join(prefix.text[:SHOWN_CHARS].split())
    made = datetime.fromtimestamp(prefix.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return prefix.name, f"{len(prefix.text):,}", made, begin
