"""Formats figures as people read them: three digits, a unit, an en dash where there is none."""

from math import isfinite

NONE = "–"
_NBSP = "\N{NO-BREAK SPACE}"


def format_duration(seconds: float | None) -> str:
    """Seconds with a unit and three digits: 0.0123 -> 12.3 ms; 125 -> 2 min 5 s."""
    if seconds is None or not isfinite(seconds):
        return NONE
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        parts = (
            [f"{hours}{_NBSP}h"] * (hours > 0)
            + [f"{minutes}{_NBSP}min"] * (minutes > 0)
            + [f"{rest}{_NBSP}s"] * (rest > 0)
        )
        return _NBSP.join(parts[:2])
    if abs(seconds) >= 1:
        return f"{_digits(seconds)}{_NBSP}s"
    if abs(seconds) >= 0.001 or seconds == 0:
        return f"{_digits(seconds * 1e3)}{_NBSP}ms"
    return f"{_digits(seconds * 1e6)}{_NBSP}µs"


def format_number(value: float | None) -> str:
    """A number with three digits, or all of those before the point."""
    if value is None or not isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else _digits(value)


def format_share(value: float | None) -> str:
    """A share as percent: 0.987 -> 98.7 %; what is not all or nothing never reads as if it were."""
    if value is None or not isfinite(value):
        return NONE
    percent = value * 100
    if 0 < percent < 0.1:
        return f"<{_NBSP}0.1{_NBSP}%"
    if 99.9 < percent < 100:
        return f">{_NBSP}99.9{_NBSP}%"
    return f"{percent:.1f}".removesuffix(".0") + f"{_NBSP}%"


def _digits(value: float) -> str:
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
