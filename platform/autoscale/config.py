"""Settings of one pool's scaling. Loaded once at start; impossible values are refused with a sentence."""

from typing import Literal

import msgspec

from penstock.autoscale.schedule_config import ScheduleConfig
from penstock.base.errors import ConfigError

BURST_FLOORS_S = {"off": 0.0, "day": 86_400.0, "week": 604_800.0}


class AutoscaleBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    gpus: int
    """GPUs that all scaled pools may take together; replicas that still stop count."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"autoscale_budget.gpus must be at least 1, not {self.gpus}")


class AutoscaleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    min_replicas: int = 1
    """Fewest replicas. 0: the last one goes when nobody has asked for `idle_s`, and the first request starts one; it
    and those behind it are held meanwhile."""
    max_replicas: int = 4
    target_utilisation: float = 0.9
    """Highest share of what a replica can take that is planned for; less where prompts come in gusts."""
    ttft_target_s: float = 1.0
    """A queue whose predicted wait for the first token is longer asks for more replicas at once. For the classes of
    tenants that `targets` names no ttft_s for."""
    tpot_target_s: float = 0.1
    """Time per output token at which a replica counts as full, however many rows it could hold. For the classes that
    `targets` names no tpot_s for."""
    window_s: float = 30.0
    """Arrivals are averaged over so long; on less news than that nothing is decided but for a deadline."""
    start_s: float = 10.0
    """A replica is expected to be there so long after it was asked for; what waits is planned to be gone by then."""
    scale_down_delay_s: float = 600.0
    """The pool goes down to the most replicas that were enough within so many seconds: how long a burst is
    remembered."""
    scale_down_margin: float = 0.1
    """Fewer are enough when they would be at most so much below the target utilisation: what keeps a steady load from
    going up and down."""
    idle_s: float = 600.0
    """Seconds without any request after which the last replica goes, where min_replicas is 0."""
    burst_floor: Literal["off", "day", "week"] = "off"
    """A pool keeps as many replicas as the worst burst of the last day or week needed, of those that came faster than
    replicas start."""
    schedules: tuple[ScheduleConfig, ...] = ()
    """Windows of wall-clock time with bounds of their own, for events that are known ahead."""
    standby: int = 0
    """Replicas beyond what the load and min_replicas ask for, ready for a burst that is quicker than a start."""
    unplaced_s: float = 300.0
    """Seconds that replicas without a place are waited for, since a node may be on its way; then the target goes back
    to those that have one, and more are tried again after as long, twice as long each time. In Kubernetes only."""
    priority: int = 0
    """Rank among pools under one budget of GPUs: those with a higher number come first."""
    gpus: int | None = None
    """GPUs that one replica counts for in the budget; None: those that it takes."""
    dry_run: bool = False
    """Decide and log, change nothing."""

    @property
    def burst_floor_s(self) -> float:
        """Seconds for which bursts are remembered; 0: not at all."""
        return BURST_FLOORS_S[self.burst_floor]

    def __post_init__(self) -> None:
        if self.min_replicas < 0:
            raise ConfigError(f"autoscale.min_replicas can't be negative, like {self.min_replicas}")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"autoscale.max_replicas ({self.max_replicas}) is below autoscale.min_replicas ({self.min_replicas})"
            )
        for schedule in self.schedules:
            if schedule.min_replicas > self.max_replicas:
                raise ConfigError(
                    f"autoscale.schedules: min_replicas ({schedule.min_replicas}) is above autoscale.max_replicas "
                    f"({self.max_replicas})"
                )
        if self.standby < 0:
            raise ConfigError(f"autoscale.standby can't be negative, like {self.standby}")
        if self.gpus is not None and self.gpus < 0:
            raise ConfigError(f"autoscale.gpus can't be negative, like {self.gpus}")
        if not 0 < self.target_utilisation <= 1:
            raise ConfigError(
                f"autoscale.target_utilisation is a share above 0 and up to 1, not {self.target_utilisation}"
            )
        if not 0 <= self.scale_down_margin < 1:
            raise ConfigError(
                f"autoscale.scale_down_margin is a share from 0 and below 1, not {self.scale_down_margin}"
            )
        for name in ("ttft_target_s", "tpot_target_s", "window_s", "start_s", "idle_s", "unplaced_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"autoscale.{name} must be more than 0, not {getattr(self, name)}")
        if self.scale_down_delay_s < 0:
            raise ConfigError(f"autoscale.scale_down_delay_s can't be negative, like {self.scale_down_delay_s}")
