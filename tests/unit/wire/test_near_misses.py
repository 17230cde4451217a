import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.near_misses import MAX_CHARS, MIN_CHARS, NearMisses

NAMES = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "stop", "n", "prompt")
NEAR = NearMisses(NAMES, {"max_new_tokens": "max_tokens"})
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("temperatuer", "temperature"),
        ("temperaturee", "temperature"),
        ("tenperature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("topK", "top_k"),
        ("N", "n"),
        ("promt", "prompt"),
        ("max_new_tokens", "max_tokens"),
        ("maxNewTokens", "max_tokens"),
        ("top_a", None),
        ("stops", None),
        ("typical_p", None),
        ("tokens", None),
        ("", None),
        ("___", None),
        ("ü", None),
    ],
)
def test_a_misspelled_name_is_known_and_another_one_is_not(name: str, meant: str | None) -> None:
    assert NEAR.find(name) == meant


@given(st.sampled_from([name for name in NAMES if len(name) > MIN_CHARS]), st.data())
def test_any_single_slip_of_a_long_name_is_found(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(LETTERS))
    slips = [name[:at] + name[at + 1 :], name[:at] + letter + name[at + 1 :], name[:at] + letter + name[at:]]

    found = {NEAR.find(slip) for slip in slips}

    assert found <= {"max_tokens", "min_tokens", "temperature"}


@given(st.text())
def test_any_text_is_near_a_known_name_or_near_none(name: str) -> None:
    assert NEAR.find(name) in {*NAMES, None}


def test_a_very_long_name_costs_no_more_than_a_long_one() -> None:
    began = time.process_time()

    assert NEAR.find("a" * 10**7) is None
    assert NEAR.find("max_tokens" + "a" * MAX_CHARS) is None
    assert time.process_time() - began < 0.1
