import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.capacity import Bounds, Shape, capacity_rps, rows_at, work_s
from penstock.perf.model import step_time_s
from penstock.wire.frames import Stairs, StepCosts

COSTS = StepCosts(
    base_s=0.02, row_s=0.0003, prefill_token_s=0.00015, attention_s=1e-8, kv_token_s=4e-7, sampled_row_s=0.0005
)
SHAPE = Shape(prefill_tokens=120.0, cached_tokens=64.0, output_tokens=64.0)
WIDE = Bounds(max_rows=1e9, kv_tokens=1e12, tpot_s=1e9)

tokens = st.floats(0.0, 4000.0)
coefficients = st.floats(0.0, 0.01)
costs = st.builds(
    StepCosts,
    base_s=coefficients,
    row_s=coefficients,
    prefill_token_s=coefficients,
    kv_token_s=st.floats(0.0, 1e-5),
    knee_s=st.floats(0.0001, 0.05),
    sampled_row_s=coefficients,
    stairs=st.none()
    | st.builds(
        Stairs,
        st.just(256),
        st.just(0),
        coefficients,
        st.lists(st.tuples(st.integers(1, 300), coefficients), max_size=8).map(lambda cliffs: tuple(sorted(cliffs))),
    ),
)
shapes = st.builds(
    Shape,
    prefill_tokens=tokens,
    cached_tokens=tokens,
    output_tokens=st.floats(1.0, 2000.0),
    sampled_share=st.floats(0.0, 1.0),
)
bounds = st.builds(Bounds, max_rows=st.floats(1.0, 512.0), kv_tokens=st.floats(1.0, 1e6), tpot_s=st.floats(0.001, 1.0))


def test_a_pool_bound_by_rows_takes_what_fills_them() -> None:
    rate = capacity_rps(COSTS, SHAPE, WIDE._replace(max_rows=16))

    assert rows_at(COSTS, SHAPE, rate) == pytest.approx(16)
    assert capacity_rps(COSTS, SHAPE, WIDE._replace(kv_tokens=16 * SHAPE.context_tokens)) == pytest.approx(rate), (
        "a cache for 16 is a bound of 16"
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_at_capacity_by_time_per_token_a_step_takes_that_long(share: float) -> None:
    shape = SHAPE._replace(sampled_share=share)
    rate = capacity_rps(COSTS, shape, WIDE._replace(tpot_s=0.05))
    rows = rows_at(COSTS, shape, rate)
    arriving = rate * 0.05

    step_s = step_time_s(
        COSTS,
        rows=round(rows),
        prefill_tokens=round(arriving * SHAPE.prefill_tokens),
        query_context=arriving * SHAPE.prefill_tokens * (SHAPE.cached_tokens + SHAPE.prefill_tokens / 2),
        kv_tokens=round(rows * SHAPE.context_tokens),
        sampled_rows=round(share * rows),
    )
    assert step_s == pytest.approx(0.05, rel=0.02)


def test_a_target_below_a_single_rows_step_leaves_one_row_at_a_time() -> None:
    rate = capacity_rps(COSTS, SHAPE, WIDE._replace(tpot_s=0.001))

    assert rate == pytest.approx(1 / (SHAPE.output_tokens * COSTS.base_s + work_s(COSTS, SHAPE)))


def test_without_bounds_a_replica_is_full_when_token_work_fills_its_time() -> None:
    assert capacity_rps(COSTS, SHAPE, WIDE) == pytest.approx(1 / work_s(COSTS, SHAPE), rel=1e-3)


def test_rows_that_would_pass_a_high_cliff_are_better_not_had() -> None:
    bounds = WIDE._replace(max_rows=20)
    below = capacity_rps(COSTS, SHAPE, WIDE._replace(max_rows=16))
    low, high = (msgspec.structs.replace(COSTS, stairs=Stairs(64, 0, 0.0, ((16, s),))) for s in (0.0001, 0.1))

    assert capacity_rps(high, SHAPE, bounds) == pytest.approx(below)
    assert below < capacity_rps(low, SHAPE, bounds) < capacity_rps(COSTS, SHAPE, bounds)
    assert rows_at(high, SHAPE, below) == pytest.approx(16)
    assert rows_at(low, SHAPE, below * 1.1) > 16


def test_steps_that_are_not_recorded_lower_the_capacity() -> None:
    costs = StepCosts(knee_s=0.003, stairs=Stairs(64, 0, 0.009))

    # 8 requests of 64 steps: one of eight steps begins one of them
    rate = capacity_rps(costs, SHAPE, WIDE._replace(max_rows=8))
    assert rate == pytest.approx(8 / (64 * 0.003 + 8 * 0.006))


def test_costs_that_say_nothing_bound_nothing() -> None:
    assert math.isinf(capacity_rps(StepCosts(), SHAPE, WIDE))


@given(costs, shapes, bounds, st.floats(0.0, 500.0), st.integers(0, 3))
def test_a_longer_request_never_raises_the_capacity(
    costs: StepCosts, shape: Shape, bounds: Bounds, more: float, part: int
) -> None:
    longer = Shape(*(value + more * (place == part) for place, value in enumerate(shape)))

    assert 0 < capacity_rps(costs, longer, bounds) <= capacity_rps(costs, shape, bounds) * (1 + 1e-9)
