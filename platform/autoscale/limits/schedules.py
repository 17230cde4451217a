"""A pool's bounds by its schedules. Pure.

A schedule's floor holds from as long before its window as a start is expected to take, so that the replicas are ready
when it begins, to its end; its cap only in the window itself. Of several the highest floor and the lowest cap count.
Invariant: a floor never lifts the cap, nor the pool's own `max_replicas`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.limits.windows import Window, next_window
from penstock.autoscale.policy import Reason
from penstock.autoscale.range import Range
from penstock.autoscale.schedule_config import ScheduleConfig
from penstock.autoscale.starts import expected_start_s

SLOW_STARTS = 2.0
"""The floor begins by the slowest remembered start, as far as it took at most so many times the expected one."""


class Coming(NamedTuple):
    """A schedule, and its window that is not over yet."""

    schedule: ScheduleConfig
    window: Window


def coming(settings: AutoscaleConfig, unix_s: float) -> list[Coming]:
    """The schedules that are in their window or will be, by its beginning."""
    found = [(schedule, next_window(schedule, unix_s)) for schedule in settings.schedules]
    return sorted(
        (Coming(schedule, window) for schedule, window in found if window is not None), key=lambda each: each.window
    )


def lead_s(settings: AutoscaleConfig, took_s: Sequence[float]) -> float:
    """Seconds before a window at which its floor begins. took_s: the last starts."""
    expected_s = expected_start_s(took_s, settings.start_s)
    return min(max([expected_s, *took_s]), SLOW_STARTS * expected_s)


def scheduled_range(settings: AutoscaleConfig, windows: Sequence[Coming], ahead_s: float, unix_s: float) -> Range:
    """The pool's bounds by its settings and the schedules' windows. ahead_s: seconds by which floors begin earlier."""
    allowed = Range(settings.min_replicas, settings.max_replicas)
    for schedule, window in windows:
        if schedule.max_replicas is not None and window.begin_s <= unix_s:
            allowed = allowed.at_most(schedule.max_replicas, Reason.SCHEDULE)
    for schedule, window in windows:
        if window.begin_s - ahead_s <= unix_s:
            allowed = allowed.at_least(schedule.min_replicas, Reason.SCHEDULE)
    return allowed
