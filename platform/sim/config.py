"""Settings of a simulation beside those of the platform and of the load. Impossible values are refused with a
sentence."""

from typing import NamedTuple

import msgspec

from penstock.autoscale.config import AutoscaleConfig
from penstock.base.errors import ConfigError
from penstock.router.routing.tiers import Tier, TierPolicy
from penstock.sim.faults.fault import Fault, check_faults
from penstock.tenancy.share import SERVICE_CLASSES
from penstock.wire.targets import NO_TARGETS, ClassTargets
from penstock.workers.config import EngineConfig


class SimulationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    """Seed of everything that is drawn here: noise of step times, starts, ties. The load has its own."""
    start_s: float | None = None
    """Seconds from asking for a replica to having it, on the average; None: what the pool's autoscale.start_s says."""
    start_jitter: float = 0.3
    """Standard deviation of that time as a part of it, lognormal; 0: none."""
    model_error: float = 1.0
    """Factor by which the step costs that replicas report, and the policies predict with, are wrong; 1: they are those
    that fit the true step times best."""
    gateways: int = 1
    """Gateways that report to the autoscaler, each an equal part of the load; it is one that places requests."""
    tier_policy: TierPolicy = TierPolicy.EDGE_FIRST
    """Tier policy of every tenant of the load."""
    faults: tuple[Fault, ...] = ()
    """What goes wrong about the autoscaler."""
    classes: dict[str, str] = {}
    """Service class of each of the load's tenants, by its name; those without one have the default class."""

    def __post_init__(self) -> None:
        if self.start_s is not None and self.start_s < 0:
            raise ConfigError(f"start_s can't be negative, like {self.start_s:g}")
        if self.start_jitter < 0:
            raise ConfigError(f"start_jitter can't be negative, like {self.start_jitter:g}")
        if not self.model_error > 0:
            raise ConfigError(f"model_error is a factor above 0, not {self.model_error:g}")
        check_faults(self.gateways, self.faults)
        for tenant, name in self.classes.items():
            if name not in SERVICE_CLASSES:
                raise ConfigError(f"classes: {tenant} has the class {name}, which is none of {SERVICE_CLASSES}")


class SimulatedPool(NamedTuple):
    """A pool of the platform's configuration, as far as it is simulated."""

    name: str
    tier: Tier
    replicas: int
    """Number of replicas at the beginning."""
    autoscale: AutoscaleConfig | None
    engine: EngineConfig
    """Settings of each replica; `timed` has the step times and the KV blocks, whatever runner the pool has."""
    targets: ClassTargets = NO_TARGETS
    """Targets of its requests by class; steps keep those of `tpot_s`, where the engine does."""
    price_per_hour: float | None = None
    """Price of an hour of one replica; None: it has none."""

    @property
    def paced_classes(self) -> frozenset[str]:
        """Classes whose targets steps keep, and to which the class batch yields."""
        return self.targets.paced_classes if self.engine.keep_tpot else frozenset()


def check_pool(pool: SimulatedPool) -> None:
    """Raises ConfigError for a pool that can't be simulated."""
    if pool.engine.runner != "timed":
        raise ConfigError(
            f"pools[{pool.name!r}].engine.runner is {pool.engine.runner}; the simulator takes step times and KV blocks "
            "from engine.timed: set runner: timed and timed.table"
        )
    if pool.engine.speculation.method != "none":
        raise ConfigError(f"pools[{pool.name!r}].engine.speculation is not simulated; set method: none")
