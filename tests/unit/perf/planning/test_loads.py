import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.planning.cards import CARDS
from penstock.perf.planning.formats import BF16, INT4, KV_FORMATS
from penstock.perf.planning.known import known_shape
from penstock.perf.planning.loads import Bounds, Load, Targets, decode_alone, most_rps, prefill_s, settle
from penstock.perf.planning.money import cost_of_million, costs_at, price_of_month, propose_tariff
from penstock.perf.planning.roofline import FittedTimes, Roofline, Speed, rates_of
from penstock.wire.frames import StepCosts

SHAPE = known_shape("llama-3-8b")
assert SHAPE is not None
BOUNDS = Bounds(max_rows=256, kv_tokens=400_000, max_batched_tokens=8192)
LOAD = Load(rate_rps=4.0, prompt_tokens=1024, output_tokens=256)


def roofline(card: str = "H100", form=BF16, parts: int = 1) -> Roofline:
    return Roofline(SHAPE, form, KV_FORMATS["bf16"], rates_of(CARDS[card], SHAPE, form, parts), parts=parts)


TIMES = roofline()


def test_a_decode_step_reads_the_weights_once_at_the_share_of_the_bandwidth() -> None:
    alone = decode_alone(TIMES, 1, 1)

    layers = 2 * (SHAPE.layer_params + SHAPE.head_params)
    read_s = (layers + 131072) / (0.8 * 3350e9)
    assert alone.tpot_s == pytest.approx(read_s + 3e-6 * (10 * 32 + 5))


def test_products_bind_from_the_batch_on_at_which_they_take_as_long_as_the_bytes() -> None:
    knee = TIMES.knee_rows

    assert knee is not None
    assert knee == math.ceil(0.6 * 989.4e12 / (0.8 * 3350e9))
    layers = [TIMES.list_parts(rows, 0, 0, 0)[0] for rows in (knee - 1, knee)]
    assert layers[0].flops_s < layers[0].bytes_s
    assert layers[1].flops_s >= layers[1].bytes_s


def test_int4_binds_by_products_from_fewer_rows_on() -> None:
    knees = [roofline(form=form).knee_rows for form in (INT4, BF16)]

    assert knees[0] is not None
    assert knees[1] is not None
    assert knees[0] < knees[1] / 3


def test_a_prompt_is_bound_by_flops() -> None:
    layers, *_ = TIMES.list_parts(0, 2048, 0, 0)

    assert layers.flops_s > layers.bytes_s
    assert layers.flops_s == pytest.approx(2 * SHAPE.layer_params * 2048 / (0.6 * 989.4e12))


def test_two_cards_halve_the_bytes_and_pay_for_their_sums() -> None:
    one, two = roofline(), roofline(parts=2)
    step = {"rows": 1, "prefill_tokens": 0, "query_context": 0, "kv_tokens": 1}

    halved = two.layer_bytes == one.layer_bytes / 2
    sums_s = 64 * (10e-6 + 2 * 0.5 * SHAPE.hidden_size * 2 / (0.7 * 450e9))
    bytes_s = sum(part.seconds for part in one.list_parts(**step)) / 2
    assert halved
    assert two(**step) == pytest.approx(3e-6 * 325 + bytes_s + sums_s)


@given(st.integers(0, 300), st.integers(0, 8192), st.floats(0, 1e8), st.integers(0, 10**6), st.integers(0, 3))
def test_a_step_never_gets_shorter_when_work_is_added(
    rows: int, tokens: int, pairs: float, kv_tokens: int, added: int
) -> None:
    amounts = {"rows": rows, "prefill_tokens": tokens, "query_context": pairs, "kv_tokens": kv_tokens}
    more = {**amounts}
    name = list(amounts)[added]
    more[name] = amounts[name] + 7

    for times in (TIMES, roofline("L4", INT4)):
        assert times(**more) >= times(**amounts)


@given(st.lists(st.floats(1e9, 1e12), min_size=4, max_size=4), st.integers(1, 700))
def test_measured_speeds_never_make_more_rows_quicker(flops: list[float], rows: int) -> None:
    speed = Speed((1, 8, 32, 512), tuple(flops))

    assert speed.seconds(1e6, rows + 1) >= speed.seconds(1e6, rows) * (1 - 1e-12)


