"""Drafts of a drafter that knows its tokens' chances: for whom there are any, and from which chance on."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.fit import StepSample, adapt, predict_sample_s
from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.engine.draft_costs import WORTH_IT, Attempts
from penstock.workers.engine.draft_lengths import RETRY_EVERY, DraftLengths, Use
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
    assert beside[0].keep_from == pytest.approx(0.6 * 0.001 * 16 / 0.025), "a sequence's own token costs as little"
    assert beside[0].go_from == pytest.approx((0.6 * 0.001 * 16 + 0.0006) / 0.025 / 0.6), "one pass for all"

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
    attempts = Attempts(1.0, 1.5, 1.2)

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


class Steps:
    """Steps of so many sequences, as an engine makes them: costs follow all that is measured."""

    def __init__(self, num_rows: int, costs: StepCosts, gain: float) -> None:
        """gain: tokens that a draft gains its sequence; each has two."""
        self.lengths, self.costs, self.uses, self.made = drafts(), costs, list[Use](), list[bool]()
        self._rows = chunks(*[gain] * num_rows)
        self._gain, self._due = gain, 0.0

    def run(self, count: int, plain_s: float, drafted_s: float) -> None:
        """Seconds that a step takes without drafts, and with them."""
        for _ in range(count):
            num_rows = len(self._rows)
            use = self.lengths.begin(num_rows)
            is_drafted = use is Use.DRAFTED and any(choose(self.lengths, self._rows, self.costs))
            tokens, rounds, seconds = (2 * num_rows, 2, drafted_s) if is_drafted else (0, 0, plain_s)
            sample = StepSample(num_rows, 0, 0.0, 0, tokens, seconds, rounds)
            shape = StepShape(num_rows, num_rows, 0, 0.0, 0, tokens, rounds)
            if self.lengths.learns_times:
                self.lengths.record_time(shape, predict_sample_s(self.costs, sample), seconds)
            if is_drafted:
                for chunk in self._rows:
                    self._due += self._gain
                    kept = min(2, int(self._due))
                    self._due -= kept
                    self.lengths.record(chunk.seq, 2, kept, 2)
                    chunk.seq.draft_gain = self._gain
            self.costs = adapt(self.costs, sample, 0.02)
            self.uses.append(use)
            self.made.append(is_drafted)


FREE = StepCosts(base_s=0.009, row_s=0.001)
"""Others computed during the probe, for example: drafts seem to cost nothing."""


def test_drafts_that_cost_more_than_they_give_are_given_up_and_nothing_is_seen_any_more() -> None:
    steps = Steps(8, FREE, gain=0.7)
    steps.run(60, plain_s=0.017, drafted_s=0.030)
    assert steps.made[0]
    assert not any(steps.made[52:])
    assert steps.uses[-1] is Use.NONE
    assert not steps.lengths.learns_times


def test_a_larger_batch_whose_drafts_are_dear_stops_none_of_smaller_ones() -> None:
    steps = Steps(8, COSTS, gain=0.7)
    steps.run(60, plain_s=0.017, drafted_s=0.030)
    assert steps.lengths.begin(9) is Use.NONE
    assert steps.lengths.begin(2) is Use.DRAFTED
    assert choose(steps.lengths, chunks(0.35, 0.35)) == [4, 4]


def test_drafts_that_pay_are_made_but_for_one_step_in_sixty_four() -> None:
    steps = Steps(1, COSTS, gain=0.7)
    steps.run(1000, plain_s=0.010, drafted_s=0.0132)
    assert sum(steps.made[100:]) == pytest.approx(900 * 64 / 65, abs=3)
    assert set(steps.uses) == {Use.DRAFTED, Use.OBSERVED}


def test_a_start_that_took_plain_steps_for_slow_and_drafts_for_free_is_seen_through() -> None:
    steps = Steps(8, StepCosts(base_s=0.019, row_s=0.0001), gain=0.7)
    steps.run(1500, plain_s=0.009, drafted_s=0.022)
    assert steps.made[0]
    assert sum(steps.made[52:]) < 90, "13.6 tokens in 22 ms are fewer than 8 in 9"


def test_of_many_sequences_each_is_asked_for_one_token_and_the_surest_are_verified() -> None:
    rows = chunks(*[0.1] * 8)
    assert choose(drafts(), rows) == [1] * 8, "whatever was gained before"
    assert rows[0].keep_from == pytest.approx(0.6 * 0.001 * 8 / 0.017)
    assert choose(drafts(), chunks(*[0.1] * 4)) == [2] * 4
    assert choose(drafts(), rows, budget=3) == [1] * 3 + [0] * 5
    rows[2].seq.prediction, rows[3].seq.prediction = [7, 8, 9], [7, 8, 9]
    rows[2].seq.acceptance, rows[3].seq.acceptance = 0.9, 0.1
    assert choose(drafts(), rows) == [1, 1, 4, 1, 1, 1, 1, 1], "a request's own guess that has been right"


@pytest.mark.parametrize("token_s", [0.0004, 0.001])
def test_what_a_draft_token_costs_beside_many_sequences_is_learned(token_s: float) -> None:
    """Whatever making the draft takes, and in spite of noise."""
    lengths, plain, rng = drafts(), StepShape(8, 8, 0, 0.0, 0), random.Random(3)
    lengths.begin(8)
    for _ in range(200):
        lengths.record_time(plain, 0.017, 0.017 * rng.uniform(0.9, 1.1))
        choose(lengths, chunks(*[0.5] * 8))
        count = rng.randint(0, 7)
        shape = plain._replace(draft_tokens=count, draft_rounds=1)
        lengths.record_time(shape, 0.0176 + 0.001 * count, (0.0186 + token_s * count) * rng.uniform(0.9, 1.1))
    rows = chunks(*[0.5] * 8)
    choose(lengths, rows)
    assert rows[0].keep_from == pytest.approx(8 * token_s / 0.017, abs=0.15)
