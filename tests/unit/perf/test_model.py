import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import (
    Work,
    mean_costs,
    predict_prefill_s,
    predict_tpot_s,
    predict_ttft_s,
    scale_costs,
    step_time_s,
)
from penstock.wire.frames import Stairs, StepCosts

COSTS = StepCosts(
    base_s=0.01,
    row_s=0.001,
    prefill_token_s=0.0001,
    attention_s=1e-8,
    kv_token_s=1e-6,
    draft_token_s=0.0005,
    knee_s=0.012,
    sampled_row_s=0.0003,
)
PARTS = ("rows", "prefill_tokens", "query_context", "kv_tokens", "draft_tokens", "draft_rounds", "sampled_rows")
coefficient = st.floats(0, 0.01)
all_stairs = st.builds(
    Stairs,
    st.integers(0, 64),
    st.integers(0, 600),
    coefficient,
    st.lists(st.tuples(st.integers(1, 600), coefficient), max_size=8).map(tuple),
)
all_costs = st.builds(StepCosts, *[coefficient] * 9, stairs=st.none() | all_stairs)
all_work = st.builds(
    Work, st.integers(0, 64), st.integers(0, 64), st.integers(0, 20_000), st.integers(0, 100_000), st.integers(0, 64)
)


def test_a_step_costs_the_sum_of_its_parts():
    seconds = step_time_s(COSTS, rows=8, prefill_tokens=100, query_context=5000, kv_tokens=2000, draft_tokens=4)

    assert seconds == pytest.approx(0.01 + 0.008 + 0.01 + 0.00005 + 0.002 + 0.002)


def test_a_row_that_is_sampled_makes_the_step_and_every_prediction_longer():
    plain, sampled = Work(8, 1, 300, 2000), Work(8, 1, 300, 2000, num_sampled=8)

    assert step_time_s(
        COSTS, rows=8, prefill_tokens=0, query_context=0, kv_tokens=2000, sampled_rows=8
    ) == pytest.approx(0.01 + 0.008 + 0.002 + 0.0024)
    assert predict_tpot_s(COSTS, sampled) - predict_tpot_s(COSTS, plain) == pytest.approx(0.0024)
    assert predict_ttft_s(COSTS, sampled, 100, 0, 512) - predict_ttft_s(COSTS, plain, 100, 0, 512) == pytest.approx(
        1.5 * 0.0024
    )


def test_a_step_below_the_knee_takes_the_knee():
    assert step_time_s(COSTS, rows=1, prefill_tokens=0, query_context=0, kv_tokens=0) == 0.012


def test_an_idle_replica_answers_after_one_step_when_the_prompt_fits_into_it():
    expected = step_time_s(COSTS, rows=1, prefill_tokens=300, query_context=300 * 150, kv_tokens=0)

    assert predict_ttft_s(COSTS, Work(), 300, 0, 512) == pytest.approx(expected)


def test_running_rows_take_their_share_of_the_token_budget():
    costs = StepCosts(base_s=1.0)

    steps = [predict_prefill_s(costs, Work(num_running=rows), 100, 0, 64) for rows in (0, 14, 54)]

    assert steps == [2.0, 2.0, 10.0]


def test_prefill_that_is_outstanding_comes_first():
    costs = StepCosts(prefill_token_s=0.001)

    assert predict_ttft_s(costs, Work(num_waiting=1, prefill_tokens=1000), 100, 0, 2000) == pytest.approx(1.1 + 0.5)


def test_cached_tokens_cost_attention_only():
    costs = StepCosts(attention_s=1.0)

    assert predict_prefill_s(costs, Work(), 10, 90, 512) == pytest.approx(10 * (90 + 5))


def test_a_fully_cached_prompt_still_takes_a_step():
    assert predict_ttft_s(COSTS, Work(), 0, 512, 512) > 0


def test_waiting_sequences_slow_a_token_as_rows_do():
    assert predict_tpot_s(COSTS, Work(num_waiting=20)) == predict_tpot_s(COSTS, Work(num_running=20))


@given(all_costs, all_work, st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 2048), st.integers(0, 2000))
def test_more_work_never_brings_the_first_token_earlier(costs, work, uncached, cached, budget, extra):
    before = predict_ttft_s(costs, work, uncached, cached, budget)

    assert math.isfinite(before)
    assert before >= 0
    slack = 1 + 1e-9
    assert predict_ttft_s(costs, work, uncached + extra, cached, budget) * slack >= before
    assert (
        predict_ttft_s(costs, work._replace(kv_tokens=work.kv_tokens + extra), uncached, cached, budget) * slack
        >= before
    )


@given(
    all_costs,
    st.tuples(st.integers(1, 600), *[st.integers(0, 1000)] * 6),
    st.integers(0, 6),
    st.integers(1, 1000),
)
def test_a_step_with_more_work_never_takes_less_time(costs, shape, part, extra):
    more = [value + extra * (place == part) for place, value in enumerate(shape)]

    before = step_time_s(costs, **dict(zip(PARTS, shape, strict=True)))
    assert 0 <= before <= step_time_s(costs, **dict(zip(PARTS, more, strict=True))) * (1 + 1e-12) < math.inf


RECORDED = msgspec.structs.replace(COSTS, stairs=Stairs(64, 256, 0.05, ((1, 0.001), (8, 0.002), (64, 0.004))))


def test_a_decode_step_takes_what_its_recording_takes():
    def seconds(rows):
        return step_time_s(RECORDED, rows=rows, prefill_tokens=0, query_context=0, kv_tokens=100_000)

    plain = {
        rows: step_time_s(COSTS, rows=rows, prefill_tokens=0, query_context=0, kv_tokens=100_000) for rows in (1, 8, 9)
    }
    assert seconds(1) == plain[1]
    assert seconds(8) == pytest.approx(plain[8] + 0.001)
    assert seconds(9) == pytest.approx(plain[9] + 0.003)


def test_a_step_that_is_not_recorded_takes_as_long_as_its_launches():
    def seconds(rows, prefill_tokens=0, draft_tokens=0):
        return step_time_s(
            RECORDED,
            rows=rows,
            prefill_tokens=prefill_tokens,
            query_context=0,
            kv_tokens=0,
            draft_tokens=draft_tokens,
        )

    assert seconds(4, 253) < 0.05  # 256 tokens: the prompt is one of the four
    assert seconds(4, 254) == 0.05
    assert seconds(8, draft_tokens=16) < 0.05
    assert seconds(2, draft_tokens=2, prefill_tokens=254) == 0.05
    assert seconds(64) < seconds(65) == 0.01 + 0.065 + 0.007


def test_the_mean_of_costs_has_the_cliffs_of_all():
    other = msgspec.structs.replace(COSTS, stairs=Stairs(64, 128, 0.03, ((8, 0.004), (16, 0.002))))
    before = COSTS  # of an earlier version

    mean = mean_costs([RECORDED, other, before]).stairs

    assert mean.cliffs == ((1, 0.0005), (8, 0.003), (16, 0.001), (64, 0.002))
    assert (mean.recorded_rows, mean.recorded_tokens, mean.eager_knee_s) == (64, 256, pytest.approx(0.04))
    assert mean_costs([COSTS, COSTS]).stairs is None


@given(all_costs, all_work, st.integers(0, 5000))
def test_a_slower_replica_is_never_predicted_faster(costs, work, context):
    slower = scale_costs(costs, 2.0)

    assert predict_tpot_s(slower, work, context) >= predict_tpot_s(costs, work, context)
