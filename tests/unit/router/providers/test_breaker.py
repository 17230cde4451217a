from hypothesis import given
from hypothesis import strategies as st

from penstock.router.providers.breaker import MAX_OPEN_S, MAX_RETRY_AFTER_S, Breaker, BreakerState


def failing(breaker: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.fail(now, breaker.begin())


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, open_s=5.0)
    failing(breaker, now, times=3)
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    failing(breaker, 0.0, times=2)
    breaker.succeed(breaker.begin())
    failing(breaker, 0.0, times=2)
    was_closed = breaker.allows(0.0)
    failing(breaker, 0.0)

    assert was_closed
    assert not breaker.allows(0.0)
    assert breaker.open_for_s(1.0) == 4.0


def test_answers_that_begin_and_then_fail_are_failures_in_a_row() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    for _ in range(3):
        term = breaker.answer(breaker.begin())
        breaker.fail(0.0, term)

    assert breaker.state(0.0) is BreakerState.OPEN


def test_after_the_pause_one_trial_goes_through_and_closes_it_or_not() -> None:
    breaker = opened()
    assert not breaker.allows(4.9)
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    trial = breaker.begin()
    assert not breaker.allows(5.0)

    breaker.succeed(trial)

    assert breaker.state(6.0) is BreakerState.CLOSED


def test_a_trial_lets_the_others_through_with_its_first_answer_and_opens_it_again_if_it_fails_yet() -> None:
    breaker = opened()
    trial = breaker.answer(breaker.begin())
    was_closed = breaker.allows(5.0)
    breaker.fail(6.0, trial)

    assert was_closed
    assert breaker.open_for_s(6.0) == 10.0


def test_each_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(6):
        now += breaker.open_for_s(now)
        failing(breaker, now)
        pauses.append(breaker.open_for_s(now))

    assert pauses == [10.0, 20.0, 40.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]


def test_a_success_resets_the_pause() -> None:
    breaker = opened()
    failing(breaker, 5.0)
    breaker.succeed(breaker.begin())
    failing(breaker, 20.0, times=3)

    assert breaker.open_for_s(20.0) == 5.0


def test_what_began_before_it_opened_says_nothing_of_the_trial() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    slow = [breaker.begin() for _ in range(3)]
    failing(breaker, 0.0)
    trial = breaker.begin()
    breaker.fail(5.0, slow[0])
    breaker.succeed(slow[1])
    breaker.forget(slow[2])

    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert not breaker.allows(5.0), "the trial is still under way"
    breaker.succeed(trial)
    assert breaker.state(5.0) is BreakerState.CLOSED


def test_what_began_before_it_closed_again_does_not_open_it() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    slow = breaker.begin()
    failing(breaker, 0.0)
    breaker.succeed(breaker.begin())
    breaker.fail(6.0, slow)

    assert breaker.state(6.0) is BreakerState.CLOSED


def test_a_pause_that_was_asked_for_is_kept_whatever_else_ends_meanwhile() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    others = [breaker.begin() for _ in range(2)]
    breaker.pause(0.0, 30.0)
    breaker.succeed(others[0])
    breaker.fail(2.0, others[1])
    breaker.pause(3.0, 1.0)

    assert not breaker.allows(29.9)
    assert breaker.allows(30.0)
    failing(breaker, 30.0)
    assert not breaker.allows(30.0), "a failed trial is enough, however few failed before"


def test_a_pause_that_is_asked_for_is_bounded() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    breaker.pause(0.0, 1e9)

    assert breaker.open_for_s(0.0) == MAX_RETRY_AFTER_S


def test_a_trial_that_ended_for_our_own_reasons_makes_room_for_another() -> None:
    breaker = opened()
    trial = breaker.begin()
    breaker.forget(trial)

    assert breaker.allows(5.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "answer", "succeed", "fail", "forget", "pause"]),
            st.integers(0, 9),
            st.floats(0, 30),
        ),
        max_size=60,
    )
)
def test_while_it_is_open_nothing_passes_and_half_open_one_at_most_however_long_they_take(
    steps: list[tuple[str, int, float]],
) -> None:
    breaker, now = Breaker(failures=2, open_s=5.0), 0.0
    under_way: list[int] = []
    for step, which, seconds in steps:
        now += seconds
        if step == "begin" and breaker.allows(now):
            assert breaker.state(now) is not BreakerState.OPEN
            under_way.append(breaker.begin())
        elif step == "answer" and under_way:
            under_way.append(breaker.answer(under_way.pop(which % len(under_way))))
        elif step != "begin" and under_way:
            term = under_way.pop(which % len(under_way))
            if step == "succeed":
                breaker.succeed(term)
            elif step == "fail":
                breaker.fail(now, term)
            elif step == "pause":
                breaker.pause(now, seconds)
            else:
                breaker.forget(term)
        if breaker.state(now) is BreakerState.HALF_OPEN and not breaker.allows(now):
            assert under_way, "whose trial is it?"
