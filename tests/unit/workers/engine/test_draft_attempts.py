"""Drafts of a drafter that knows its tokens' chances: for whom there are any, and from which chance on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.fit import StepSample, adapt, predict_sample_s
from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.engine.draft_lengths import RETRY_EVERY, WORTH_IT, DraftLengths, _Attempts
from penstock.workers.engine.sequence import Chunk, Sequence, StepShape

COSTS = StepCosts(base_s=0.009, row_s=0.001, draft_token_s=0.001, draft_round_s=0.0006)


def chunks(*gains: float | None) -> list[Chunk]:
    found = []
    for gain in gains:
        seq = Sequence("r", [1, 2], SamplingParams(max_tokens=100), 2, [], b"", 0.0, num_computed_tokens=1)
        seq.draft_gain = gain
        found.append(Chunk(seq, 1, 1))
    return found


def choose(lengths: DraftLengths, rows: list[Chunk], costs: StepCosts = COSTS, budget: int = 100) -> list[int]:
    shape = StepShape(len(rows), len(rows), 0, 0.0, 0)
    return lengths.choose(rows, [4] * len(rows), shape, costs, budget)


def drafts() -> DraftLengths:
    return DraftLengths(4, knows_chances=True)


def test_a_sequence_is_drafted_for_where_its_drafts_have_gained_what_they_cost() -> None:
    assert choose(drafts(), chunks(0.5)) == [4]
    assert choose(drafts(), chunks(0.1)) == [0]
    assert choose(drafts(), chunks(0.1, 1.5, 0.0)) == [0, 4, 0]
    assert choose(drafts(), chunks(None)) == [4], "nothing is known yet"
    assert choose(drafts(), chunks(0.1), StepCosts()) == [4], "costs are not known"
    assert choose(drafts(), chunks(0.5, 1.0), budget=5) == [1, 4]
    assert choose(drafts(), chunks(0.5), budget=0) == [0]


def test_a_token_needs_the_chance_that_its_row_costs_and_another_behind_it_more() -> None:
    (alone,) = chunks(0.8)
    choose(drafts(), [alone])
    assert alone.keep_from == pytest.approx(0.001 / 0.010)
    assert alone.go_from == pytest.approx(0.0016 / 0.010 / 0.6)

    beside = chunks(*[0.8] * 16)
    choose(drafts(), beside)
    assert beside[0].keep_from == pytest.approx(0.001 * 16 / 0.025), "a sequence's own token costs as little"
    assert beside[0].go_from == pytest.approx((0.001 * 16 + 0.0006) / 0.025 / 0.6), "one pass for all"

    (unknown,) = chunks(0.8)
    choose(drafts(), [unknown], StepCosts())
    assert (unknown.keep_from, unknown.go_from) == (0.0, 0.0)


def test_what_attempts_gain_is_learned_from_those_too_of_which_nothing_was_proposed() -> None:
    lengths, (chunk, other) = drafts(), chunks(None, None)
    for _ in range(200):
        lengths.record(chunk.seq, 0, 0, num_rounds=1)
    assert chunk.seq.draft_gain is not None
    assert chunk.seq.draft_gain < 0.01
    assert (lengths.num_drafted, lengths.num_accepted) == (0, 0)
    assert choose(lengths, [chunk]) == [0]
    assert choose(lengths, [other]) == [0], "a new sequence starts from what is known of all"
    for _ in range(200):
        lengths.record(chunk.seq, 3, 2, num_rounds=4)
    assert chunk.seq.draft_gain == pytest.approx(2, abs=0.01)
    assert choose(lengths, [chunk, other]) == [4, 4]


def test_where_nothing_pays_one_sequence_is_tried_now_and_then() -> None:
    lengths, rows = drafts(), chunks(0.0, 0.0)
    for _ in range(1000):
        lengths.record(rows[0].seq, 1, 0, num_rounds=2)
    tried = [place for place in range(3 * RETRY_EVERY + 3) if any(choose(lengths, rows))]
    assert tried == [RETRY_EVERY, 2 * RETRY_EVERY + 1, 3 * RETRY_EVERY + 2]


def test_without_adapting_all_is_drafted_and_verified() -> None:
    lengths, rows = DraftLengths(4, is_adaptive=False, knows_chances=True), chunks(0.0, 0.0)
    assert choose(lengths, rows) == [4, 4]
    assert rows[0].keep_from == rows[0].go_from == 0.0


@given(
    gains=st.lists(st.floats(0, 4), min_size=1, max_size=5),
    num_rows=st.integers(5, 40),
    token_s=st.floats(0, 0.01),
    round_s=st.floats(0, 0.01),
)
def test_no_other_sequences_give_more_tokens_in_the_time(
    gains: list[float], num_rows: int, token_s: float, round_s: float
) -> None:
    attempts = _Attempts(1.0, 1.5, 1.2)

    def goodput(chosen: tuple[float, ...]) -> float:
        seconds = 0.01 + 1.2 * len(chosen) * token_s + 1.5 * round_s * bool(chosen)
        return (num_rows + sum(chosen)) / seconds

    gains.sort(reverse=True)
    count = attempts.choose(gains, num_rows, 0.01, token_s, round_s)
    ways = itertools.chain.from_iterable(itertools.combinations(gains, n) for n in range(1, len(gains) + 1))
    most = max(map(goodput, ways))
    if count:
        assert goodput(tuple(gains[:count])) >= max(most, WORTH_IT * goodput(())) * (1 - 1e-9)
    else:
        assert most <= WORTH_IT * goodput(()) * (1 + 1e-9)


def test_steps_with_drafts_that_take_longer_than_said_are_not_made_for_a_while() -> None:
    lengths, rows, shape = drafts(), chunks(1.0, 1.0), StepShape(2, 2, 0, 0.0, 0)
    assert choose(lengths, rows) == [4, 4]
    for _ in range(40):
        lengths.record_time(shape._replace(draft_tokens=4, draft_rounds=3), 0.015, 0.030)
        lengths.record_time(shape, 0.010, 0.010)
    assert choose(lengths, chunks(0.35, 0.35)) == [0, 0], "twice as long"
    assert choose(lengths, chunks(2.0, 2.0)) == [4, 4], "which these are worth"
    for _ in range(1000):
        lengths.record_time(shape, 0.010, 0.010)
    assert choose(lengths, chunks(0.35, 0.35)) == choose(drafts(), chunks(0.35, 0.35)) == [4, 4], "it is forgotten"


def test_a_larger_batch_whose_drafts_are_dear_stops_none_of_smaller_ones() -> None:
    lengths = drafts()
    for _ in range(40):
        lengths.record_time(StepShape(8, 8, 0, 0.0, 0, draft_tokens=4, draft_rounds=3), 0.020, 0.030)
    assert choose(drafts(), chunks(*[0.7] * 9)) == [4] * 9
    assert choose(lengths, chunks(*[0.7] * 9)) == [0] * 9
    assert choose(lengths, chunks(0.35, 0.35)) == [4, 4]


def test_drafts_that_seem_to_cost_nothing_are_given_up_where_they_cost_much() -> None:
    """Others computed during the probe, for example."""
    lengths, shape = drafts(), StepShape(8, 8, 0, 0.0, 0)
    costs = StepCosts(base_s=0.009, row_s=0.001)
    assert choose(lengths, chunks(*[0.7] * 8), costs) == [4] * 8
    for _ in range(40):
        lengths.record_time(shape._replace(draft_tokens=20, draft_rounds=3), 0.017, 0.040)
    assert choose(lengths, chunks(*[0.7] * 8), costs) == [0] * 8


def test_drafts_that_seem_to_cost_much_are_made_once_they_have_proven_cheap() -> None:
    lengths, shape = drafts(), StepShape(1, 1, 0, 0.0, 0)
    costs = StepCosts(base_s=0.009, row_s=0.001, draft_token_s=0.01, draft_round_s=0.01)
    assert choose(lengths, chunks(0.7), costs) == [0]
    for _ in range(6):
        lengths.record_time(shape._replace(draft_tokens=1, draft_rounds=1), 0.030, 0.011)
    (chunk,) = chunks(0.7)
    assert choose(lengths, [chunk], costs) == [4]
    assert chunk.keep_from < 0.5, "at what the probe said no token would be kept"
    for _ in range(1000):
        lengths.record_time(shape, 0.010, 0.010)
    assert choose(lengths, chunks(0.7), costs) == [4], "that is not forgotten"


def test_behind_many_steps_with_drafts_one_is_made_without() -> None:
    lengths, shape = drafts(), StepShape(1, 1, 0, 0.0, 0)
    for _ in range(RETRY_EVERY):
        assert choose(lengths, chunks(0.7)) == [4]
        lengths.record_time(shape._replace(draft_tokens=1, draft_rounds=1), 0.0116, 0.0116)
    assert choose(lengths, chunks(0.7)) == [0]
    assert choose(lengths, chunks(0.7)) == [4], "also where that one had a prompt, and tells nothing"


def test_a_start_that_took_plain_steps_for_slow_and_drafts_for_free_is_seen_through() -> None:
    """All costs follow what steps take, those with drafts too, as in the engine."""
    lengths, costs, made = drafts(), StepCosts(base_s=0.019, row_s=0.0001), []
    for _ in range(1500):
        rows = chunks(*[0.7] * 8)
        is_drafted = any(choose(lengths, rows, costs))
        made.append(is_drafted)
        tokens, rounds, seconds = (20, 3, 0.022) if is_drafted else (0, 0, 0.009)
        sample = StepSample(8, 0, 0.0, 0, tokens, seconds, rounds)
        lengths.record_time(StepShape(8, 8, 0, 0.0, 0, tokens, rounds), predict_sample_s(costs, sample), seconds)
        costs = adapt(costs, sample, 0.02)
    assert all(made[:32])
    assert sum(made[-500:]) < 50, "13.6 tokens in 22 ms are fewer than 8 in 9"


def test_steps_without_drafts_say_nothing_of_those_with() -> None:
    lengths = drafts()
    for _ in range(30):
        lengths.record_time(StepShape(2, 2, 0, 0.0, 0), 0.010, 0.005)
    assert choose(lengths, chunks(0.35, 0.35)) == [4, 4]


def test_what_makes_all_steps_longer_stops_no_drafts() -> None:
    lengths, shape = drafts(), StepShape(2, 2, 0, 0.0, 0)
    for _ in range(40):
        lengths.record_time(shape._replace(draft_tokens=4, draft_rounds=3), 0.015, 0.018)
        lengths.record_time(shape, 0.010, 0.012)
        lengths.record_time(shape._replace(prefill_tokens=100, draft_rounds=1), 0.010, 0.040)

    assert choose(lengths, chunks(0.35, 0.35)) == [4, 4]
