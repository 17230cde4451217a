from random import Random

import pytest

from penstock.perf.model import Work, predict_row_wait_s
from penstock.perf.turnover import RowTurnover

ROWS = 8


def play(hold_s: tuple[float, ...], num_rows: int, until_s: float, rng: Random) -> RowTurnover:
    """A replica whose rows are always taken, each for one of `hold_s`, and that reports every 40 ms."""
    turnover, ends, now = RowTurnover(), [rng.choice(hold_s) * rng.random() for _ in range(num_rows)], 0.0
    while now < until_s:
        over = [place for place, end_s in enumerate(ends) if end_s <= now]
        for place in over:
            ends[place] = now + rng.choice(hold_s)
        turnover.note(now, num_rows, len(over))
        now += 0.04
    return turnover


def test_nothing_is_told_before_a_sequence_has_ended():
    turnover = RowTurnover()
    turnover.note(0.0, 3, 0)
    turnover.note(5.0, 3, 0)
    assert turnover.row_hold_s == 0.0


@pytest.mark.parametrize("hold_s", [(1.0,), (0.2, 5.0), (3.0, 4.0, 20.0)])
def test_it_is_the_mean_time_of_those_that_ended(hold_s):
    turnover = play(hold_s, ROWS, 300.0, Random(3))
    assert turnover.row_hold_s == pytest.approx(sum(hold_s) / len(hold_s), rel=0.3)


def test_what_was_long_ago_is_forgotten():
    turnover = play((10.0,), ROWS, 100.0, Random(5))
    now, ended = 200.0, 0
    turnover.note(now, 0, 0)
    turnover.note(now + 1000.0, 1, 0)  # nothing ran meanwhile
    while ended < 400:
        now += 1.0
        ended += 1
        turnover.note(1000.0 + now, 1, 1)
    assert turnover.row_hold_s == pytest.approx(1.0, rel=0.1)


def test_a_clock_that_goes_back_takes_nothing_away():
    turnover = RowTurnover()
    turnover.note(10.0, 1, 0)
    turnover.note(9.0, 1, 0)
    turnover.note(11.0, 0, 1)
    assert turnover.row_hold_s == pytest.approx(2.0)


@pytest.mark.parametrize("num_waiting", [0, 1, 4])
def test_the_wait_for_a_row_is_what_a_queue_before_full_rows_takes(num_waiting):
    rng, waits = Random(11), []
    for _ in range(400):  # rows are at random points of an exponential time of 2 s
        ends = sorted(rng.expovariate(0.5) for _ in range(ROWS))
        queue = num_waiting
        while queue:  # the next in line takes the row that is free first
            free_s = ends.pop(0)
            ends = sorted([*ends, free_s + rng.expovariate(0.5)])
            queue -= 1
        waits.append(ends[0])
    predicted_s = predict_row_wait_s(Work(num_running=ROWS, num_waiting=num_waiting), ROWS, 2.0)
    assert predicted_s == pytest.approx(sum(waits) / len(waits), rel=0.15)


@pytest.mark.parametrize(
    ("work", "max_running", "hold_s"),
    [(Work(num_running=ROWS - 1), ROWS, 2.0), (Work(num_running=ROWS), 0, 2.0), (Work(num_running=ROWS), ROWS, 0.0)],
)
def test_where_a_row_is_free_or_nothing_is_known_no_wait_is_predicted(work, max_running, hold_s):
    assert predict_row_wait_s(work, max_running, hold_s) == 0.0
