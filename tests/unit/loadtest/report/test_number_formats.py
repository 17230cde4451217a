"""Durations and shares as reports write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.report import number_formats


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (None, "–"),
            (0.0, "0 ms"),
            (0.0000123, "12.3 µs"),
            (0.00123, "1.23 ms"),
            (0.0999, "99.9 ms"),
            (0.1234, "123 ms"),
            (1.0, "1 s"),
            (12.34, "12.3 s"),
        ),
        *(
            (119.6, "120 s"),
            (120.0, "2 min"),
            (125.0, "2 min 5 s"),
            (3600.0, "1 h"),
            (3725.0, "1 h 2 min"),
            (float("nan"), "–"),
        ),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float | None, text: str) -> None:
    assert number_formats.format_duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


@given(st.floats(0.001, 119))
def test_a_duration_is_within_half_a_percent_of_what_it_says(seconds: float) -> None:
    value, unit = number_formats.format_duration(seconds).split("\N{NO-BREAK SPACE}")

    assert float(value) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 %"), (1.0, "100 %"), (0.9996, "> 99.9 %"), (0.0004, "< 0.1 %"), (0.9444, "94.4 %")],
)
def test_a_share_that_is_not_all_or_nothing_never_reads_like_it(value: float | None, text: str) -> None:
    assert number_formats.format_share(value).replace("\N{NO-BREAK SPACE}", " ") == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_only_all_is_a_hundred_percent(value: float) -> None:
    assert number_formats.format_share(value).replace("\N{NO-BREAK SPACE}", " ") not in ("0 %", "100 %")
