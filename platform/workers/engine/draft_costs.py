"""What drafts have cost and gained, as far as steps have shown it, in batches of about one size. Pure."""

import math
from dataclasses import dataclass

FIRST_GAIN = 1.0
"""Tokens that an attempt gains, assumed of a pool's drafter that knows chances before anything is measured."""
ATTEMPT_RATE, POOL_ATTEMPT_RATE = 0.05, 0.02
"""Shares of the way that an attempt moves the mean gain of its sequence's attempts, and that of the pool's."""
WORTH_IT = 1.03
"""Tokens a second with drafts, of those without, from which on sequences are drafted for: predictions of costs and of
gains are off by as much, and where all is as predicted little is lost below it."""
OFF_RATE, OFF_FORGET_RATE, MOST_OFF = 0.1, 0.003, 3.0
"""Shares of the way that one step moves how far predictions are off, the first steps with drafts more, and that a step
without drafts lets it be forgotten that those with drafts take longer, for they are not made where they don't pay; and
by how much one may be off at most: where others compute during the probe at start, drafts can look as if they cost
nothing, or several times what they do."""
MOST_FACTOR = 4.0
"""What a draft's token and round are taken to cost by what has been learned, of what the probe says, or its inverse, at
the most."""
RECENT = 64
"""Steps that the price of a draft token is learned from, the latest counting most."""
OPTIMISM = 0.6
"""Share of the price by the costs that is assumed at first: what is never verified can't prove cheap."""
ASSUMED = 100.0
"""Weight of the assumed price beside learned ones, in squared tokens."""
MOST_PRICE = 2.0
"""Times of the assumed price that the learned one may be, or its inverse, at the most."""


@dataclass(slots=True)
class Off:
    """What steps take beside what is predicted: logarithms."""

    plain: float = 0.0
    drafted: float = 0.0
    num_drafted: int = 0
    """Steps with drafts that have been seen."""

    @property
    def longer(self) -> float:
        """What steps with drafts take, of what is predicted, beside others."""
        if not self.num_drafted:
            return 1.0
        return min(max(math.exp(self.drafted - self.plain), 1 / MOST_OFF), MOST_OFF)

    def factor(self, plain_s: float, drafts_s: float) -> float:
        """What drafts take, of the `drafts_s` that they are predicted to take beside a step of `plain_s`."""
        if not drafts_s:
            return 1.0
        taken_s = (plain_s + drafts_s) * self.longer - plain_s
        return min(max(taken_s / drafts_s, 1 / MOST_FACTOR), MOST_FACTOR)

    def learn(self, off: float, *, is_drafted: bool) -> None:
        if is_drafted:
            before = self.drafted if self.num_drafted else self.plain
            self.num_drafted += 1
            self.drafted = before + max(OFF_RATE, 1 / (self.num_drafted + 3)) * (off - before)
            return
        self.plain += OFF_RATE * (off - self.plain)
        if self.num_drafted and self.drafted > self.plain:
            self.drafted += OFF_FORGET_RATE * (self.plain - self.drafted)


@dataclass(slots=True)
class Attempts:
    """What attempts of a drafter that knows chances have come to on average, the latest counting most."""

    gain: float = FIRST_GAIN
    """Tokens kept."""
    num_rounds: float = 1.0
    """Tokens computed."""
    num_verified: float = 1.0

    def record(self, num_rounds: int, num_verified: int, num_accepted: int) -> None:
        self.num_rounds += POOL_ATTEMPT_RATE * (num_rounds - self.num_rounds)
        self.num_verified += POOL_ATTEMPT_RATE * (num_verified - self.num_verified)
        self.gain += POOL_ATTEMPT_RATE * (num_accepted - self.gain)

    def extra_s(self, count: int, token_s: float, round_s: float) -> float:
        """Seconds that drafts for `count` sequences take in a step."""
        return self.num_rounds * round_s + count * self.num_verified * token_s if count else 0.0

    def choose(
        self, gains: list[float], num_rows: float, plain_s: float, token_s: float, round_s: float, longer: float = 1.0
    ) -> int:
        """How many of the sequences that gain so much, falling, are to be drafted for: as many as give the most tokens
        in the least time, beside `num_rows` in a step that takes `plain_s` without. longer: what steps with drafts
        take, of what these costs say."""
        best, best_tokens, best_s = 0, WORTH_IT * num_rows, plain_s / longer
        tokens, seconds = num_rows, plain_s + self.num_rounds * round_s
        for count, gain in enumerate(gains, 1):
            tokens, seconds = tokens + gain, seconds + self.num_verified * token_s
            if tokens * best_s > best_tokens * seconds:
                best, best_tokens, best_s = count, tokens, seconds
        return best


@dataclass(slots=True)
class TokenTimes:
    """What verifying a draft token takes, of a step without drafts: the slope of a line through the latest steps."""

    plain: float = 0.0
    """Mean of the logarithms of what steps without a draft took, of what is predicted."""
    num_plain: int = 0
    count: float = 0.0
    tokens: float = 0.0
    share: float = 0.0
    """Means of the draft tokens, and of the share of a step that drafts took."""
    variance: float = 0.0
    covariance: float = 0.0
    """Sums of the products of what they are off their means."""

    def learn_plain(self, off: float) -> None:
        self.num_plain += 1
        self.plain += max(1 / RECENT, 1 / self.num_plain) * (off - self.plain)

    def learn(self, num_tokens: int, off: float, rounds_share: float) -> None:
        """rounds_share: of a step, what making the draft is taken to take."""
        kept = 1 - 1 / RECENT
        share = math.exp(off - self.plain) - 1 - rounds_share
        self.count = kept * self.count + 1
        beside = num_tokens - self.tokens
        self.tokens += beside / self.count
        self.share += (share - self.share) / self.count
        self.variance = kept * self.variance + beside * (num_tokens - self.tokens)
        self.covariance = kept * self.covariance + beside * (share - self.share)

    def find_share(self, assumed: float) -> float:
        """A token's share of a step, where `assumed` is what the costs say."""
        assumed *= OPTIMISM
        slope = (self.covariance + ASSUMED * assumed) / (self.variance + ASSUMED)
        return min(max(slope, assumed / MOST_PRICE), assumed * MOST_PRICE)


def log_ratio(seconds: float, predicted_s: float) -> float:
    return math.log(min(max(seconds / predicted_s, 1 / MOST_OFF), MOST_OFF))
