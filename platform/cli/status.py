"""`penstock status`: the health of a running platform, from its state folder and its gateway."""

import ssl
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.cli.state import PoolState, RunState

TIMEOUT_S = 3.0


class PoolHealth(msgspec.Struct, frozen=True):
    name: str
    model: str
    served_names: tuple[str, ...]
    tier: str
    runner: str
    replicas_wanted: int
    replicas_ready: int


class TargetHealth(msgspec.Struct, frozen=True):
    """Requests of one model and class since the gateway's start."""

    model: str
    service_class: str
    requests: int
    """Requests that met their targets, missed them or failed."""
    met: int
    burn_rates: dict[str, float]
    """Highest burn rate of any tier, by window: 1 uses up what the objective leaves to miss exactly."""


class Health(msgspec.Struct, frozen=True):
    is_running: bool
    is_ready: bool
    version: str
    pid: int
    gateway: str
    redis: str
    pools: tuple[PoolHealth, ...]
    targets: tuple[TargetHealth, ...] = ()
    """What the gateway that was asked has counted."""


def own_client(shown: tuple[str, str] | None, timeout_s: float = TIMEOUT_S) -> httpx.Client:
    """A client of the platform's own pages, on this machine. The gateway's certificate is not checked: it has other
    names than this machine's own address, and nothing secret is said. shown: paths of a certificate and its key. Raises
    ConfigError for files that can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown is not None:
        try:
            context.load_cert_chain(*shown)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{' and '.join(shown)} can't be shown to the gateway: {error}") from error
    return httpx.Client(timeout=timeout_s, trust_env=False, verify=context)


def observe(state: RunState, client: httpx.Client) -> Health:
    """Ask the gateway; one that does not answer is not ready and knows no replica."""
    if not state.is_alive:
        return _health(state, is_running=False, is_ready=False, ready={})
    try:
        is_ready = client.get(f"{state.gateway}/readyz", timeout=TIMEOUT_S).status_code == 200
        page = client.get(f"{state.admin or state.gateway}/metrics", timeout=TIMEOUT_S).text
        ready, wanted = by_pool(page, "penstock_replicas"), by_pool(page, "penstock_autoscale_target")
    except (httpx.HTTPError, ValueError):  # ValueError: something else answers there
        return _health(state, is_running=True, is_ready=False, ready={})
    return _health(state, is_running=True, is_ready=is_ready, ready=ready, wanted=wanted, targets=read_targets(page))


def by_pool(metrics: str, gauge: str) -> dict[str, int]:
    """A gauge of the gateway, summed over labels other than the pool."""
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples if family.name == gauge else ():
            pool = sample.labels.get("pool", "")
            found[pool] = found.get(pool, 0) + int(sample.value)
    return found


def read_targets(metrics: str) -> tuple[TargetHealth, ...]:
    """What became of requests' targets, by model and class, in alphabetical order."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    burn_rates: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            key = sample.labels.get("model", ""), sample.labels.get("class", "")
            if sample.name == "penstock_slo_requests_total":
                outcomes, outcome = counts.setdefault(key, {}), sample.labels["outcome"]
                outcomes[outcome] = outcomes.get(outcome, 0) + int(sample.value)
            elif sample.name == "penstock_slo_burn_rate":
                rates, window = burn_rates.setdefault(key, {}), sample.labels["window"]
                rates[window] = max(rates.get(window, 0.0), sample.value)
    return tuple(
        TargetHealth(*key, sum(outcomes.values()), outcomes.get("met", 0), burn_rates.get(key, {}))
        for key, outcomes in sorted(counts.items())
        if any(outcomes.values())
    )


def show(health: Health, console: Console) -> None:
    word = "ready" if health.is_ready else "not ready" if health.is_running else "not running"
    console.print(
        f"penstock {health.version}, {word}: {health.gateway} (process {health.pid}, Redis {health.redis})",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("pool", "tier", "model", "served as", "runner", "ready")
    for pool in health.pools:
        table.add_row(
            pool.name,
            pool.tier,
            pool.model,
            ", ".join(pool.served_names),
            pool.runner,
            f"{pool.replicas_ready} of {pool.replicas_wanted}",
        )
    console.print(table)
    if health.targets:
        _show_targets(health.targets, console)


def _show_targets(targets: Iterable[TargetHealth], console: Console) -> None:
    windows = ("5m", "1h", "6h")
    table = Table("model", "class", "requests", "in target", *(f"burn {window}" for window in windows))
    for row in targets:
        share = f"{100 * row.met / row.requests:.2f} %"
        burning = (f"{row.burn_rates.get(window, 0.0):.2g}" for window in windows)
        table.add_row(row.model, row.service_class, str(row.requests), share, *burning)
    console.print(table)


def _health(
    state: RunState,
    *,
    is_running: bool,
    is_ready: bool,
    ready: Mapping[str, int],
    wanted: Mapping[str, int] = MappingProxyType({}),
    targets: tuple[TargetHealth, ...] = (),
) -> Health:
    """The platform's health as `penstock status` prints it. wanted: replicas that an autoscaler wants, by pool; a pool
    that is not in it wants the number configured."""
    return Health(
        is_running=is_running,
        is_ready=is_ready,
        version=state.version,
        pid=state.pid,
        gateway=state.gateway,
        redis=state.redis,
        pools=tuple(_pools(state.pools, ready, wanted)),
        targets=targets,
    )


def _pools(pools: Iterable[PoolState], ready: Mapping[str, int], wanted: Mapping[str, int]) -> Iterable[PoolHealth]:
    for pool in pools:
        yield PoolHealth(
            name=pool.name,
            model=pool.model,
            served_names=pool.served_names,
            tier=pool.tier,
            runner=pool.runner,
            replicas_wanted=wanted.get(pool.name, pool.replicas),
            replicas_ready=ready.get(pool.name, 0),
        )
