import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import Work, step_time_s
from penstock.perf.share import predict_share_s
from penstock.wire.frames import StepCosts
from tests.unit.perf.test_model import all_costs, all_work

COSTS = StepCosts(base_s=0.01, row_s=0.001, prefill_token_s=0.0001, attention_s=1e-8, kv_token_s=1e-6, knee_s=0.012)
PROMPT, OUTPUT, BUDGET = 300, 101, 512


def decode_s(work: Work, context: float) -> float:
    """Share of one step that decodes: what an answer of one token more costs."""
    longer, shorter = (predict_share_s(COSTS, work, int(context), 0, output, BUDGET) for output in (2.0, 1.0))
    return longer - shorter


def test_alone_it_pays_for_every_step() -> None:
    context = PROMPT + OUTPUT // 2
    prefill_s = step_time_s(COSTS, rows=1, prefill_tokens=PROMPT, query_context=PROMPT * PROMPT / 2, kv_tokens=0)
    step_s = step_time_s(COSTS, rows=1, prefill_tokens=0, query_context=0, kv_tokens=context)

    share_s = predict_share_s(COSTS, Work(), PROMPT, 0, OUTPUT, BUDGET)

    assert share_s == pytest.approx(prefill_s + (OUTPUT - 1) * step_s, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_rows_that_are_alike_divide_a_steps_whole_time(rows: int) -> None:
    context = 200
    others = Work(num_running=rows - 1, kv_tokens=(rows - 1) * (context + 1))
    step_s = step_time_s(COSTS, rows=rows, prefill_tokens=0, query_context=0, kv_tokens=rows * (context + 1))

    assert rows * decode_s(others, context) == pytest.approx(step_s, rel=0.01)


def test_a_prompt_in_pieces_pays_a_row_and_its_part_of_the_base_in_each() -> None:
    beside = Work(num_running=3, kv_tokens=300)
    whole_s, pieces_s = (predict_share_s(COSTS, beside, PROMPT, 0, 1.0, budget) for budget in (512, 103))

    assert pieces_s - whole_s == pytest.approx(2 * (COSTS.row_s + COSTS.base_s / 4), rel=1e-6)


def test_what_is_cached_is_not_paid_for_and_what_waits_before_it_neither() -> None:
    cold_s, warm_s = (predict_share_s(COSTS, Work(), PROMPT - cached, cached, 1.0, BUDGET) for cached in (0, 256))
    behind_s = predict_share_s(COSTS, Work(num_waiting=1, prefill_tokens=5000), PROMPT, 0, 1.0, BUDGET)

    assert cold_s - warm_s == pytest.approx(256 * COSTS.prefill_token_s, rel=0.05)
    assert behind_s == pytest.approx(cold_s)


@given(all_costs, all_work, st.integers(0, 4000), st.integers(0, 4000), st.floats(1, 2000), st.integers(1, 4096))
def test_a_share_is_finite_and_falls_for_no_longer_answer(
    costs: StepCosts, work: Work, uncached: int, cached: int, output: float, budget: int
) -> None:
    share_s = predict_share_s(costs, work, uncached, cached, output, budget)

    assert math.isfinite(share_s)
    assert share_s >= -1e-9
    assert predict_share_s(costs, work, uncached, cached, output + 50, budget) >= share_s - 1e-9
