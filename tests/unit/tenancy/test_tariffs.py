"""Tariffs: which one counts, exact charges, and bounds that no answer exceeds."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.config import parse
from penstock.base.errors import ConfigError
from penstock.tenancy.tariffs import (
    FREE,
    MAX_NANO,
    Tariff,
    TariffRule,
    Tariffs,
    charge_nano,
    most_nano,
    price_nano,
)
from penstock.tenancy.usage import Used
from penstock.wire.money import shown, to_nano

TARIFFS = st.builds(Tariff, *[st.integers(0, 10**15)] * 3)
TOKENS = st.integers(0, 10**5)


def test_the_first_rule_that_fits_counts_and_what_none_fits_is_free() -> None:
    tariffs = Tariffs(
        [
            TariffRule(model="qwen-*", adapter="", input=1, output=2),
            TariffRule(model="qwen-7b", adapter="law-?", input=3, cached=0.5, output=4),
            TariffRule(model="qwen-*", adapter="?*", input=5, output=6),
        ]
    )

    assert tariffs.find("qwen-7b") == Tariff(10**9, 10**9, 2 * 10**9)
    assert tariffs.find("qwen-7b", "law-1") == Tariff(3 * 10**9, 5 * 10**8, 4 * 10**9)
    assert tariffs.find("qwen-7b", "law-10").input == 5 * 10**9
    assert tariffs.find("Qwen-7b") == tariffs.find("llama") == FREE


def test_a_rule_without_patterns_is_the_default() -> None:
    tariffs = Tariffs([TariffRule(model="small", input=1, output=1), TariffRule(input=2, output=8)])

    assert tariffs.find("small", "x").output == 10**9
    assert tariffs.find("anything").output == tariffs.find("anything", "x").output == 8 * 10**9


@given(TARIFFS, TOKENS, TOKENS, TOKENS)
def test_a_charge_is_the_exact_price_rounded_up(tariff: Tariff, prompt: int, cached: int, output: int) -> None:
    cached = min(cached, prompt)
    exact = Fraction(tariff.input * (prompt - cached) + tariff.cached * cached + tariff.output * output, 10**6)

    assert charge_nano(tariff, Used(1, prompt, cached, output)) == min(ceil(exact), MAX_NANO)


@given(TARIFFS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_no_part_of_a_request_is_charged_more_than_its_most(
    tariff: Tariff, prompt: int, more: int, cached: int, output: int, more_output: int
) -> None:
    used = Used(1, prompt, min(cached, prompt), output)

    assert charge_nano(tariff, used) <= most_nano(tariff, prompt + more, output + more_output)


def test_prices_of_a_decimal_are_exact() -> None:
    rule = TariffRule(input=0.15, cached=0.075, output=0.6)

    assert rule.tariff == Tariff(150_000_000, 75_000_000, 600_000_000)
    assert charge_nano(rule.tariff, Used(1, 1000, 400, 20)) == 600 * 150 + 400 * 75 + 20 * 600
    assert shown(to_nano(12.34)) == 12.34


def test_counts_that_nobody_can_have_used_stay_within_bounds() -> None:
    tariff = TariffRule(input=1e7, output=1e7).tariff

    assert charge_nano(tariff, Used(1, 10, 50, -5)) == 10 * 10 * 10**9 - 5 * 10 * 10**9
    assert charge_nano(tariff, Used(1, 0, 0, -5)) == 0
    assert price_nano(tariff, 2**40, 0, 2**40) == MAX_NANO


@pytest.mark.parametrize("price", ["-0.1", ".nan", ".inf", "-.inf", "1e8"])
@pytest.mark.parametrize("name", ["input", "cached", "output"])
def test_a_price_that_is_none_is_refused(name: str, price: str) -> None:
    prices = {"input": "1", "output": "1"} | {name: price}
    text = "".join(f"{key}: {value}\n" for key, value in prices.items())

    with pytest.raises(ConfigError, match=f"{name} of the models '\\*' must lie in 0..10000000"):
        parse(text, TariffRule, name="x")
