"""Targets of requests by their tenant's class: time to first token, and time per output token after it, in seconds.

Read by gateways (what a finished request is measured by, when it leaves a tier), replicas (how full a step may be) and
the autoscaler. Not limits: nothing is refused for a target, and a deadline is something else. Invariant: a target that
is named is a finite number above 0; None is one that is not named here, and `or_else` says where it comes from.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.base.errors import ConfigError

DEFAULT_OBJECTIVE = 0.99


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one class of requests asks for."""

    ttft_s: float | None = None
    """Longest time from a request's arrival at the gateway to its first token. None: it names none."""
    tpot_s: float | None = None
    """Longest mean time per output token after the first. None: it names none."""

    def or_else(self, other: "Target") -> "Target":
        """Merge with another target, which counts where this one names none."""
        return Target(
            ttft_s=other.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=other.tpot_s if self.tpot_s is None else self.tpot_s,
        )

    def check(self, where: str) -> None:
        """Raises ConfigError, which calls the target `where`."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{where}.{name} must be a number of seconds above 0, or null, not {value}")


class ClassTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Targets of each class of tenants (`penstock tenant set --class`); the fields are the classes' names."""

    interactive: Target = Target()
    standard: Target = Target()
    """Class of tenants that have no other, and of a class that only a later version knows."""
    batch: Target = Target()
    """Class of tenants whose requests come after all others', and of the lines of batches."""

    def of(self, service_class: str) -> Target:
        """Targets of a class."""
        target: Target = getattr(self, known_class(service_class))
        return target

    def or_else(self, other: "ClassTargets") -> "ClassTargets":
        """Merge with other targets, which count where these name none."""
        return ClassTargets(**{name: self.of(name).or_else(other.of(name)) for name in self.__struct_fields__})

    def strictest_tpot_s(self, classes: Iterable[str]) -> float | None:
        """The shortest time per output token that one of these classes asks for. Returns None if none names one."""
        named = (self.of(name).tpot_s for name in classes)
        return min((value for value in named if value is not None), default=None)

    @property
    def paced_classes(self) -> frozenset[str]:
        """Classes with a time per output token, to whose answers batch ones yield in a replica."""
        return frozenset(name for name in ("interactive", "standard") if self.of(name).tpot_s is not None)

    def strictest_ttft_s(self, classes: Iterable[str]) -> float | None:
        """The shortest time to first token that one of these classes asks for. Returns None if none names one."""
        named = (self.of(name).ttft_s for name in classes)
        return min((value for value in named if value is not None), default=None)

    def check(self, where: str) -> None:
        """Raises ConfigError, which calls the targets `where`."""
        for name in self.__struct_fields__:
            self.of(name).check(f"{where}.{name}")


NO_TARGETS = ClassTargets()
CLASSES = ClassTargets.__struct_fields__
"""Names of the classes, those of `tenancy.share`."""


def known_class(service_class: str) -> str:
    """The class, or the default one where only a later version knows it."""
    return service_class if service_class in CLASSES else "standard"


def same_for_all(target: Target) -> ClassTargets:
    """One target for every class."""
    return ClassTargets(**dict.fromkeys(CLASSES, target))


class TargetsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `targets` of the configuration: targets by class, and how often they should be met."""

    objective: float = DEFAULT_OBJECTIVE
    """Share of the requests of each class that should be in target, more than 0 and less than 1; what is left is the
    error budget that burn rates are told in."""
    interactive: Target = Target()
    standard: Target = Target()
    batch: Target = Target()

    @property
    def classes(self) -> ClassTargets:
        """The targets alone."""
        return ClassTargets(interactive=self.interactive, standard=self.standard, batch=self.batch)

    def __post_init__(self) -> None:
        if not 0 < self.objective < 1:
            raise ConfigError(
                f"targets.objective is a share of requests between 0 and 1, both left out, not {self.objective}"
            )
        self.classes.check("targets")


class GatewayTargets(NamedTuple):
    """What a gateway measures requests by where their model's pools do not agree on targets of their own."""

    classes: ClassTargets = NO_TARGETS
    objective: float = DEFAULT_OBJECTIVE
