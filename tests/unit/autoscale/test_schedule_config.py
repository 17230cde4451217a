import pytest

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.schedule_config import ScheduleConfig
from penstock.base.config import parse
from penstock.base.errors import ConfigError

TEXT = """
max_replicas: 4
schedules:
  - {start: "08:00", end: "18:00", days: [mon, fri], timezone: Europe/Berlin, min_replicas: 3}
  - {start: "2027-03-01 09:00", end: "2027-03-02T24:00", min_replicas: 2, max_replicas: 3}
"""


def test_schedules_are_read_from_yaml() -> None:
    weekly, once = parse(TEXT, AutoscaleConfig, name="file").schedules

    assert (weekly.first.minutes, weekly.last.minutes, weekly.days) == (480, 1080, ("mon", "fri"))
    assert (str(once.first.day), once.last.minutes) == ("2027-03-01", 1440)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{start: "8:00", end: "18:00", min_replicas: 1}', "start is a time like '08:30'"),
        ('{start: "08:00", end: "24:01", min_replicas: 1}', "end is a time like '08:30'"),
        ('{start: "08:60", end: "18:00", min_replicas: 1}', "in quotes, not '08:60'"),
        ('{start: "2027-02-30 08:00", end: "2027-03-01 08:00", min_replicas: 1}', "a day that there is not"),
        ('{start: "24:00", end: "18:00", min_replicas: 1}', "start can't be 24:00"),
        ('{start: "2027-02-01 08:00", end: "18:00", min_replicas: 1}', "both times or both dates"),
        ('{start: "2027-02-01 08:00", end: "2027-02-01 08:00", min_replicas: 1}', "is not after start"),
        ('{start: "2027-02-01 08:00", end: "2027-02-02 08:00", days: [mon], min_replicas: 1}', "for a weekly window"),
        ('{start: "08:00", end: "18:00", days: [], min_replicas: 1}', "must name a day"),
        ('{start: "08:00", end: "18:00", days: [mon, mon], min_replicas: 1}', "each once"),
        ('{start: "08:00", end: "18:00", min_replicas: -1}', "can't be negative"),
        ('{start: "08:00", end: "18:00", min_replicas: 3, max_replicas: 2}', "is below min_replicas"),
        ('{start: "08:00", end: "18:00", min_replicas: 5}', "above autoscale.max_replicas"),
        ('{start: "08:00", end: "18:00", min_replicas: 1, timezone: Mars/Phobos}', "IANA database"),
        ('{start: "08:00", end: "18:00", min_replicas: 1, timezone: ../passwd}', "IANA database"),
        ('{start: "08:00", end: 18:00, min_replicas: 1}', "must be `str`, not 1080"),
        ('{start: "08:00", min_replicas: 1}', "end is required"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(f"schedules: [{line}]", AutoscaleConfig, name="file")


def test_a_window_over_midnight_may_end_when_it_begins() -> None:
    assert ScheduleConfig(start="08:00", end="08:00", min_replicas=1).last.minutes == 480
