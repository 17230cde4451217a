"""Gusts: the spread of prompt tokens in short times, and what is no gust."""

import math

import pytest

from penstock.autoscale.demand import Sample, extend_window
from penstock.autoscale.gusts import NUM_DEVIATIONS, Gusts, gust_tokens, note_gust
from penstock.wire.scaling import PoolFlow

WINDOW_S = 30.0
REACH_S = 2.0


def note_all(tokens: list[int], *, queued: list[int] | None = None) -> Gusts:
    """Gusts after a second of each number of prompt tokens; requests have 100."""
    known, samples = Gusts(), ()
    for second, begun in enumerate(tokens):
        flow = PoolFlow(num_started=begun // 100, prefill_tokens=begun)
        samples = extend_window(samples, Sample(float(second), flow, queued[second] if queued else 0), WINDOW_S)
        known = note_gust(known, ["gateway"], samples, 100.0, REACH_S)
    return known


def test_an_even_load_has_no_gusts() -> None:
    assert gust_tokens(note_all([500] * 120)) == 0.0


def test_a_gust_is_the_spread_of_what_comes_within_its_length() -> None:
    """Two seconds hold 2,000 tokens or none in turn, and their mean is 1,000; of the
    thirty seconds that the mean is of, two have the gust in them."""
    known = note_all([2000 if second % 4 == 0 else 0 for second in range(600)])
    assert gust_tokens(known) == pytest.approx(NUM_DEVIATIONS * 1000.0 * (1 - REACH_S / WINDOW_S), rel=0.02)


def test_what_waits_in_gateways_has_come() -> None:
    tokens = [2000 if second % 4 == 0 else 0 for second in range(200)]
    late = [0, *tokens[:-1]]  # each second's requests begin one later, and wait till then
    waiting = note_all(late, queued=[begun // 100 for begun in tokens])
    assert gust_tokens(waiting) == pytest.approx(gust_tokens(note_all(tokens)), rel=0.02)


def test_a_load_that_grows_slowly_is_no_gust() -> None:
    known = note_all([5 * second for second in range(600)])
    assert gust_tokens(known) < 0.15 * 5 * 600


def test_what_comes_and_goes_with_a_gateway_is_no_gust() -> None:
    known, samples = Gusts(), ()
    for second in range(100):
        gateways = ["first"] if second < 50 else ["second"]
        lost = second == 50
        flow = PoolFlow(num_started=0 if lost else 5, prefill_tokens=0 if lost else 500)
        samples = extend_window(samples, Sample(float(second), flow, 0), WINDOW_S)
        known = note_gust(known, gateways, samples, 100.0, REACH_S)
    assert gust_tokens(known) == pytest.approx(gust_tokens(note_all([500] * 100)), abs=1.0)


def test_gusts_are_forgotten() -> None:
    gusty = [2000 if second % 4 == 0 else 0 for second in range(600)]
    then = gust_tokens(note_all(gusty + [500] * 1200))
    assert then == pytest.approx(gust_tokens(note_all(gusty)) * math.sqrt(math.exp(-2) / (1 + math.exp(-1))), rel=0.5)
    assert then < 0.5 * gust_tokens(note_all(gusty))
