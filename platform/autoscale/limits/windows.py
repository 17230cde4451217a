"""Beginnings and ends of a schedule's windows, as Unix times. Pure; the clock is a parameter.

Wall-clock times are turned into instants day by day, in the schedule's own time zone, so a window from 08:00 to 18:00
is that on every day of the year, 10 hours or not. Where a clock change skips or repeats the hour in which a window
begins or ends, the earlier beginning and the later end count: a window is then at most that hour longer, and never
shorter. Invariant: the windows of one schedule are found in the order in which they begin.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from penstock.autoscale.schedule_config import DAYS, Moment, ScheduleConfig

BEFORE = 3
"""Days before today on which a window may have begun that has not ended: a day and a night long, and in another zone's
day."""
AHEAD = 9
"""Days ahead within which a weekly window begins."""


class Window(NamedTuple):
    """One window of a schedule: begin <= time < end, in Unix seconds."""

    begin_s: float
    end_s: float


def next_window(schedule: ScheduleConfig, unix_s: float) -> Window | None:
    """The first window that is not over at that time. Returns None if there will be none any more."""
    return next((window for window in _windows(schedule, unix_s) if window.end_s > unix_s), None)


def _windows(schedule: ScheduleConfig, unix_s: float) -> Iterator[Window]:
    first, last, zone = schedule.first, schedule.last, ZoneInfo(schedule.timezone)
    if first.day is not None and last.day is not None:
        yield Window(_instant(first.day, first, zone, min), _instant(last.day, last, zone, max))
        return
    today = datetime.fromtimestamp(unix_s, zone).date()
    over_night = last.minutes <= first.minutes
    for day in (today + timedelta(days=offset) for offset in range(-BEFORE, AHEAD)):
        if DAYS[day.weekday()] in schedule.days:
            ends_on = day + timedelta(days=1) if over_night else day
            yield Window(_instant(day, first, zone, min), _instant(ends_on, last, zone, max))


def _instant(day: date, moment: Moment, zone: ZoneInfo, choose: Callable[[Iterable[float]], float]) -> float:
    """The instant at which clocks there show that moment; of two, or of the two ways to read one that they skip, the
    chosen."""
    if moment.minutes == 24 * 60:
        day += timedelta(days=1)
    local = datetime.combine(day, moment.time)
    return choose(local.replace(tzinfo=zone, fold=fold).astimezone(UTC).timestamp() for fold in (0, 1))
