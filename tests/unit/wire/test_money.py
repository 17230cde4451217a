import pytest

from penstock.base.errors import ConfigError
from penstock.wire.money import NANO, check_price, price_of_time_nano, price_of_tokens_nano, shown


def test_an_hour_costs_its_price_and_a_million_tokens_theirs() -> None:
    assert price_of_time_nano(3600.0, 2.5) == price_of_tokens_nano(1_000_000, 2.5) == 2.5 * NANO
    assert shown(price_of_time_nano(36.0, 2.5)) == 0.025


def test_a_decode_step_s_share_is_no_rounding_error() -> None:
    """A row of 64 of a step of 10 ms, on something that costs a fifth of a unit per hour."""
    share_s, price = 0.01 / 64, 0.2

    assert price_of_time_nano(share_s, price) == pytest.approx(share_s * price / 3600 * NANO, abs=0.5)
    assert price_of_time_nano(share_s, price) > 0


@pytest.mark.parametrize("price", [-0.01, float("inf"), float("nan")])
def test_a_price_that_none_can_be_is_refused(price: float) -> None:
    with pytest.raises(ConfigError, match="somewhere must be a finite number, at least 0"):
        check_price(price, "somewhere")

    check_price(None, "somewhere")
    check_price(0.0, "somewhere")
