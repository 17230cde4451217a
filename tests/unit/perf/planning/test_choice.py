import pytest

from penstock.perf.planning.cards import CARDS, Card, find_card
from penstock.perf.planning.choice import Option, Place, can_compute, cheapest, weigh
from penstock.perf.planning.formats import BF16, FP8, INT4, KV_FORMATS, WeightFormat
from penstock.perf.planning.known import known_shape
from penstock.perf.planning.loads import Load, Targets
from penstock.perf.planning.memory import GB, Setting
from penstock.perf.planning.roofline import Roofline, rates_of

SHAPE = known_shape("llama-3-8b")
assert SHAPE is not None
BIG = known_shape("llama-3-70b")
assert BIG is not None
NONE = Targets()
LOAD = Load(rate_rps=40.0, prompt_tokens=1024, output_tokens=256)


def option(
    card: Card, form: WeightFormat = BF16, load: Load = LOAD, targets: Targets = NONE, parts: int = 1, shape=SHAPE
) -> Option:
    kv = KV_FORMATS["bf16"]
    price = None if card.price_per_hour is None else parts * card.price_per_hour
    place = Place(card.name, round(card.memory_gb * GB), parts, price)
    times = Roofline(shape, form, kv, rates_of(card, shape, form, parts), parts=parts)
    return weigh(place, shape, Setting(8192, form, kv, parts=parts), times, load, targets)


def test_a_load_takes_as_many_replicas_as_what_one_carries_goes_into_it() -> None:
    found = option(CARDS["H100"], targets=Targets(1.0, 0.05))

    assert found.full is not None
    assert found.replicas is not None
    assert (found.replicas - 1) * found.full.rate_rps < LOAD.rate_rps <= found.replicas * found.full.rate_rps
    assert found.steady is not None
    assert found.steady.meets(Targets(1.0, 0.05))
    assert found.month == pytest.approx(3.348 * 730 * found.replicas)


def test_what_does_not_fit_says_how_much_is_lacking() -> None:
    found = option(CARDS["H100"], shape=BIG)

    assert not found.serves
    assert found.reason.endswith("GB short for one sequence")


def test_heads_that_cards_do_not_divide_are_refused() -> None:
    assert "can't be divided among 3" in option(CARDS["H100"], parts=3).reason


def test_a_target_that_no_number_of_replicas_meets_is_named() -> None:
    found = option(CARDS["L4"], targets=Targets(tpot_s=0.01))

    assert not found.serves
    assert found.reason.startswith("TPOT")


def test_the_cheapest_serves_and_nothing_that_serves_costs_less() -> None:
    targets = Targets(1.0, 0.05)
    options = [option(card, form, targets=targets) for card in CARDS.values() for form in (BF16, INT4)]

    best = cheapest(options)

    assert best is not None
    assert best.month is not None
    assert best.month == min(each.month for each in options if each.serves and each.month is not None)


def test_of_equal_prices_the_one_with_more_bits_is_chosen() -> None:
    light = LOAD._replace(rate_rps=0.1)
    found = [option(CARDS["H100"], form, light) for form in (INT4, BF16)]

    assert found[0].month == found[1].month
    assert cheapest(found) is found[1]


def test_without_a_price_nothing_is_cheapest() -> None:
    assert cheapest([option(CARDS["H100"]._replace(price_per_hour=None))]) is None


def test_fp8_is_for_cards_that_have_it() -> None:
    assert not can_compute(CARDS["A100"], FP8, KV_FORMATS["bf16"])
    assert not can_compute(CARDS["A100"], BF16, KV_FORMATS["fp8"])
    assert can_compute(CARDS["L4"], FP8, KV_FORMATS["fp8"])


def test_a_card_is_found_by_its_name_however_it_is_written() -> None:
    assert find_card("rtx-4090") is CARDS["RTX4090"]
    assert find_card("h200") is CARDS["H200"]
    assert find_card("H1000") is None


def test_every_card_has_its_source_and_more_bandwidth_than_nothing() -> None:
    for card in CARDS.values():
        assert card.source
        assert card.fp8_tflops is None or card.fp8_tflops == pytest.approx(2 * card.bf16_tflops, rel=0.02)
