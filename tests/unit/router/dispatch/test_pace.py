from penstock.router.dispatch.pace import MIN_SAMPLES, Pace


def test_before_any_placement_there_is_no_pace() -> None:
    assert Pace().latest_s(5.0) is None
    assert Pace().busy_s(5.0) is None


def test_the_time_until_the_first_placement_is_none_of_the_pace() -> None:
    pace = Pace()
    pace.begin_busy()
    for number in range(MIN_SAMPLES):
        pace.count(300.0 + number)

    assert pace.busy_s(300.0 + MIN_SAMPLES) == 1.0


def test_a_pause_does_not_slow_the_pace_of_a_busy_time() -> None:
    pace = Pace()
    for number in range(MIN_SAMPLES):
        pace.count(float(number))
    pace.begin_busy()
    for number in range(MIN_SAMPLES):
        assert pace.busy_s(1000.0 + number) is None
        pace.count(1000.0 + number)

    assert pace.busy_s(1000.0 + MIN_SAMPLES) == 1.0
    latest_s = pace.latest_s(1000.0 + MIN_SAMPLES)
    assert latest_s is not None
    assert latest_s > 30.0
