"""Gusts: the spread of prompt tokens in short times, and what is no gust."""

import math
import random
import statistics

import pytest

from penstock.autoscale.demand import Sample, extend_window
from penstock.autoscale.gusts import NUM_DEVIATIONS, SPANS, Gusts, gust_rate, note_gust
from penstock.wire.scaling import PoolFlow

WINDOW_S = 30.0
TARGET_S = 2.0


def note_all(tokens: list[int], *, queued: list[int] | None = None, target_s: float = TARGET_S) -> float:
    """Tokens a second for which there is room after a second of each number of prompt tokens; requests have 100."""
    return gust_rate(learn(tokens, queued), WINDOW_S, target_s)


def learn(tokens: list[int], queued: list[int] | None = None) -> Gusts:
    known, samples = Gusts(), ()
    for second, begun in enumerate(tokens):
        flow = PoolFlow(num_started=begun // 100, prefill_tokens=begun)
        samples = extend_window(samples, Sample(float(second), flow, queued[second] if queued else 0), WINDOW_S)
        known = note_gust(known, ["gateway"], samples, 100.0, WINDOW_S)
    return known


def test_an_even_load_has_no_gusts() -> None:
    assert note_all([500] * 120) == 0.0


@pytest.mark.parametrize("span", SPANS)
def test_what_comes_within_a_span_has_the_target_more_to_be_begun(span: float) -> None:
    """A load that comes in one half of a period of twice the span. No other span needs much
    more."""
    length = round(span * WINDOW_S)
    cycle = [1000] * length + [0] * length
    sums = [sum((cycle * 2)[start : start + length]) for start in range(len(cycle))]
    deviation = statistics.pstdev(sums) / math.sqrt(1 - length / WINDOW_S)

    needed = (NUM_DEVIATIONS * deviation - 500 * TARGET_S) / (length + TARGET_S)
    assert needed * 0.8 <= note_all(cycle * (1200 // len(cycle))) <= needed * 1.25


def test_what_the_mean_brings_within_the_target_is_slack() -> None:
    """The same gusts need less room, or none, beside a load that is larger by itself."""
    gusts = [300 if second % 4 == 0 else 0 for second in range(600)]
    alone, beside = note_all(gusts), note_all([tokens + 200 for tokens in gusts])
    assert alone > beside + 50
    assert note_all([tokens + 2000 for tokens in gusts]) == 0.0


def test_of_two_sums_of_many_small_requests_the_larger_needs_less_of_itself() -> None:
    """Poisson: the spread grows with the root of the load."""
    rng = random.Random(3)

    few, many = (note_all([100 * _draw(rng, rate) for _ in range(1800)]) / (100 * rate) for rate in (2.0, 50.0))
    assert few > 4 * many


def _draw(rng: random.Random, mean: float) -> int:
    """A Poisson number."""
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rng.expovariate(1.0)
    return count


def test_two_looks_at_the_same_moment_tell_nothing() -> None:
    first = Sample(0.0, PoolFlow(), 0)
    samples = (first, Sample(1.0, PoolFlow(num_started=9, prefill_tokens=900), 0))
    again = (*samples, Sample(1.0, PoolFlow(), 0))
    nothing = note_gust(Gusts(), ["gateway"], (first,), 100.0, WINDOW_S)
    assert note_gust(nothing, ["gateway"], again, 100.0, WINDOW_S) == nothing
    assert note_gust(nothing, ["gateway"], samples, 100.0, WINDOW_S) != nothing


def test_what_waits_in_gateways_has_come() -> None:
    tokens = [2000 if second % 4 == 0 else 0 for second in range(200)]
    late = [0, *tokens[:-1]]  # each second's requests begin one later, and wait till then
    waiting = note_all(late, queued=[begun // 100 for begun in tokens])
    assert waiting == pytest.approx(note_all(tokens), rel=0.02)


def test_a_load_that_grows_slowly_is_no_gust() -> None:
    assert note_all([5 * second for second in range(600)]) < 0.05 * 5 * 600


def test_what_comes_and_goes_with_a_gateway_is_no_gust() -> None:
    known, samples = Gusts(), ()
    for second in range(100):
        gateways = ["first"] if second < 50 else ["second"]
        lost = second == 50
        flow = PoolFlow(num_started=0 if lost else 5, prefill_tokens=0 if lost else 500)
        samples = extend_window(samples, Sample(float(second), flow, 0), WINDOW_S)
        known = note_gust(known, gateways, samples, 100.0, WINDOW_S)
    assert [math.sqrt(square.value) for square in known.squares] == pytest.approx([0.0] * len(SPANS), abs=1.0)


def test_the_longer_a_first_token_may_take_the_less_room_is_needed() -> None:
    """What was learned serves every target: the strictest class of the last moments sets it."""
    gusty = [3000 if second % 10 == 0 else 0 for second in range(600)]
    rooms = [note_all(gusty, target_s=target_s) for target_s in (0.5, 1.0, 2.0, 5.0)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] > 1.5 * rooms[2] > 0
    assert note_all(gusty, target_s=30.0) == 0.0


def test_gusts_are_forgotten() -> None:
    gusty = [2000 if second % 4 == 0 else 0 for second in range(600)]
    assert 0 < note_all([*gusty, *([500] * 300)]) < 0.8 * note_all(gusty)
    assert note_all([*gusty, *([500] * 6000)]) == 0.0
