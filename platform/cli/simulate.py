"""`penstock simulate`: a load of the load tester against the pools of a configuration, simulated, and its figures."""

from pathlib import Path

from rich.console import Console

from penstock.base.config import load
from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig, PoolConfig, load_platform
from penstock.router.routing.tiers import TierPolicy, parse_policy
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.faults.fault import FaultFile
from penstock.sim.results import Simulated, simulate
from penstock.tenancy.tenants import TIER_POLICIES
from penstock.wire.targets import ClassTargets
from penstock_loadtest.errors import LoadtestError
from penstock_loadtest.scenario import load_scenario


def run(
    config: Path,
    scenario: Path,
    settings: list[str],
    out: Path,
    simulation: SimulationConfig,
    console: Console,
    *,
    plots: bool,
) -> None:
    """Simulate and print the main figures. settings: changes of the scenario, like `arrivals.rate=4`. Raises
    ConfigError."""
    try:
        platform = load_platform(config)
        played = load_scenario(scenario, settings)
        found = simulate(played, simulated_pools(platform), platform.gateway, simulation, out, plots=plots)
    except LoadtestError as error:
        raise ConfigError(str(error)) from error
    _show(found, console)


def load_faults(path: Path | None) -> FaultFile:
    """The file's gateways and faults; one gateway and none without a file. Raises ConfigError."""
    return FaultFile() if path is None else load(path, FaultFile)


def read_tier_policy(name: str) -> TierPolicy:
    """Raises ConfigError for a policy that there is not."""
    try:
        return parse_policy(name)
    except ValueError:
        raise ConfigError(f"--tier-policy is one of {', '.join(TIER_POLICIES)}, not {name!r}") from None


def read_classes(given: list[str]) -> dict[str, str]:
    """Classes by tenant, of options like acme=batch. Raises ConfigError."""
    classes = dict(text.partition("=")[::2] for text in given)
    if "" in classes or "" in classes.values():
        raise ConfigError(f"--class takes a tenant and its class, like acme=batch, not {' '.join(given)}")
    return classes


def simulated_pools(platform: PlatformConfig) -> list[SimulatedPool]:
    """The pools of the first one's served names: the load's only model. Raises ConfigError for providers, which are not
    simulated."""
    if platform.providers:
        raise ConfigError("providers is not empty; the simulator has none: leave them out")
    names = set(platform.pools[0].names)
    others = [pool.name for pool in platform.pools if not names & set(pool.names)]
    if others:
        raise ConfigError(f"pools {', '.join(others)} serve another model than {platform.pools[0].name}; simulate one")
    return [_simulated(pool, platform.named_targets(pool)) for pool in platform.pools]


def _simulated(pool: PoolConfig, targets: ClassTargets) -> SimulatedPool:
    return SimulatedPool(pool.name, pool.tier, pool.replicas, pool.autoscale, pool.engine, targets, pool.price_per_hour)


def _show(found: Simulated, console: Console) -> None:
    summary, facts = found.summary, found.facts
    share = summary.goodput.share
    console.print(
        f"{summary.requests} requests in {facts.ended_s:.0f} s (simulated): "
        f"{'-' if share is None else f'{100 * share:.2f} %'} within their targets; "
        f"TTFT p50 {_ms(summary.ttft_s.p50)}, p99 {_ms(summary.ttft_s.p99)}; "
        f"TPOT p50 {_ms(summary.tpot_s.p50)}, p99 {_ms(summary.tpot_s.p99)}",
        highlight=False,
    )
    for name, seconds in facts.replica_seconds.items():
        console.print(
            f"{name}: {seconds / 3600:.2f} replica-hours, at most {facts.max_replicas[name]} replicas at once; "
            f"step times: {facts.sources[name] or 'of no stated source'}",
            highlight=False,
            markup=False,
        )
    console.print(f"{found.folder}", highlight=False, markup=False)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
