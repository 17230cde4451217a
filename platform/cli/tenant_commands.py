"""The commands about tenants, their keys and their usage; what they do is in `tenant`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from penstock.base.config import parse
from penstock.base.errors import ConfigError
from penstock.base.redis_disk import find_disk_doubt
from penstock.cli import tenant_backup
from penstock.cli.first_tenants import FirstTenants, apply
from penstock.cli.refusals import refusing
from penstock.cli.state import StateDir
from penstock.cli.tenant import (
    Change,
    change_defaults,
    change_settings,
    create,
    delete,
    find,
    find_all,
    keys_of,
    redis_of,
    revoke,
    secret_of,
    show_defaults,
    show_keys,
    show_tenants,
    show_usage,
    usage_of,
    usage_tree,
    with_redis,
)
from penstock.cli.up import DEMO_TENANT
from penstock.tenancy.keys import create_key
from penstock.tenancy.share import SERVICE_CLASSES
from penstock.tenancy.tenants import TIER_POLICIES, Tenants
from penstock.tenancy.usage import KEPT_S
from penstock.tenancy.usage_csv import usage_csv

MAX_DAYS = KEPT_S // 86400

tenants = typer.Typer(no_args_is_help=True, help="Tenants: who may ask, how much, and where.")
keys = typer.Typer(no_args_is_help=True, help="API keys of tenants.")

Name = Annotated[str, typer.Argument(help="The tenant's id: letters, digits, dots, dashes, underscores.")]
State = Annotated[Path, typer.Option("--state", help="State folder of the running platform.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="A configuration whose redis.url to use instead of the running platform's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
Requests = Annotated[int | None, typer.Option("--requests-per-minute", min=0, help="0: no limit.")]
Tokens = Annotated[
    int | None, typer.Option("--tokens-per-minute", min=0, help="Of prompts and answers together; 0: no limit.")
]
Parallel = Annotated[
    int | None,
    typer.Option("--max-parallel", min=0, help="Sequences at once, each choice of each prompt is one; 0: no limit."),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", min=0, help="Sum of charges in a calendar month (UTC), in the currency of the tariffs; 0: none."
    ),
]
Models = Annotated[
    str | None, typer.Option("--models", help="Served names it may use, with commas between them; *: all.")
]
Policy = Annotated[str | None, typer.Option("--tier-policy", help=f"{', '.join(TIER_POLICIES)}.")]
Weight = Annotated[
    float | None, typer.Option("--weight", help="Tokens it gets for one of a tenant with weight 1, while both wait.")
]
ServiceClass = Annotated[
    str | None, typer.Option("--class", help=f"{', '.join(SERVICE_CLASSES)}: who goes first, and is refused last.")
]
DEFAULT_STATE = Path(".penstock")


@tenants.command("create")
def create_tenant(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_parallel: Parallel = None,
    budget: Budget = None,
    models: Models = None,
    tier_policy: Policy = None,
    weight: Weight = None,
    service_class: ServiceClass = None,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """A new tenant; it needs a key: penstock key create NAME."""
    change = _change(
        requests_per_minute, tokens_per_minute, max_parallel, budget, models, tier_policy, weight, service_class
    )
    with refusing():
        show_tenants(
            [with_redis(redis_of(StateDir(state), config), lambda client: create(client, name, change))], Console()
        )


@tenants.command("set")
def set_tenant(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_parallel: Parallel = None,
    budget: Budget = None,
    models: Models = None,
    tier_policy: Policy = None,
    weight: Weight = None,
    service_class: ServiceClass = None,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Change what is named; the rest stays."""
    change = _change(
        requests_per_minute, tokens_per_minute, max_parallel, budget, models, tier_policy, weight, service_class
    )
    with refusing():
        show_tenants(
            [with_redis(redis_of(StateDir(state), config), lambda client: change_settings(client, name, change))],
            Console(),
        )


@tenants.command("show")
def show_tenant(name: Name, as_json: AsJson = False, state: State = DEFAULT_STATE, config: Config = None) -> None:
    """One tenant."""
    with refusing():
        found = with_redis(redis_of(StateDir(state), config), lambda client: find(client, name))
        _print(found) if as_json else show_tenants([found], Console())


@tenants.command("list")
def list_tenants(as_json: AsJson = False, state: State = DEFAULT_STATE, config: Config = None) -> None:
    """All tenants."""
    with refusing():
        found = with_redis(redis_of(StateDir(state), config), find_all)
        _print(found) if as_json else show_tenants(found, Console())


