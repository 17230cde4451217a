"""`penstock autoscale explain`: why each pool's target is what it is, as the autoscaler last said it in Redis.

Works wherever Redis can be read, in a pod of the platform too. It works nothing out: without an autoscaler that has
spoken within `wire.scaling.LAPSE_MS` there is nothing to explain.
"""

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, cast

import msgspec
import redis.asyncio
import typer
from rich.console import Console
from rich.table import Table

from penstock.autoscale.sentences import tell
from penstock.base.errors import ConfigError
from penstock.cli.refusals import refusing
from penstock.cli.state import StateDir
from penstock.cli.tenant import redis_of, with_redis
from penstock.wire.explanation import PoolExplanation
from penstock.wire.scaling import LAPSE_MS, TARGETS_KEY, decode_targets

SPAN = re.compile(r"(\d+)([smhd])")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def explain(
    pool: Annotated[str | None, typer.Option("--pool", help="Default: all.")] = None,
    since: Annotated[str, typer.Option("--since", help="Age of the oldest change to show, like 90s, 10m, 2h, 1d.")] = (
        "1h"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    state: Annotated[Path, typer.Option("--state", help="State folder of the running platform.")] = Path(".penstock"),
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A configuration whose redis.url to use instead of the running platform's."),
    ] = None,
) -> None:
    """Say why each pool has the target that it has, and what would change it."""
    with refusing():
        oldest_s = time.time() - span_s(since)
        found = with_redis(redis_of(StateDir(state), config), read)
        chosen = [recent(each, oldest_s) for each in choose(found, pool)]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    else:
        for each in chosen:
            show(each, Console())


async def read(client: redis.asyncio.Redis) -> list[PoolExplanation]:
    """The latest explanations of all pools; none where no autoscaler has said any lately. Raises redis-py's errors."""
    data = cast(bytes | None, await client.get(TARGETS_KEY))
    targets = None if data is None else decode_targets(data)
    return [] if targets is None else targets.explanations


def choose(found: Sequence[PoolExplanation], pool: str | None) -> list[PoolExplanation]:
    """The pool's explanation, or those of all where `pool` is None. Raises ConfigError where there is none."""
    if not found:
        raise ConfigError(
            f"no autoscaler has spoken for {LAPSE_MS // 1000} s: no pool is scaled (`autoscale` in the configuration), "
            "or the autoscaler does not run"
        )
    chosen = [each for each in found if pool in (None, each.pool)]
    if not chosen:
        raise ConfigError(f"no pool {pool!r} is scaled; these are: {', '.join(each.pool for each in found)}")
    return chosen


def recent(found: PoolExplanation, oldest_s: float) -> PoolExplanation:
    """The explanation without changes before that Unix time."""
    return msgspec.structs.replace(
        found, changes=tuple(change for change in found.changes if change.unix_s >= oldest_s)
    )


def span_s(text: str) -> int:
    """Seconds of a time span, like 90s, 10m, 2h or 1d. Raises ConfigError."""
    match = SPAN.fullmatch(text)
    if match is None:
        raise ConfigError(f"--since is a number and its unit, like 90s, 10m, 2h or 1d, not {text!r}")
    return int(match[1]) * UNITS_S[match[2]]


def show(found: PoolExplanation, console: Console) -> None:
    console.print(f"[bold]{found.pool}[/bold]", highlight=False)
    for sentence in tell(found):
        console.print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)
    table = Table("what", "value")
    for name, value in _figures(found):
        table.add_row(name, value)
    console.print(table)
    if not found.changes:
        return
    changes = Table("changed at (UTC)", "from", "to", "reason", "outcome")
    for change in found.changes:
        moment = datetime.fromtimestamp(change.unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        changes.add_row(moment, str(change.was), str(change.target), change.reason, change.outcome)
    console.print(changes)


def _figures(found: PoolExplanation) -> list[tuple[str, str]]:
    return [
        ("target (reason)", f"{found.target} ({found.reason})"),
        ("allowed", f"{found.least} ({found.least_reason}) to {found.most} ({found.most_reason})"),
        ("replicas: serving, starting, stopping", f"{found.num_serving}, {found.num_starting}, {found.num_stopping}"),
        ("gateways that report", str(found.num_gateways)),
        ("arrivals, requests/s", _number(found.rate_rps)),
        ("capacity of a replica, requests/s", _number(found.capacity_rps)),
        ("demand, replicas at full use", _number(found.demand)),
        ("needed, replicas", "not known" if found.needed is None else str(found.needed)),
        ("waiting in gateways, on replicas", f"{found.num_queued}, {found.num_present}"),
        ("predicted wait, s", _number(found.predicted_wait_s)),
        ("expected start, s", _number(found.start_s)),
    ]


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
