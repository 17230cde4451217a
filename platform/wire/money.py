"""Money: whole numbers of 1e-9 of a unit, for whatever currency prices are in; all of them are in the same.

Not what something costs or is charged: those who know seconds and tokens ask here what they come to. Invariant: sums
are of integers, so that adding them up in another order, or over a year, gives the same to the last digit; a float is
made of one only where it is shown.
"""

import math
from decimal import Decimal

from penstock.base.errors import ConfigError

NANO = 1_000_000_000
"""Parts of a unit."""
MAX_BUDGET = 4e9
"""Largest budget of a month, in units: Redis adds up whole numbers of 64 bits."""
TOKENS_OF_A_PRICE = 1_000_000
SECONDS_OF_A_PRICE = 3600


def shown(nano: int) -> float:
    """A sum as pages and receipts show it, in units."""
    return nano / NANO


def to_nano(amount: float) -> int:
    """An amount or price as it stands in a configuration, rounded to the nearest whole number (halves to the even
    one). Finite."""
    return round(Decimal(repr(amount)) * NANO)


def exact(nano: int) -> str:
    """A sum in units, as a decimal number with all its digits."""
    units, rest = divmod(abs(nano), NANO)
    return f"{'-' if nano < 0 else ''}{units}.{rest:09d}"


def price_of_time_nano(seconds: float, price_per_hour: float) -> int:
    """What `seconds` cost of something that has a price per hour, in units."""
    return round(seconds * price_per_hour * (NANO / SECONDS_OF_A_PRICE))


def price_of_tokens_nano(num_tokens: int, price_per_million: float) -> int:
    """What tokens cost at a price per million, in units."""
    return round(num_tokens * price_per_million * (NANO / TOKENS_OF_A_PRICE))


def check_price(price: float | None, name: str) -> None:
    """Raises ConfigError for a price that none can be. None: there is no price."""
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ConfigError(f"{name} must be a finite number, at least 0, not {price}")
