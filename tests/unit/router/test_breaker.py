from hypothesis import given
from hypothesis import strategies as st

from penstock.router.breaker import MAX_OPEN_S, MAX_RETRY_AFTER_S, Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, open_s=5.0)
    for _ in range(3):
        breaker.begin(now)
        breaker.fail(now)
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    for _ in range(2):
        breaker.fail(0.0)
    breaker.succeed(0.0)
    for _ in range(2):
        breaker.fail(0.0)
    was_closed = breaker.allows(0.0)
    breaker.fail(0.0)

    assert was_closed
    assert not breaker.allows(0.0)
    assert breaker.open_for_s(1.0) == 4.0


def test_after_the_pause_one_trial_goes_through_and_closes_it_or_not() -> None:
    breaker = opened()
    assert not breaker.allows(4.9)
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert breaker.begin(5.0)
    assert not breaker.allows(5.0)

    breaker.succeed(6.0)

    assert breaker.state(6.0) is BreakerState.CLOSED


def test_each_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(6):
        now += breaker.open_for_s(now)
        breaker.begin(now)
        breaker.fail(now)
        pauses.append(breaker.open_for_s(now))

    assert pauses == [10.0, 20.0, 40.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]


def test_a_success_resets_the_pause() -> None:
    breaker = opened()
    breaker.begin(5.0)
    breaker.fail(5.0)
    breaker.begin(15.0)
    breaker.succeed(15.0)
    for _ in range(3):
        breaker.fail(20.0)

    assert breaker.open_for_s(20.0) == 5.0


def test_a_pause_that_was_asked_for_is_kept_whatever_else_ends_meanwhile() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    breaker.pause(0.0, 30.0)
    breaker.succeed(1.0)
    breaker.fail(2.0)
    breaker.pause(3.0, 1.0)

    assert not breaker.allows(29.9)
    assert breaker.allows(30.0)


def test_a_pause_that_is_asked_for_is_bounded() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    breaker.pause(0.0, 1e9)

    assert breaker.open_for_s(0.0) == MAX_RETRY_AFTER_S


def test_a_trial_that_ended_for_our_own_reasons_makes_room_for_another() -> None:
    breaker = opened()
    is_trial = breaker.begin(5.0)
    breaker.forget(is_trial=False)  # one from before it opened
    is_still_taken = not breaker.allows(5.0)
    breaker.forget(is_trial)

    assert is_still_taken
    assert breaker.allows(5.0)


@given(st.lists(st.tuples(st.sampled_from(["begin", "succeed", "fail", "forget"]), st.floats(0, 30)), max_size=60))
def test_while_it_is_open_nothing_passes_and_half_open_one_at_most(steps: list[tuple[str, float]]) -> None:
    breaker, now, trials = Breaker(failures=2, open_s=5.0), 0.0, 0
    for step, seconds in steps:
        now += seconds
        state = breaker.state(now)
        if step == "begin" and breaker.allows(now):
            assert state is not BreakerState.OPEN
            trials += breaker.begin(now)
        elif step == "succeed":
            breaker.succeed(now)
            trials = 0 if state is not BreakerState.OPEN else trials
        elif step == "fail":
            breaker.fail(now)
            trials = 0 if state is BreakerState.HALF_OPEN else trials
        elif step == "forget":
            breaker.forget(is_trial=trials > 0)
            trials = 0
        assert trials <= 1
