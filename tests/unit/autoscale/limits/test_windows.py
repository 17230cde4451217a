"""Windows against a clock on the wall: what it shows, minute by minute, says whether a window is open."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.autoscale.limits.windows import next_window
from penstock.autoscale.schedule_config import DAYS, Day, ScheduleConfig

BERLIN = "Europe/Berlin"


def unix_s(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def is_open(schedule: ScheduleConfig, at_s: float) -> bool:
    window = next_window(schedule, at_s)
    return window is not None and window.begin_s <= at_s


def hours(schedule: ScheduleConfig, day: str) -> float:
    window = next_window(schedule, unix_s(f"{day}T12:00", schedule.timezone))
    assert window is not None
    return (window.end_s - window.begin_s) / 3600


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-11-23T07:59:59", False),  # a Monday
        ("2026-11-23T08:00:00", True),
        ("2026-11-23T17:59:59", True),
        ("2026-11-23T18:00:00", False),
        ("2026-11-24T12:00:00", False),
        ("2026-11-27T08:00:00", True),
        ("2026-07-20T08:00:00", True),  # in summer, by the clock of the place
    ],
)
def test_a_weekly_window_begins_and_ends_by_the_clock_of_its_place(at: str, expected: bool) -> None:
    schedule = ScheduleConfig(start="08:00", end="18:00", days=("mon", "fri"), timezone=BERLIN, min_replicas=1)

    assert is_open(schedule, unix_s(at, BERLIN)) is expected


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    schedule = ScheduleConfig(start="22:00", end="06:00", days=("fri",), min_replicas=1)

    assert is_open(schedule, unix_s("2026-11-28T05:59:59")), "Saturday morning"
    assert not is_open(schedule, unix_s("2026-11-28T06:00:00"))
    assert not is_open(schedule, unix_s("2026-11-28T22:00:00"))
    assert not is_open(schedule, unix_s("2026-11-27T05:00:00"))


def test_a_single_window_comes_once() -> None:
    schedule = ScheduleConfig(start="2027-03-01 09:00", end="2027-03-02 24:00", min_replicas=1)

    assert next_window(schedule, unix_s("2026-01-01T00:00")) == (unix_s("2027-03-01T09:00"), unix_s("2027-03-03T00:00"))
    assert is_open(schedule, unix_s("2027-03-02T23:59:59"))
    assert next_window(schedule, unix_s("2027-03-03T00:00:00")) is None


def test_a_day_of_a_clock_change_is_as_long_as_its_clocks_say() -> None:
    day = ScheduleConfig(start="00:00", end="24:00", timezone=BERLIN, min_replicas=1)

    assert (hours(day, "2026-03-29"), hours(day, "2026-10-25"), hours(day, "2026-11-01")) == (23, 25, 24)


def test_an_hour_that_clocks_skip_or_repeat_makes_a_window_longer_never_shorter() -> None:
    begins = ScheduleConfig(start="02:30", end="13:00", timezone=BERLIN, min_replicas=1)
    ends = ScheduleConfig(start="20:00", end="02:30", timezone=BERLIN, min_replicas=1)

    assert next_window(begins, unix_s("2026-03-29T12:00", BERLIN)) == (
        unix_s("2026-03-29T00:30"),
        unix_s("2026-03-29T11:00"),
    )
    assert next_window(begins, unix_s("2026-10-25T12:00", BERLIN)) == (
        unix_s("2026-10-25T00:30"),
        unix_s("2026-10-25T12:00"),
    )
    assert next_window(ends, unix_s("2026-10-24T21:00", BERLIN)) == (
        unix_s("2026-10-24T18:00"),
        unix_s("2026-10-25T01:30"),
    )


MINUTES = st.integers(0, 24 * 60 - 1)


@settings(max_examples=150, deadline=None)
@given(
    first=MINUTES,
    last=MINUTES,
    days=st.sets(st.sampled_from(DAYS), min_size=1),
    zone=st.sampled_from(["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Pacific/Kiritimati"]),
    at=st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)),
)
def test_a_window_is_open_when_the_clock_on_the_wall_says_so(
    first: int, last: int, days: set[Day], zone: str, at: datetime
) -> None:
    schedule = ScheduleConfig(
        start=f"{first // 60:02}:{first % 60:02}",
        end=f"{last // 60:02}:{last % 60:02}",
        days=tuple(days),
        timezone=zone,
        min_replicas=1,
    )
    moment = at.replace(tzinfo=UTC).astimezone(ZoneInfo(zone))
    shown = moment.hour * 60 + moment.minute
    today, yesterday = DAYS[moment.weekday()], DAYS[(moment.date() - timedelta(days=1)).weekday()]
    expected = (
        today in days and first <= shown < last
        if first < last
        else (today in days and shown >= first) or (yesterday in days and shown < last)
    )
    offsets = {
        (at + timedelta(hours=each)).replace(tzinfo=UTC).astimezone(ZoneInfo(zone)).utcoffset() for each in (-26, 26)
    }

    if len(offsets) == 1:  # no clock change near
        assert is_open(schedule, moment.timestamp()) is expected
    else:
        assert is_open(schedule, moment.timestamp()) or not expected
