import pytest

from penstock.perf.blend import NOISE, blend_costs
from penstock.perf.model import Work, predict_tpot_s, scale_costs
from penstock.wire.frames import StepCosts

COSTS = StepCosts(base_s=0.01, row_s=0.001, prefill_token_s=0.0001, kv_token_s=1e-6)
WORK = Work(num_running=4, kv_tokens=1000)


def slower(by: float) -> StepCosts:
    return scale_costs(COSTS, by)


def test_replicas_that_differ_by_noise_are_predicted_alike():
    first, second = blend_costs([COSTS, slower(1.2)], [WORK, WORK])

    assert first == second
    assert first.base_s == pytest.approx(0.011)


def test_a_slow_replica_is_predicted_slow_by_what_exceeds_the_noise():
    first, _, third = blend_costs([COSTS, COSTS, slower(4)], [WORK] * 3)

    mean = (1 + 1 + 4) / 3
    assert predict_tpot_s(third, WORK) / predict_tpot_s(COSTS, WORK) == pytest.approx(mean * (4 / mean / NOISE))
    assert predict_tpot_s(first, WORK) / predict_tpot_s(COSTS, WORK) == pytest.approx(mean * (1 / mean * NOISE))


def test_one_replica_is_predicted_by_what_it_measured():
    assert blend_costs([COSTS], [WORK]) == [COSTS]


def test_costs_of_zero_are_shared_too():
    assert blend_costs([StepCosts(), StepCosts()], [WORK, WORK]) == [StepCosts(), StepCosts()]
