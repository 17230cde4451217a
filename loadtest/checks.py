"""Checks that the parts of a scenario apply to themselves: a ValueError whose message begins with the key, as in "rate
is
-1; it must be above 0"."""

import math


def require(is_met: bool, sentence: str) -> None:
    if not is_met:
        raise ValueError(sentence)


def require_above_zero(part: object, *keys: str) -> None:
    for key in keys:
        value = getattr(part, key)
        require(value is None or 0 < value < math.inf, f"{key} is {show(value)}; it must be above 0")


def require_not_negative(part: object, *keys: str) -> None:
    for key in keys:
        value = getattr(part, key)
        require(value is None or 0 <= value < math.inf, f"{key} is {show(value)}; it must be 0 or more")


def show(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(show, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