@tenants.command("defaults")
def default_limits(
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_parallel: Parallel = None,
    budget: Budget = None,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Limits of tenants that are made from now on, to show or to change; those that are there keep theirs."""
    change = Change(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_parallel=max_parallel,
        budget=budget,
    )
    with refusing():
        show_defaults(
            with_redis(redis_of(StateDir(state), config), lambda client: change_defaults(client, change)), Console()
        )


@tenants.command("delete")
def delete_tenant(name: Name, state: State = DEFAULT_STATE, config: Config = None) -> None:
    """Delete a tenant for good: its keys are refused, and its id is not used again. Its usage can still be read."""
    with refusing():
        if name == DEMO_TENANT:
            raise ConfigError(
                f"{DEMO_TENANT!r} is the tenant of the key that `penstock up` prints; revoke its keys instead"
            )
        count = with_redis(redis_of(StateDir(state), config), lambda client: delete(client, name))
        print(f"deleted {name}; keys revoked: {count}")
        _wait_for_disk(redis_of(StateDir(state), config))


@tenants.command("apply")
def apply_tenants(
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML: tenants, a list of name, keys and what `penstock tenant create` takes. Or what "
            "`penstock tenant export` wrote. - reads it from standard input."
        ),
    ],
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Make the tenants and keys that a file names, where they are not there already; or restore an export."""
    with refusing():
        folder = StateDir(state)
        data = tenant_backup.read(file)
        if not data.strip():
            raise ConfigError(f"{file}: is empty; was the export cut off that it should have?")
        url, secret = redis_of(folder, config), secret_of(folder)
        if tenant_backup.is_export(data):
            wanted = tenant_backup.parse(data, secret)
            report = with_redis(url, lambda client: tenant_backup.restore(client, wanted, time.time()))
            print("\n".join(report.lines))
            if report.takes_away:
                _wait_for_disk(url)
            return
        first = parse(tenant_backup.text(file, data), FirstTenants, name=str(file))
        for line in with_redis(url, lambda client: apply(client, secret, first)):
            print(line)


@tenants.command("export")
def export_tenants(
    output: Annotated[Path | None, typer.Option("--output", help="A file; default: standard output.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="A folder, for a file with the time in its name (UTC).")
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="With --folder: so many of them stay, the latest.")] = 14,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """All tenants, settings, adapters' names, published prefixes and digests of keys (never a key), as JSON lines."""
    with refusing():
        if output is not None and folder is not None:
            raise ConfigError("--output and --folder are two places; name one")
        place = StateDir(state)
        url, secret = redis_of(place, config), secret_of(place)
        now = time.time()
        lines = with_redis(url, lambda client: tenant_backup.export(client, secret, now))
        tenant_backup.write(lines, output=output, folder=folder, keep=keep, now=now)


@keys.command("create")
def make_key(tenant: Name, state: State = DEFAULT_STATE, config: Config = None) -> None:
    """A new key, shown now and never again."""
    with refusing():
        folder = StateDir(state)
        url, secret = redis_of(folder, config), secret_of(folder)
        with_redis(url, lambda client: Tenants(client).get(tenant))
        print(with_redis(url, lambda client: create_key(client, secret, tenant)))


@keys.command("list")
def list_keys_of(
    tenant: Annotated[str | None, typer.Argument(help="Default: all tenants.")] = None,
    as_json: AsJson = False,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Keys by their ids: the keys themselves are nowhere."""
    with refusing():
        found = with_redis(redis_of(StateDir(state), config), lambda client: keys_of(client, tenant))
        _print([key._asdict() for key in found]) if as_json else show_keys(found, Console())


@keys.command("revoke")
def revoke_one(
    key: Annotated[
        str, typer.Argument(help="The key, or its id as `penstock key list` shows it. - reads it from standard input.")
    ],
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Revoke a key: every gateway refuses it within gateway.key_cache_s; requests under way may finish."""
    with refusing():
        folder = StateDir(state)
        url, secret = redis_of(folder, config), secret_of(folder)
        named = sys.stdin.readline().strip() if key == "-" else key
        print(with_redis(url, lambda client: revoke(client, secret, named)))
        _wait_for_disk(url)


def usage(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Default: all.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=MAX_DAYS, help="Up to today.")] = 31,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, money to the last digit.")] = False,
    state: State = DEFAULT_STATE,
    config: Config = None,
) -> None:
    """Requests, tokens, cost and charge by tenant, day (UTC), model and adapter; a second behind."""
    with refusing():
        if as_json and as_csv:
            raise ConfigError("--json and --csv exclude each other")
        found = with_redis(redis_of(StateDir(state), config), lambda client: usage_of(client, tenant, days))
        if as_csv:
            sys.stdout.write(usage_csv(found))
        elif as_json:
            _print(usage_tree(found))
        else:
            show_usage(found, Console())


def _change(
    requests: int | None,
    tokens: int | None,
    parallel: int | None,
    budget: float | None,
    models: str | None,
    policy: str | None,
    weight: float | None,
    service_class: str | None,
) -> Change:
    names = None if models is None else tuple(name.strip() for name in models.split(",") if name.strip())
    return Change(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        max_parallel=parallel,
        budget=budget,
        models=names,
        tier_policy=policy,
        weight=weight,
        service_class=service_class,
    )


def _wait_for_disk(url: str) -> None:
    """A revocation must not be undone by a power failure: wait until it is on Redis's disk, or say why it may not
    be. What was printed before comes out before, into a pipe too."""
    sys.stdout.flush()
    if (doubt := with_redis(url, find_disk_doubt)) is not None:
        print(f"note: {doubt}", file=sys.stderr)


def _print(found: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
