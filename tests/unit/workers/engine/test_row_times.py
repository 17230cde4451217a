"""What a step takes by how many tokens it decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import scale_costs
from penstock.wire.frames import StepCosts
from penstock.workers.engine.row_times import RowTimes

COSTS = StepCosts(base_s=0.0034, row_s=0.0003)
TIMES = RowTimes(COSTS, ((1, 0.0038), (4, 0.0047), (8, 0.0055), (9, 0.0066), (16, 0.0097)))


def test_what_was_measured_is_what_a_step_takes_and_between_and_beyond_are_lines() -> None:
    assert [TIMES.step_s(count) for count in (1, 4, 8, 9, 16)] == [seconds for _, seconds in TIMES.steps]
    assert TIMES.step_s(6) == pytest.approx(0.0051)
    assert TIMES.step_s(23) == pytest.approx(0.0097 + 0.0031)


def test_a_row_more_costs_what_it_does_there() -> None:
    assert TIMES.more_s(COSTS, 4, 4) == pytest.approx(0.0008)
    assert TIMES.more_s(COSTS, 8, 1) == pytest.approx(0.0011), "the ninth meets the weights once more"
    assert TIMES.more_s(COSTS, 8, 0) == 0.0


def test_rows_beyond_what_was_measured_are_never_free() -> None:
    flat = RowTimes(COSTS, ((1, 0.01), (8, 0.01)))

    assert flat.step_s(64) == pytest.approx(0.01 + 56 * COSTS.row_s)


def test_it_follows_how_long_steps_take_by_now() -> None:
    slower = scale_costs(COSTS, 1.5)

    assert TIMES.more_s(slower, 8, 1) == pytest.approx(0.00165)
    assert TIMES.scale(StepCosts()) == 1.0, "costs are not known"


@given(st.integers(1, 40), st.floats(0.5, 2.0))
def test_the_line_and_what_corrects_it_are_what_was_measured(count: int, factor: float) -> None:
    costs = scale_costs(COSTS, factor)
    line_s = costs.base_s + count * costs.row_s

    assert line_s + TIMES.correction_s(costs, count) == pytest.approx(factor * TIMES.step_s(count))
    assert TIMES.correction_s(costs, 0) == 0.0
