import itertools
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.fit import StepSample, adapt, fit, predict_sample_s
from penstock.wire.frames import StepCosts

TRUE = StepCosts(
    base_s=0.005,
    row_s=0.0005,
    prefill_token_s=0.0004,
    attention_s=2e-8,
    kv_token_s=2e-6,
    draft_token_s=0.0003,
    draft_round_s=0.004,
    sampled_row_s=0.0007,
)
GRID = [
    StepSample(rows, prefill, prefill * (context + prefill / 2), rows * context, rows * drafts, 1.0, drafts, sampled)
    for rows, prefill, context, drafts in itertools.product((1, 4, 16), (0, 64, 512), (128, 2048), (0, 4))
    for sampled in (0, rows)
]


def coefficients(costs: StepCosts) -> list[float]:
    return list(msgspec.structs.astuple(costs)[:9])


def measured(costs: StepCosts, noise: float = 0.0) -> list[StepSample]:
    random = Random(7)
    return [
        sample._replace(seconds=predict_sample_s(costs, sample) * random.lognormvariate(0, noise)) for sample in GRID
    ]


def test_a_fit_recovers_the_coefficients_that_made_the_steps():
    found = fit(measured(TRUE))

    assert coefficients(found) == pytest.approx(coefficients(TRUE), rel=1e-6, abs=1e-12)
    assert found.stairs is None


def test_a_fit_recovers_a_knee():
    costs = msgspec.structs.replace(TRUE, knee_s=0.02)

    found = fit(measured(costs))

    assert found.knee_s == pytest.approx(0.02)
    assert found.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=1e-3)


def test_a_noisy_fit_predicts_within_the_noise():
    found = fit(measured(TRUE, noise=0.03))

    assert [predict_sample_s(found, sample) for sample in GRID] == pytest.approx(
        [predict_sample_s(TRUE, sample) for sample in GRID], rel=0.06
    )


def test_steps_without_drafts_leave_the_cost_of_drafts_at_zero():
    found = fit([sample for sample in measured(TRUE) if not sample.draft_tokens])

    assert (found.draft_token_s, found.draft_round_s) == (0, 0)


def test_steps_in_which_all_is_greedy_leave_the_cost_of_sampling_at_zero():
    assert fit([sample for sample in measured(TRUE) if not sample.sampled_rows]).sampled_row_s == 0


def test_one_sample_is_enough_for_a_fit_that_explains_it():
    sample = StepSample(4, 0, 0.0, 512, 0, 0.02)

    assert predict_sample_s(fit([sample]), sample) == pytest.approx(0.02)


@pytest.mark.parametrize("samples", [[], [StepSample(1, 0, 0.0, 0, 0, 0.0)]])
def test_a_fit_refuses_nothing_and_steps_without_duration(samples):
    with pytest.raises(ValueError):
        fit(samples)


@given(st.lists(st.builds(StepSample, *[st.integers(0, 5000)] * 5, st.floats(1e-4, 10)), min_size=1, max_size=20))
def test_coefficients_are_never_negative(samples):
    assert min(coefficients(fit(samples))) >= 0


def test_adapting_closes_in_on_a_machine_that_became_slower():
    costs, sample = TRUE, GRID[5]
    slow = sample._replace(seconds=1.5 * predict_sample_s(TRUE, sample))
    for _ in range(200):
        costs = adapt(costs, slow, 0.05)

    assert predict_sample_s(costs, sample) == pytest.approx(slow.seconds, rel=1e-3)


def test_one_outlier_hardly_moves_the_costs():
    outlier = GRID[0]._replace(seconds=100.0)

    assert adapt(TRUE, outlier, 0.02).base_s / TRUE.base_s < 1.02


def test_costs_that_predict_nothing_are_left_alone():
    assert adapt(StepCosts(), GRID[0], 0.5) == StepCosts()
