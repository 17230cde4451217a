"""Entries of the contest: each autoscaler by its name and settings, as plain data, and how it is made from them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from bench.autoscaling.oracle_schedule import Schedule
from bench.autoscaling.play import Run
from bench.autoscaling.replicas import MOST, START_S, TTFT_S
from bench.autoscaling.rivals.dynamo import Planner, PlannerSettings
from bench.autoscaling.rivals.kubernetes import PodAutoscaler, PodAutoscalerSettings
from bench.autoscaling.rivals.ray_serve import RayServe, RayServeSettings
from bench.autoscaling.rivals.turns import Rule, in_turns
from penstock.autoscale.config import AutoscaleConfig

BOUNDS: Final = AutoscaleConfig(max_replicas=MOST, start_s=START_S, ttft_target_s=TTFT_S)
"""What an autoscaler other than ours is given: the bounds of the target."""


class Entry(msgspec.Struct, frozen=True):
    """An autoscaler with its settings."""

    kind: str
    settings: Mapping[str, Any] = {}

    @property
    def label(self) -> str:
        return f"{self.kind} {' '.join(f'{name}={value}' for name, value in self.settings.items())}".strip()


def _ours(settings: Mapping[str, Any]) -> Run:
    tree = msgspec.to_builtins(BOUNDS) | dict(settings)
    return Run(None, msgspec.convert(tree, AutoscaleConfig))


def _ours_and_tier(settings: Mapping[str, Any]) -> Run:
    return _ours(settings)._replace(has_other_tier=True)


def _ours_and_floor(settings: Mapping[str, Any]) -> Run:
    return _ours({"burst_floor": "day", **settings})


def _ours_and_order(settings: Mapping[str, Any]) -> Run:
    run = _ours_and_floor(settings)
    return run._replace(gateway=msgspec.structs.replace(run.gateway, overdue="last"))


def _static(settings: Mapping[str, Any]) -> Run:
    return Run(int(settings["replicas"]), None)


def _rule(make_rule: Callable[[Mapping[str, Any]], Rule]) -> Callable[[Mapping[str, Any]], Run]:
    return lambda settings: Run(None, BOUNDS, in_turns(lambda: make_rule(settings)))


def _schedule(settings: Mapping[str, Any]) -> Run:
    targets = [int(target) for target in settings["targets"]]
    return Run(targets[0], BOUNDS, in_turns(lambda: Schedule(targets, float(settings["slot_s"]))))


KINDS: Final[dict[str, Callable[[Mapping[str, Any]], Run]]] = {
    "ours": _ours,
    "ours and another tier": _ours_and_tier,
    "ours and a floor": _ours_and_floor,
    "ours and order": _ours_and_order,
    "static": _static,
    "ray": _rule(lambda settings: RayServe(RayServeSettings(**settings))),
    "keda": _rule(lambda settings: PodAutoscaler(PodAutoscalerSettings(metric="queue", **settings))),
    "hpa": _rule(lambda settings: PodAutoscaler(PodAutoscalerSettings(metric="in_flight", **settings))),
    "dynamo": _rule(lambda settings: Planner(PlannerSettings(**settings))),
    "schedule": _schedule,
}


def make_run(entry: Entry) -> Run:
    """How the entry plays a window. Raises ConfigError, TypeError or msgspec.ValidationError for settings that it does
    not have."""
    return KINDS[entry.kind](entry.settings)
