"""Targets of requests, by the model that is asked for and the class of its tenant. Pure.

Not those of a replica, which keeps to its own pool's. Invariant: what a request is measured by does not depend on which
pool answers; where a model's pools do not agree on a class's targets, the platform's count.
"""

from collections.abc import Mapping, Sequence

from penstock.router.config import PoolSpec
from penstock.wire.targets import (
    CLASSES,
    DEFAULT_OBJECTIVE,
    NO_TARGETS,
    ClassTargets,
    GatewayTargets,
    Target,
    same_for_all,
)


class RequestTargets:
    """Targets by model, and those of all other models. objective: share of requests that should meet them."""

    def __init__(
        self,
        by_model: Mapping[str, ClassTargets],
        others: ClassTargets = NO_TARGETS,
        objective: float = DEFAULT_OBJECTIVE,
    ) -> None:
        self._by_model = by_model
        self._others = others
        self.objective = objective

    def find(self, model: str | None, service_class: str) -> Target:
        """Targets of a request. model: label of the served model; None: it was refused before that was known."""
        found = self._others if model is None else self._by_model.get(model, self._others)
        return found.of(service_class)


def find_targets(pools: Sequence[PoolSpec], targets: GatewayTargets, ttft_target_s: float) -> RequestTargets:
    """Targets of all models that the pools serve. targets: the platform's. ttft_target_s: of a class that names
    none."""
    others = targets.classes.or_else(same_for_all(Target(ttft_s=ttft_target_s)))
    names = dict.fromkeys(name for pool in pools for name in pool.served_names)
    by_model = {
        name: agreed_targets([pool.targets.or_else(others) for pool in pools if name in pool.served_names], others)
        for name in names
    }
    return RequestTargets(by_model, others, targets.objective)


def agreed_targets(found: Sequence[ClassTargets], others: ClassTargets) -> ClassTargets:
    """Targets of each class that all of a model's pools have, or else the other ones."""
    agreed = {}
    for name in CLASSES:
        different = {targets.of(name) for targets in found}
        agreed[name] = different.pop() if len(different) == 1 else others.of(name)
    return ClassTargets(**agreed)
