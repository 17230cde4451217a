"""One schedule of a pool: a window of wall-clock time, weekly or once, and the bounds that hold in it."""

import re
from datetime import date, datetime, time
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

from penstock.base.errors import ConfigError

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MOMENT = re.compile(r"(?:(\d{4}-\d{2}-\d{2})[ T])?(\d{2}):(\d{2})")


class Moment(msgspec.Struct, frozen=True):
    """A time on the clock, on a day or on any."""

    day: date | None
    minutes: int
    """Minutes since midnight, 0 to 1440."""

    @property
    def time(self) -> time:
        return time(self.minutes // 60 % 24, self.minutes % 60)


class ScheduleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    start: str
    """"HH:MM", on each of `days`; or "YYYY-MM-DD HH:MM", once."""
    end: str
    """The same, exclusive. "HH:MM" that is not after `start` is on the next day; 24:00 is midnight."""
    days: tuple[Day, ...] = DAYS
    """Days on which the window begins."""
    timezone: str = "UTC"
    """Name in the IANA database, like Europe/Berlin."""
    min_replicas: int
    """Fewest replicas in the window; they are asked for as long ahead as a start takes."""
    max_replicas: int | None = None
    """Most replicas in the window; None: what the pool may have anyway."""

    @property
    def first(self) -> Moment:
        return parse_moment(self.start, "start")

    @property
    def last(self) -> Moment:
        return parse_moment(self.end, "end")

    def __post_init__(self) -> None:
        first, last = self.first, self.last
        if (first.day is None) != (last.day is None):
            raise ConfigError(
                f"autoscale.schedules: start and end are both times or both dates with times, not {self.start!r} and "
                f"{self.end!r}"
            )
        if first.minutes == 24 * 60:
            raise ConfigError("autoscale.schedules: start can't be 24:00; write 00:00, and the day behind it")
        if first.day is not None and last.day is not None:
            if (last.day, last.minutes) <= (first.day, first.minutes):
                raise ConfigError(f"autoscale.schedules: end ({self.end}) is not after start ({self.start})")
            if self.days != DAYS:
                raise ConfigError("autoscale.schedules: days is for a weekly window, whose start and end have no date")
        if not self.days or len(set(self.days)) < len(self.days):
            raise ConfigError(f"autoscale.schedules: days must name a day, and each once, not {list(self.days)}")
        if self.min_replicas < 0:
            raise ConfigError(f"autoscale.schedules: min_replicas can't be negative, like {self.min_replicas}")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"autoscale.schedules: max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})"
            )
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise ConfigError(
                f"autoscale.schedules: timezone is a name of the IANA database, like Europe/Berlin, not "
                f"{self.timezone!r} (they come from the system, or from the package tzdata)"
            ) from error


def parse_moment(text: str, field: str) -> Moment:
    """The moment that is written there. Raises ConfigError."""
    match = _MOMENT.fullmatch(text)
    minutes = None if match is None else 60 * int(match[2]) + int(match[3])
    if match is None or minutes is None or minutes > 24 * 60 or int(match[3]) > 59:
        raise ConfigError(
            f"autoscale.schedules: {field} is a time like '08:30', or a date and a time like '2027-01-31 08:30', in "
            f"quotes, not {text!r}"
        )
    try:
        return Moment(None if match[1] is None else datetime.strptime(match[1], "%Y-%m-%d").date(), minutes)
    except ValueError as error:
        raise ConfigError(f"autoscale.schedules: {field} names a day that there is not: {text!r}") from error
