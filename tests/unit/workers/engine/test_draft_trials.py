"""Whether drafts are made at all: by what steps with a drafter have given, beside those without a draft among them."""

import math
import random

import pytest

from penstock.workers.engine.draft_trials import (
    FIRST_REST,
    LEAST_PLAIN,
    LEAST_ROWS,
    MANY_EVERY,
    MOST_REST,
    WARMING,
    Trial,
)

SEEN = 1.03
"""What a step takes that the drafter sees, of one that it does not."""


class Run:
    """Steps of a batch, one after the other, with noise."""

    def __init__(self, num_rows: int, seed: int = 1) -> None:
        self.trial, self.num_rows = Trial(), num_rows
        self.tokens = self.seconds = 0.0
        self.drafted: list[bool] = []
        self._rng = random.Random(seed)

    def steps(self, count: int, tokens: float, seconds: float, *, makes_drafts: bool = True) -> None:
        """tokens: of a row in a step with drafts. seconds: what it takes, of one without that is seen too."""
        for _ in range(count):
            is_drafted = self.trial.begin(self.num_rows) and makes_drafts
            noise = math.exp(self._rng.gauss(0, 0.1))
            taken = SEEN * noise * (seconds if is_drafted else 1.0) if self.trial.is_on else 1.0
            gained = self.num_rows
            if is_drafted:
                gained += sum(self._rng.random() < tokens - 1 for _ in range(self.num_rows))
            self.trial.learn(self.num_rows, gained, math.log(taken), is_drafted=is_drafted)
            self.tokens, self.seconds = self.tokens + gained / self.num_rows, self.seconds + taken
            self.drafted.append(is_drafted)


@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_lose_are_given_up_soon_and_tried_at_little_cost(seed: int) -> None:
    run = Run(8, seed)
    run.steps(60, tokens=1.12, seconds=1.25)
    assert not run.trial.is_on
    run.steps(6000, tokens=1.12, seconds=1.25)
    assert run.tokens / run.seconds > 0.985
    assert sum(run.drafted[300:]) >= LEAST_ROWS // 8 - LEAST_PLAIN, "they are tried again"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_rows", [4, 8, 16, 64, 128])
def test_drafts_that_pay_are_made_but_for_one_step_now_and_then(num_rows: int, seed: int) -> None:
    run = Run(num_rows, seed)
    run.steps(2000, tokens=1.3, seconds=1.12)
    assert run.trial.is_on
    assert sum(not drafted for drafted in run.drafted) < 2000 / MANY_EVERY + 2 * LEAST_PLAIN
    assert run.trial.gain == pytest.approx(1.3 / 1.12, rel=0.12)


def test_what_is_only_seen_and_never_drafted_for_is_not_seen_any_more() -> None:
    run = Run(8)
    run.steps(LEAST_ROWS // 8 - 1, tokens=1.0, seconds=1.0, makes_drafts=False)
    assert run.trial.is_on
    run.steps(1, tokens=1.0, seconds=1.0, makes_drafts=False)
    assert not run.trial.is_on


def test_a_rest_ends_with_steps_that_are_only_seen_and_the_next_is_longer() -> None:
    run, rests = Run(8), []
    for _ in range(7):
        while run.trial.is_on:
            run.steps(1, tokens=1.0, seconds=1.3)
        count = 0
        while not run.trial.is_on:
            run.steps(1, tokens=1.0, seconds=1.3)
            count += 1
        rests.append(count)
        before = len(run.drafted)
        run.steps(WARMING, tokens=1.0, seconds=1.3)
        assert not any(run.drafted[before - 1 : before + WARMING - 1])
        assert run.drafted[-1]
    assert rests == [min(MOST_REST, FIRST_REST * 2**number) for number in range(7)]


def test_after_drafts_have_paid_for_a_while_a_rest_is_short_again() -> None:
    run = Run(8)
    run.steps(1500, tokens=1.0, seconds=1.3)
    while not run.trial.is_on:
        run.steps(1, tokens=1.4, seconds=1.1)
    run.steps(500, tokens=1.4, seconds=1.1)
    assert run.trial.is_on
    while run.trial.is_on:
        run.steps(1, tokens=1.0, seconds=1.3)
    count = 0
    while not run.trial.is_on:
        run.steps(1, tokens=1.0, seconds=1.3)
        count += 1
    assert count == FIRST_REST


def test_one_sequence_is_judged_by_as_many_rows() -> None:
    run = Run(1)
    run.steps(LEAST_ROWS - 1, tokens=1.0, seconds=1.3)
    assert run.trial.is_on
    run.steps(1, tokens=1.0, seconds=1.3)
    assert not run.trial.is_on
