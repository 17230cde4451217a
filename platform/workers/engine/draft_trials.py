"""Whether steps of about so many sequences are to be drafted for at all, by what they have given. Pure.

What a drafter gains is predicted before each step (`draft_lengths`), and predictions are off: of costs, of chances,
and of what it takes to see what the model computes. So what steps have given is compared: all steps with the drafter in
use, and those among them that were made without a draft. Of each kind it is the tokens that a row got, divided by the
time that a step took, measured against the time predicted of a step without drafts. Where the drafter gains no more
than what seeing takes, it rests: nothing is drafted, nor seen, and a step costs what it does without a drafter. After a
while it is tried again, each time after a longer one.

Not a choice of sequences or lengths. Invariant: what it decides follows from what was recorded, so a decision that was
wrong is looked at again after MOST_REST steps of that size at the latest.
"""

import math
from dataclasses import dataclass, field

LEAST_ROWS, LEAST_STEPS = 320, 32
"""Rows, and steps, with the drafter in use after which it is decided on, and again after as many."""
LEAST_PLAIN = 10
"""Steps without a draft that there must be among them at first."""
FIRST_EVERY, MANY_EVERY, FEW_EVERY = 4, 16, 64
"""One step in so many is made without a draft, where drafts are made: until there are LEAST_PLAIN, and after that with
MANY rows or more, and with fewer, of which drafts gain more."""
MANY = 4
WARMING = 16
"""Steps that are seen and not drafted for when a rest ends: what a draft is made of is missing until then."""
FIRST_REST, MOST_REST = 400, 6400
"""Steps of the first rest, and of the longest: each is twice as long as the one before, if the trial between failed."""
RECENT_ROWS, RECENT_STEPS = 2048, 256
"""Rows, and steps at the least, that means are of, the latest counting most."""
LEAST_DECISIONS = 3
"""Decisions to go on, one after the other, after which the next rest is a first one again."""
ROW_SEEN, MOST_SEEN = 0.006, 0.05
"""Share of a step's time that the drafter must gain for each row, and for all rows at the most. Seeing rows and prompts
takes as much, which the comparison can't tell, since steps without a draft are seen too; nor what scheduling drafts
takes, which is in no step's time."""


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def fade(self, share: float) -> None:
        self.total, self.weight = share * self.total, share * self.weight

    def learn(self, value: float) -> None:
        self.total, self.weight = self.total + value, self.weight + 1


@dataclass(slots=True)
class Trial:
    """Whether the drafter is in use for batches of one size, and what that follows from."""

    is_on: bool = True
    """Whether the drafter is in use."""
    _tokens: _Mean = field(default_factory=_Mean)
    """Tokens of a row in steps with the drafter in use."""
    _off: _Mean = field(default_factory=_Mean)
    """Logarithm of what they took, of what is predicted of one without drafts."""
    _plain_off: _Mean = field(default_factory=_Mean)
    """The same of those without a draft."""
    _num_plain: int = 0
    """Steps without a draft since the last rest."""
    _num_rows: int = 0
    """Rows since it was decided."""
    _num_steps: int = 0
    """Steps since then."""
    _num_decisions: int = 0
    """Decisions to go on since the last rest."""
    _rest: int = FIRST_REST
    _num_left: int = 0
    """Steps of the rest that are left."""
    _num_warming: int = 0
    """Steps that are still to be seen and not drafted for."""
    _num_drafted: int = 0
    """Steps with drafts since the last one without."""

    @property
    def gain(self) -> float:
        """Tokens a second with the drafter in use, of those of steps without a draft; 1 where it isn't known."""
        if not self._tokens.weight or not self._plain_off.weight:
            return 1.0
        return self._tokens.value * math.exp(self._plain_off.value - self._off.value)

    def begin(self, num_rows: int) -> bool:
        """Begin a step. Returns whether there may be drafts in it; it is seen if `is_on`."""
        if not self.is_on:
            self._num_left -= 1
            if self._num_left > 0:
                return False
            self.is_on, self._num_warming = True, WARMING
            self._num_plain = self._num_rows = self._num_steps = self._num_decisions = self._num_drafted = 0
            self._tokens, self._off, self._plain_off = _Mean(), _Mean(), _Mean()
        if self._num_warming:
            self._num_warming -= 1
            return False
        later = MANY_EVERY if num_rows >= MANY else FEW_EVERY
        if self._num_drafted >= (FIRST_EVERY if self._num_plain < LEAST_PLAIN else later):
            self._num_drafted = 0  # whatever the step tells: it may be one with a prompt
            return False
        return True

    def learn(self, num_rows: int, num_tokens: float, off: float, *, is_drafted: bool) -> None:
        """Learn from a step that was seen and gave `num_tokens` to its rows. off: logarithm of what it took, of what is
        predicted of one without drafts."""
        if not self.is_on:
            return
        share = max(1 - num_rows / RECENT_ROWS, 1 - 1 / RECENT_STEPS)
        for mean in (self._tokens, self._off, self._plain_off):
            mean.fade(share)  # all alike, so that what changes in time changes all of them
        if is_drafted:
            self._num_drafted += 1
        else:
            self._num_drafted = 0
            self._num_plain += 1
            self._plain_off.learn(off)
        if self._num_warming:
            return
        self._off.learn(off)
        self._tokens.learn(num_tokens / num_rows)
        self._num_rows += num_rows
        self._num_steps += 1
        if self._num_rows >= LEAST_ROWS and self._num_steps >= LEAST_STEPS and self._num_plain >= LEAST_PLAIN:
            self._decide(num_rows)

    def _decide(self, num_rows: int) -> None:
        self._num_rows = self._num_steps = 0
        self._num_decisions += 1
        if self.gain < 1 + min(MOST_SEEN, ROW_SEEN * num_rows):
            self.is_on, self._num_left = False, self._rest
            self._rest = min(MOST_REST, 2 * self._rest)
        elif self._num_decisions >= LEAST_DECISIONS:
            self._rest = FIRST_REST