def test_rows_are_what_little_says_they_are() -> None:
    steady = settle(TIMES, LOAD, BOUNDS)

    assert steady is not None
    assert steady.rows == pytest.approx(LOAD.rate_rps * LOAD.output_tokens * steady.step_s)
    amounts = {"rows": steady.rows, "kv_tokens": steady.rows * LOAD.context_tokens}
    prompt_s = TIMES(**amounts, prefill_tokens=1024, query_context=1024 * 512)
    decode_s = TIMES(**amounts, prefill_tokens=0, query_context=0)
    prompts = LOAD.rate_rps  # of a second; all other steps have none
    others = (1 - prompts * prompt_s) / decode_s
    assert steady.step_s == pytest.approx(1 / (prompts + others))


def test_a_load_beyond_what_a_replica_computes_has_no_steady_state() -> None:
    assert settle(TIMES, LOAD._replace(rate_rps=1000.0), BOUNDS) is None


def test_the_most_within_targets_meets_them_and_a_little_more_does_not() -> None:
    targets = Targets(ttft_s=0.5, tpot_s=0.02)

    best = most_rps(TIMES, LOAD, BOUNDS, targets)

    assert best is not None
    assert best.meets(targets)
    beyond = settle(TIMES, LOAD._replace(rate_rps=1.01 * best.rate_rps), BOUNDS)
    assert beyond is None or not beyond.meets(targets)


def test_targets_that_a_request_alone_misses_are_met_by_nothing() -> None:
    assert most_rps(TIMES, LOAD, BOUNDS, Targets(tpot_s=0.001)) is None


def test_a_prompt_beyond_a_steps_budget_takes_several_steps() -> None:
    small = BOUNDS._replace(max_batched_tokens=256)

    assert prefill_s(TIMES, LOAD, small, 0) > prefill_s(TIMES, LOAD, BOUNDS, 0)
    costs = FittedTimes(StepCosts(base_s=0.01))
    assert prefill_s(costs, LOAD, small, 0) == pytest.approx(4 * 0.01)


def test_fitted_costs_take_the_place_of_the_roofline() -> None:
    times = FittedTimes(StepCosts(base_s=0.02, row_s=0.001, prefill_token_s=0.0001))

    steady = settle(times, Load(1.0, 100, 10), BOUNDS)

    assert steady is not None
    assert steady.step_s == pytest.approx(0.02 + 0.001 + 0.0001 * 100 * steady.step_s)


def test_cost_is_the_price_of_an_hour_over_the_tokens_of_an_hour() -> None:
    assert cost_of_million(3.6, 1000) == 1.0


@given(
    st.floats(0.01, 30),
    st.floats(1, 4000),
    st.floats(1, 2000),
    st.floats(0.01, 1000),
    st.floats(0, 2000),
)
def test_a_replicas_tokens_cost_its_price(
    rate: float, prompt: float, output: float, price: float, cached: float
) -> None:
    load = Load(rate, prompt, output, cached)
    steady = settle(TIMES, load, BOUNDS)
    if steady is None:
        return

    costs = costs_at(TIMES, load, BOUNDS, steady, price)

    hourly = 3600 * rate * (prompt * costs.input + cached * costs.cached + output * costs.output) / 1e6
    assert hourly == pytest.approx(price)
    assert min(costs) >= 0


def test_a_tariff_pays_for_the_cost_at_the_use_that_is_expected() -> None:
    steady = most_rps(TIMES, LOAD, BOUNDS, Targets())
    assert steady is not None
    costs = costs_at(TIMES, LOAD, BOUNDS, steady, 3.0)

    tariff = propose_tariff(costs, utilisation=0.5, margin=0.25)

    assert tariff.output == pytest.approx(2.5 * costs.output)
    assert tariff.input == pytest.approx(2.5 * costs.input)
    assert tariff.cached < tariff.input / 3


def test_a_month_has_730_hours() -> None:
    assert price_of_month(2.0, 3) == 4380
