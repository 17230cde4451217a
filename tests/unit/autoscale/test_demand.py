import math

import pytest

from penstock.autoscale.demand import (
    FIRST_REQUESTS,
    FIRST_SHAPE,
    REMEMBER_S,
    SHAPE_REQUESTS,
    AverageRequest,
    Sample,
    Total,
    extend_window,
    learn,
    measure_rates,
    remember_totals,
    take_sample,
)
from penstock.autoscale.observation import Observation, ServeState
from penstock.perf.capacity import Shape
from penstock.wire.scaling import PoolFlow


def observation(flows: dict[str, PoolFlow], queued: int = 0) -> Observation:
    return Observation(ServeState(1, ("r",)), flows, queued, 0.0, (), 0.0)


def test_what_gateways_gained_is_summed_gateway_by_gateway() -> None:
    totals = {"a": Total(PoolFlow(10, 8, 1000, 50, 640), 0.0), "b": Total(PoolFlow(100, 100, 1, 1, 1), 0.0)}

    found = take_sample(
        totals, observation({"a": PoolFlow(13, 10, 1300, 60, 700), "b": PoolFlow(101, 100, 2, 3, 5)}, queued=4), 1.0
    )

    assert found == Sample(1.0, PoolFlow(4, 2, 301, 12, 64), 4)


def test_a_gateway_that_appears_or_comes_back_is_no_burst() -> None:
    totals = remember_totals({}, {"a": PoolFlow(10)}, 0.0)

    first = take_sample(totals, observation({"b": PoolFlow(5000)}), 1.0)
    totals = remember_totals(totals, {"b": PoolFlow(5000)}, 1.0)
    second = take_sample(totals, observation({"a": PoolFlow(12), "b": PoolFlow(5003)}), 2.0)

    assert first.flow == PoolFlow()
    assert second.flow.num_started == 5, "two through a, which did not report for a moment, and three through b"


def test_a_gateway_that_stays_away_is_forgotten() -> None:
    totals = remember_totals({"a": Total(PoolFlow(10), 0.0)}, {"b": PoolFlow(1)}, REMEMBER_S)

    assert set(totals) == {"b"}


def test_a_window_keeps_one_sample_at_its_far_end() -> None:
    samples: tuple[Sample, ...] = ()
    for second in range(10):
        samples = extend_window(samples, Sample(float(second), PoolFlow(), 0), 3.0)

    assert [sample.at_s for sample in samples] == [6.0, 7.0, 8.0, 9.0]


def test_requests_that_wait_count_as_arrived() -> None:
    samples = (Sample(0.0, PoolFlow(9), 2), Sample(1.0, PoolFlow(3), 6), Sample(4.0, PoolFlow(5), 12))

    found = measure_rates(samples)

    assert found.rate == pytest.approx((3 + 5 + 10) / 4)


def test_a_queue_that_empties_is_no_negative_arrival() -> None:
    assert measure_rates((Sample(0.0, PoolFlow(), 50), Sample(1.0, PoolFlow(10), 0))).rate == 0


def test_of_a_single_sample_no_rate_is_known() -> None:
    assert measure_rates((Sample(0.0, PoolFlow(7), 0),)).rate == 0


def test_the_average_request_is_learned_from_what_came() -> None:
    known = AverageRequest()
    for _ in range(30):
        known = learn(
            known,
            PoolFlow(num_started=50, num_ended=50, prefill_tokens=5000, cached_tokens=2500, output_tokens=1600),
            num_running=20,
            num_sampled=5,
        )

    assert known.shape == pytest.approx(Shape(100.0, 50.0, 32.0, 0.25), rel=0.01)
    assert known.weight == 1502


def test_the_average_request_rests_on_the_last_minute_however_many_come_in_a_second() -> None:
    known = AverageRequest(Shape(100.0, 0.0, 32.0), 6000.0)  # 100 a second
    alternating = [PoolFlow(num_started=100, prefill_tokens=100 * length) for length in (50, 150)]

    lengths = []
    for second in range(60):
        known = learn(known, alternating[second % 2], span_s=1.0)
        lengths.append(known.shape.prefill_tokens)
    for _ in range(120):
        known = learn(known, PoolFlow(num_started=100, prefill_tokens=100 * 400), span_s=1.0)

    assert max(lengths) - min(lengths) < 2, "one second in sixty"
    assert known.shape.prefill_tokens == pytest.approx(400 - 300 * math.exp(-2), rel=0.02)


def test_on_a_slow_pool_the_last_twenty_requests_are_remembered() -> None:
    known = AverageRequest(Shape(100.0, 0.0, 32.0), SHAPE_REQUESTS)

    found = learn(known, PoolFlow(num_started=1, prefill_tokens=310), span_s=3600.0)

    assert found.shape.prefill_tokens == pytest.approx((20 * 100 + 310) / 21)


def test_the_guess_at_the_start_gives_way_sooner_than_what_is_known() -> None:
    few = PoolFlow(num_started=2, num_ended=2, output_tokens=2 * 28)

    assert learn(AverageRequest(), few).shape.output_tokens == pytest.approx(
        (FIRST_REQUESTS * 128 + 56) / (FIRST_REQUESTS + 2)
    )
    assert learn(AverageRequest(FIRST_SHAPE, 1000.0), few).shape.output_tokens > 115


def test_answers_under_way_do_not_look_like_longer_ones() -> None:
    # 200 begin, none has ended, each is half done
    found = learn(AverageRequest(Shape(0.0, 0.0, 64.0)), PoolFlow(num_started=200, output_tokens=200 * 32))

    assert found.shape.output_tokens == pytest.approx(64.0)


def test_without_requests_the_average_one_stays() -> None:
    assert learn(AverageRequest(), PoolFlow()) == AverageRequest()


def test_what_a_gateway_gained_and_queued_while_it_was_silent_did_not_come_in_a_second() -> None:
    waiting = observation({"a": PoolFlow(400), "b": PoolFlow(41)}, queued=60)._replace(queues={"a": 60, "b": 0})
    totals = remember_totals({}, {"a": PoolFlow(0), "b": PoolFlow(0)}, 0.0, {"a": 20})
    silent = take_sample(totals, observation({"b": PoolFlow(40)}), 40.0)
    totals = remember_totals(totals, {"b": PoolFlow(40)}, 40.0)

    back = take_sample(totals, waiting, 41.0)

    assert silent.num_found == -20
    assert back.flow.num_started == 10 + 1, "ten a second on the average through a, and one through b"
    assert back.num_found == 60
    assert measure_rates((silent, back)).rate == 11.0
