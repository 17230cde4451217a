"""Schedules over time, under the whole scaler."""

from datetime import UTC, datetime

import pytest
from msgspec import structs

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.limits.schedules import coming, lead_s, scheduled_range
from penstock.autoscale.observation import ServeState
from penstock.autoscale.policy import Reason
from penstock.autoscale.schedule_config import ScheduleConfig
from penstock.wire.explanation import ScheduledWindow
from tests.unit.autoscale.test_scaler import SETTINGS, Rig, Serve, Source, busy

NINE = datetime(2026, 11, 23, 9, tzinfo=UTC).timestamp()
MORNING = ScheduleConfig(start="09:00", end="12:00", min_replicas=3, max_replicas=5)


def allowed(settings: AutoscaleConfig, unix_s: float, ahead_s: float = 60.0) -> tuple[int, Reason, int, Reason]:
    found = scheduled_range(settings, coming(settings, unix_s), ahead_s, unix_s)
    return found.least, found.least_reason, found.most, found.most_reason


def test_the_floor_begins_a_start_earlier_and_the_cap_with_the_window() -> None:
    settings = AutoscaleConfig(max_replicas=8, schedules=(MORNING,))
    own = (1, Reason.BOUNDS, 8, Reason.BOUNDS)

    assert allowed(settings, NINE - 61) == own
    assert allowed(settings, NINE - 60) == (3, Reason.SCHEDULE, 8, Reason.BOUNDS)
    assert allowed(settings, NINE) == (3, Reason.SCHEDULE, 5, Reason.SCHEDULE)
    assert allowed(settings, NINE + 3 * 3600 - 1) == (3, Reason.SCHEDULE, 5, Reason.SCHEDULE)
    assert allowed(settings, NINE + 3 * 3600) == own


def test_of_several_the_highest_floor_and_the_lowest_cap_count_and_the_cap_wins() -> None:
    others = (structs.replace(MORNING, min_replicas=4, max_replicas=None), structs.replace(MORNING, min_replicas=1))

    assert allowed(AutoscaleConfig(max_replicas=8, schedules=(MORNING, *others)), NINE)[::2] == (4, 5)
    capped = structs.replace(MORNING, min_replicas=0, max_replicas=2)
    assert allowed(AutoscaleConfig(max_replicas=8, schedules=(MORNING, capped)), NINE)[::2] == (2, 2)


@pytest.mark.parametrize(
    ("took_s", "lead"), [((), 10.0), ((30.0, 40.0, 50.0), 50.0), ((30.0, 30.0, 30.0, 900.0), 60.0)]
)
def test_the_floor_begins_by_the_slowest_start_but_not_by_one_that_waited_a_night(
    took_s: tuple[float, ...], lead: float
) -> None:
    assert lead_s(AutoscaleConfig(start_s=10.0), took_s) == lead


def test_a_pool_is_at_its_floor_when_the_window_begins_and_goes_down_behind_it() -> None:
    settings = structs.replace(SETTINGS, start_s=4.0, schedules=(structs.replace(MORNING, max_replicas=None),))
    rig = Rig(Source([busy(0, ("r1", "r2", "r3"))]), Serve({"a": ServeState(1, ("r1",))}), settings=settings)
    rig.now = NINE - 1000.0 - 30.0  # the rig's Unix time begins at 1000

    rig.reconcile(25)
    assert rig.serve.calls == []
    rig.reconcile(5)
    (explained,) = rig.source.published[-1].explanations
    rig.reconcile(60)

    assert rig.serve.calls == [("set", "a", 3)]
    assert rig.source.published[-1].pools[0].reasons["schedule"] == 1
    assert (explained.least, explained.least_reason) == (3, "schedule")
    assert explained.windows == (ScheduledWindow(NINE, NINE + 10800.0, NINE - 4.0, 3, None),)
    rig.now += 3 * 3600.0
    rig.reconcile(30)
    assert rig.serve.calls[-1][-1] == 1


def test_a_pool_that_may_go_to_zero_has_its_floor_in_the_window_without_any_request() -> None:
    settings = structs.replace(SETTINGS, min_replicas=0, start_s=4.0, idle_s=5.0, schedules=(MORNING,), max_replicas=8)
    rig = Rig(Source([busy(0, ())]), Serve({"a": ServeState(0, ())}), settings=settings)
    rig.now = NINE - 1000.0 - 2.0

    rig.reconcile(20)

    assert rig.serve.calls == [("set", "a", 3)]
