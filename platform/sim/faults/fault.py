"""Faults of a simulation: what goes wrong, when, and for how long. Data only; impossible ones are refused with a
sentence."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.base.errors import ConfigError

Kind = Literal[
    "reports_missing",
    "reports_frozen",
    "reports_late",
    "changes_fail",
    "changes_hang",
    "controller_away",
    "autoscaler_down",
    "clock_off",
    "no_gpus",
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: Kind
    """reports_missing: a gateway writes no report. reports_frozen: its last one is written again and again.
    reports_late: reports arrive `by_s` late. changes_fail: Serve's controller refuses to change a target.
    changes_hang: it changes it, and the answer is given up after `by_s`. controller_away: it tells nothing and changes
    nothing. autoscaler_down: the autoscaler is killed, and another one begins at the end. clock_off: the wall clock of
    the autoscaler is `by_s` ahead. no_gpus: replicas beyond `replicas` in each pool don't start."""
    at_s: float
    """Beginning, seconds of the simulation."""
    length_s: float
    gateway: int | None = None
    """Number of the gateway whose reports it concerns, from 0; None: all."""
    by_s: float = 5.0
    """Seconds, as `kind` says; a clock may be behind, which is negative."""
    replicas: int = 0
    """Replicas of each pool that have GPUs."""
    is_told: bool = True
    """Whether the cluster tells the autoscaler of replicas that have no GPUs, as Kubernetes does."""

    def __post_init__(self) -> None:
        for name in ("at_s", "length_s", "gateway", "replicas"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} of a fault can't be negative, like {getattr(self, name):g}")
        if self.by_s < 0 and self.kind != "clock_off":
            raise ConfigError(f"by_s of {self.kind} can't be negative, like {self.by_s:g}")
        if self.gateway is not None and not self.kind.startswith("reports_"):
            raise ConfigError(f"a fault of kind {self.kind} concerns no single gateway; leave out gateway")

    @property
    def end_s(self) -> float:
        return self.at_s + self.length_s

    def is_on(self, now: float) -> bool:
        return self.at_s <= now < self.end_s


class FaultFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of faults, for `penstock simulate --faults`."""

    gateways: int = 1
    """Gateways that report, each an equal part of the load."""
    faults: tuple[Fault, ...] = ()


def check_faults(gateways: int, faults: Sequence[Fault]) -> None:
    """Raises ConfigError for a number of gateways below 1, and for a fault of a gateway that there is not."""
    if gateways < 1:
        raise ConfigError(f"gateways must be at least 1, not {gateways}")
    for fault in faults:
        if fault.gateway is not None and fault.gateway >= gateways:
            raise ConfigError(f"gateway {fault.gateway} of a fault is none of 0 to {gateways - 1}")


def find_fault(faults: Sequence[Fault], kind: Kind, now: float) -> Fault | None:
    """The first fault of that kind that is on; None where there is none."""
    return next((fault for fault in faults if fault.kind == kind and fault.is_on(now)), None)
