"""Turns of sessions: what may leave when, with what history, and what is counted when it never leaves."""

from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.run.sessions import Sessions, Turn


def turn(
    number: int,
    *,
    at_s: float = 0.0,
    think_s: float = 0.0,
    turns: int = 3,
    session: str | None = "s",
    endpoint: str = "chat",
) -> Planned:
    return Planned(
        index=number,
        at_s=at_s,
        endpoint=endpoint,
        prompt=f"question {number}",
        system="be brief" if number == 0 else None,
        max_tokens=8,
        session=session,
        turn=number,
        is_last_turn=number == turns - 1,
        think_s=think_s,
    )


def answered(sessions: Sessions, planned: Planned, *, end_s: float) -> Turn | None:
    return sessions.finish_turn(planned, is_finished=True, answer=f"answer {planned.turn}", end_s=end_s)


def test_a_request_of_no_session_leaves_at_its_time() -> None:
    sessions = Sessions()
    single = turn(0, at_s=4.0, session=None)

    assert sessions.arrive(single) == Turn(single, 4.0, ())
    assert answered(sessions, single, end_s=5.0) is None


def test_a_later_turn_waits_for_the_answer_and_for_the_user_to_think() -> None:
    sessions = Sessions()
    first, second = turn(0), turn(1, think_s=2.0)
    sessions.arrive(first)

    assert sessions.arrive(second) is None
    following = answered(sessions, first, end_s=1.5)

    assert following is not None
    assert following.planned is second
    assert following.due_s == 3.5


def test_a_later_turn_never_leaves_before_its_own_time() -> None:
    sessions = Sessions()
    first, second = turn(0), turn(1, at_s=10.0, think_s=2.0)
    sessions.arrive(first)
    assert answered(sessions, first, end_s=1.5) is None

    following = sessions.arrive(second)

    assert following is not None
    assert following.due_s == 10.0


def test_the_history_is_the_system_message_and_the_real_answers() -> None:
    sessions = Sessions()
    turns = [turn(number) for number in range(3)]
    for planned in turns:
        sessions.arrive(planned)

    answered(sessions, turns[0], end_s=1.0)
    last = answered(sessions, turns[1], end_s=2.0)

    assert last is not None
    assert last.history == (
        Message("system", "be brief"),
        Message("user", "question 0"),
        Message("assistant", "answer 0"),
        Message("user", "question 1"),
        Message("assistant", "answer 1"),
    )


def test_turns_of_completions_have_no_history_but_an_order() -> None:
    sessions = Sessions()
    first, second = turn(0, endpoint="completions"), turn(1, endpoint="completions")
    sessions.arrive(first)
    assert sessions.arrive(second) is None

    following = answered(sessions, first, end_s=1.0)

    assert following is not None
    assert following.history == ()


def test_one_turn_of_a_session_is_under_way_at_a_time() -> None:
    sessions = Sessions()
    turns = [turn(number) for number in range(3)]
    sessions.arrive(turns[0])
    answered(sessions, turns[0], end_s=1.0)

    assert sessions.arrive(turns[1]) is not None
    assert sessions.arrive(turns[2]) is None
    assert sessions.parked == 1


def test_a_turn_that_does_not_finish_ends_its_session_and_the_later_ones_are_counted() -> None:
    sessions = Sessions()
    first, second, third = (turn(number) for number in range(3))
    sessions.arrive(first)
    sessions.arrive(second)

    assert sessions.finish_turn(first, is_finished=False, answer="", end_s=1.0) is None
    assert sessions.arrive(third) is None
    assert sessions.not_sent == 2
    assert sessions.parked == 0


def test_a_dropped_turn_counts_with_those_behind_it() -> None:
    sessions = Sessions()
    turns = [turn(number) for number in range(3)]
    for planned in turns:
        sessions.arrive(planned)
    following = answered(sessions, turns[0], end_s=1.0)
    assert following is not None

    sessions.drop(following.planned)

    assert sessions.not_sent == 2
    assert sessions.parked == 0


def test_what_still_waits_at_the_end_is_counted() -> None:
    sessions = Sessions()
    for number in range(3):
        sessions.arrive(turn(number))

    sessions.abandon(waiting=1)

    assert sessions.not_sent == 3


def test_a_session_that_a_trace_is_cut_into_begins_with_the_turn_it_has() -> None:
    sessions = Sessions()
    third = turn(2, at_s=7.0)

    assert sessions.arrive(third) == Turn(third, 7.0, ())


def test_nothing_is_kept_of_sessions_that_are_over() -> None:
    sessions = Sessions()
    for number in range(50):
        first, second = turn(0, turns=2, session=f"{number}"), turn(1, turns=2, session=f"{number}")
        sessions.arrive(first)
        sessions.arrive(second)
        if number % 2:
            sessions.finish_turn(first, is_finished=False, answer="", end_s=1.0)
        else:
            answered(sessions, first, end_s=1.0)
            answered(sessions, second, end_s=2.0)

    assert not sessions._sessions
