import pytest

from penstock.autoscale.observation import ServeState
from penstock.autoscale.starts import KEEP, Starts, expected_start_s, note_starts


def note(starts: Starts, target: int, running: str, now: float) -> Starts:
    return note_starts(starts, ServeState(target, tuple(running), target - len(running)), now)


def test_a_start_takes_from_the_look_that_asked_to_the_look_that_finds_it() -> None:
    starts = note(Starts(), 1, "a", 0.0)
    starts = note(starts, 3, "a", 10.0)
    starts = note(starts, 4, "ab", 40.0)
    starts = note(starts, 4, "abcd", 90.0)

    assert starts.took_s == (30.0, 50.0), "of the two that were asked for together the first one counts"
    assert starts.pending == ()


def test_what_was_long_in_changing_is_late_by_its_decision_but_its_start_counts_from_the_change() -> None:
    starts = note(note(Starts(), 1, "a", 0.0), 1, "a", 1.0)
    starts = note(starts, 2, "a", 19.0)

    assert [starts.num_late(20.0, now) for now in (25.0, 27.0)] == [0, 1]
    assert note(starts, 2, "ab", 40.0).took_s == (21.0,)


def test_a_shortage_is_one_start_however_many_waited_for_it() -> None:
    starts = note(note(Starts(), 1, "a", 0.0), 4, "a", 10.0)
    starts = note(note(starts, 4, "abc", 3600.0), 4, "abcd", 3601.0)

    assert starts.took_s == (3590.0,)
    assert expected_start_s(starts.took_s, 60.0) == 60.0


def test_what_started_before_the_first_look_is_not_taken_for_what_was_asked_for_since() -> None:
    starts = note(Starts(), 4, "a", 0.0)
    starts = note(starts, 6, "a", 10.0)
    starts = note(starts, 6, "abcd", 12.0)
    starts = note(starts, 6, "abcdef", 70.0)

    assert starts.took_s == (60.0,)


def test_what_is_given_up_before_it_ran_is_no_start() -> None:
    starts = note(note(Starts(), 1, "a", 0.0), 4, "a", 10.0)
    starts = note(starts, 1, "a", 20.0)
    starts = note(starts, 2, "a", 500.0)

    assert note(starts, 2, "ab", 530.0).took_s == (30.0,)


def test_what_runs_or_starts_already_at_the_first_look_is_no_start() -> None:
    starts = note(Starts(), 3, "a", 0.0)

    assert note(starts, 3, "abc", 5.0).took_s == ()


def test_a_replica_in_place_of_a_dead_one_is_no_start() -> None:
    starts = note(Starts(), 2, "ab", 0.0)
    starts = note(starts, 2, "a", 5.0)

    assert note(starts, 2, "ac", 9.0).took_s == ()


@pytest.mark.parametrize(
    ("took_s", "expected"),
    [((), 60.0), ((20.0,), 60.0), ((20.0, 22.0, 24.0), 24.0), ((20.0, 21.0, 22.0, 23.0, 7200.0), 23.0)],
)
def test_the_first_guess_is_worth_two_starts_and_the_median_counts(took_s: tuple[float, ...], expected: float) -> None:
    assert expected_start_s(took_s, 60.0) == expected


def test_a_night_without_a_node_changes_little() -> None:
    assert expected_start_s((20.0,) * 10 + (30_000.0,) * 3, 60.0) == 20.0


def test_only_the_last_starts_count() -> None:
    starts = note(Starts(took_s=(5.0,) * KEEP), 1, "a", 0.0)
    starts = note(note(starts, 2, "a", 1.0), 2, "ab", 91.0)

    assert len(starts.took_s) == KEEP
    assert starts.took_s[-1] == 90.0


def test_a_replica_is_late_a_quarter_after_the_start_or_once_after_the_first_look_that_found_it_starting() -> None:
    starts = note(Starts(), 3, "a", 100.0)
    starts = note(starts, 4, "a", 105.0)

    assert [starts.num_late(20.0, now) for now in (119.0, 121.0, 124.0, 126.0)] == [0, 2, 2, 3]
