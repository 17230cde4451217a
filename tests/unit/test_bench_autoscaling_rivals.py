"""bench.autoscaling.rivals: formulas held against their sources' worked examples and, where it is installed, their
code."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors
from ray.serve.config import AutoscalingConfig

from bench.autoscaling.replicas import ENGINE
from bench.autoscaling.rivals.dynamo import BOUNDS, Holt, Load, Planner, PlannerSettings, plan_replicas
from bench.autoscaling.rivals.kubernetes import PodAutoscaler, PodAutoscalerSettings, recommend
from bench.autoscaling.rivals.ray_serve import Delay, RayServe, RayServeSettings, scale
from penstock.autoscale.observation import Observation, ServeState
from penstock.perf.capacity import Shape, capacity_rps
from penstock.wire.scaling import PoolFlow

HPA = PodAutoscalerSettings(metric="in_flight", target=10.0)


def observe(target: int, queued: int, flow: PoolFlow | None = None, num_running: int | None = None) -> Observation:
    running = tuple(f"r{number}" for number in range(target if num_running is None else num_running))
    flows = {"gateway": flow or PoolFlow()}
    return Observation(ServeState(target, running), flows, queued, 0.0, (), 0.25)


# Ray Serve


@given(
    st.integers(1, 50),
    st.floats(0, 60),
    st.floats(0.1, 2),
    st.floats(0.1, 2),
)
def test_ray_serves_factors_are_those_of_the_installed_ray(
    current: int, desired: float, up: float, down: float
) -> None:
    config = AutoscalingConfig(min_replicas=1, max_replicas=100, upscaling_factor=up, downscaling_factor=down)
    settings = RayServeSettings(upscaling_factor=up, downscaling_factor=down)

    assert scale(settings, desired, current) == _apply_scaling_factors(desired, current, config)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=60))
def test_ray_serves_delays_are_those_of_the_installed_ray(course: list[tuple[int, int]]) -> None:
    """course: desired numbers of replicas, and the seconds that pass before each."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=100, upscale_delay_s=30.0, downscale_delay_s=90.0)
    delay = Delay(RayServeSettings(downscale_delay_s=90.0))
    ours = theirs = 3
    state: dict[str, object] = {}
    now = 0.0
    for desired, passed_s in course:
        now += passed_s
        ours = delay.apply(desired, ours, now)
        theirs, state = _apply_delay_logic(desired, theirs, config, state, _now=now)

        assert ours == theirs


def test_ray_serve_wants_a_replica_for_each_two_requests_after_half_a_minute() -> None:
    rule = RayServe(RayServeSettings())
    targets = [rule(observe(2, queued=12), float(now)) for now in range(40)]

    assert targets[:30] == [2] * 30
    assert targets[30] == 6


def test_ray_serve_sees_what_was_pushed_last() -> None:
    rule = RayServe(RayServeSettings(upscale_delay_s=0.0, look_back_s=0.0))

    assert rule(observe(2, queued=4), 0.0) == 2
    assert rule(observe(2, queued=40), 9.0) == 2  # pushed every ten seconds
    assert rule(observe(2, queued=40), 10.0) == 20


# Kubernetes


@pytest.mark.parametrize(
    ("total", "current", "wanted"),
    [
        (20.0, 1, 2),  # the documentation's: twice the value doubles
        (10.0, 2, 1),  # half the value halves
        (21.0, 2, 2),  # a ratio of 1.05 is within the tolerance of 0.1
        (19.0, 2, 2),
        (23.0, 2, 3),
        (0.0, 5, 1),
    ],
)
def test_the_pod_autoscaler_follows_the_ratio(total: float, current: int, wanted: int) -> None:
    assert recommend(HPA, total, current) == wanted


def test_the_pod_autoscaler_goes_down_to_the_highest_of_five_minutes() -> None:
    rule = PodAutoscaler(HPA)

    assert rule(observe(4, queued=60), 0.0) == 6
    assert rule(observe(6, queued=60), 1.0) == 6  # asked every 15 s only
    assert rule(observe(6, queued=10), 15.0) == 6
    assert rule(observe(6, queued=20), 300.0) == 6
    assert rule(observe(6, queued=10), 315.1) == 2


def test_the_pod_autoscaler_goes_up_by_four_or_doubles() -> None:
    assert PodAutoscaler(HPA)(observe(1, queued=500), 0.0) == 5
    assert PodAutoscaler(HPA)(observe(10, queued=500), 0.0) == 20


def test_a_queue_counts_only_what_waits() -> None:
    rule = PodAutoscaler(replace(HPA, metric="queue"))

    assert rule(observe(2, queued=50), 0.0) == 5


# Dynamo


def test_a_planner_divides_the_load_by_what_a_replica_takes() -> None:
    capacity = capacity_rps(ENGINE.timed.costs, Shape(1000.0, 0.0, 200.0), BOUNDS)

    assert plan_replicas(Load(4.5 * capacity, 1000.0, 200.0), 1.0) == 5
    assert plan_replicas(Load(4.5 * capacity, 1000.0, 200.0), 2.0) == 9
    assert plan_replicas(Load(0.0, 1000.0, 200.0), 1.0) == 1


def test_a_planner_plans_once_an_interval_for_the_load_of_the_last_one() -> None:
    rule = Planner(PlannerSettings(interval_s=60.0))
    flow = PoolFlow(300, 300, 300_000, 0, 60_000)

    assert rule(observe(1, 0), 0.0) == 1
    assert rule(observe(1, 0, flow), 59.0) == 1
    assert rule(observe(1, 0, flow), 60.0) == plan_replicas(Load(5.0, 1000.0, 200.0), 1.0) > 1


def test_a_trend_goes_on() -> None:
    holt = Holt()
    predicted = [holt.predict(float(value)) for value in range(0, 400, 10)]

    assert predicted[-1] == pytest.approx(400.0, rel=0.01)
    assert Holt().predict(3.0) == 3.0
