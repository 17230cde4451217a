"""How many tokens to draft for each sequence of a step: as many as pay, none where none does. Pure.

A draft's j-th token is kept with probability a**j, a being the estimated chance that the target agrees with one more
proposal. Tokens a step gains are (decode rows + sum of those), its time is the performance model's. For every greatest
length, drafts are taken in order of worth for as long as the ratio, the goodput, rises (`draft_proposals`).

A drafter that says what chance each of its tokens has (a draft head, whose scores tell, as EAGLE-2 found: Li et al.
2024, arXiv 2406.16858) is bounded by that instead: a token is verified where its chance is worth its row, and the next
one computed where it may be. What is decided before is whether a sequence's drafts pay at all, by the tokens that they
have gained so far.

Not a drafter, and without influence on an answer's tokens: any length gives the same ones.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.wire.frames import StepCosts
from penstock.workers.engine.draft_costs import ATTEMPT_RATE, Attempts, Off, TokenTimes, log_ratio
from penstock.workers.engine.draft_prices import Prices
from penstock.workers.engine.draft_proposals import Proposal, choose_found, choose_proposals
from penstock.workers.engine.draft_trials import MANY, Trial
from penstock.workers.engine.lookups import LENGTHS, Chances, look_up
from penstock.workers.engine.sequence import Chunk, Sequence, Step, StepShape

FIRST_ACCEPTANCE = 0.7
"""Chance that a proposal is accepted, assumed of a pool's drafter before anything is measured."""
SEQUENCE_RATE, POOL_RATE = 0.1, 0.03
"""Share of the way that one verified proposal moves the estimate of its sequence, and that of the pool, where a new
sequence starts."""
MAX_ACCEPTANCE = 0.98
"""Upper bound of an estimate when drafts are weighed."""
FORGET_RATE = 0.01
"""Share of the way that a step without a draft moves a sequence's estimate towards the pool's: answers change their
nature."""
RETRY_EVERY = 64
"""Number of steps in which no draft paid until one token is drafted for one sequence all the same: the estimate of what
is never tried can't change."""

NEXT_CHANCE = 0.6
"""Chance of another token behind one that is right, before it is computed."""
MOST_LOOKED_UP = 16
"""Sequences of a step beyond which nothing is looked up: a row more is dear then, and each search takes the engine's
time."""
FEW, LONG_LENGTHS = 3, (8, 6)
"""Sequences of a step beyond which only so many tokens of a suffix are looked up: shorter matches are right half of the
time, which gains nothing there and leaves the drafter no place."""
MANY_DRAFTS = 8
"""Tokens that MANY sequences and more are asked for together, one each at the least. All are asked, for a round for all
takes hardly longer than one for some, and what is verified is chosen by its chance."""


class Use(Enum):
    """What a step may do with the drafter."""

    DRAFTED = "drafted"
    """Draft, where that pays."""
    OBSERVED = "observed"
    """See what is computed, and no more."""
    NONE = "none"


class DraftLengths:
    """Chooses how many tokens to draft, learns how often they are accepted, and counts both for the metrics."""

    def __init__(self, max_draft_tokens: int, *, is_adaptive: bool = True, knows_chances: bool = False) -> None:
        """max_draft_tokens: most tokens of one sequence in a step. is_adaptive: False drafts as much as is allowed,
        whether it pays or not. knows_chances: whether the drafter keeps to `Chunk.keep_from` and `go_from`."""
        self.max_draft_tokens = max_draft_tokens
        self._is_adaptive = is_adaptive
        self._knows_chances = knows_chances
        self._num_idle_steps = 0
        self.num_drafted = 0
        """Draft tokens verified since the start."""
        self.num_accepted = 0
        """Draft tokens accepted since the start."""
        self._num_gained = 0
        """Accepted tokens of the drafter itself, without those out of predictions, where it knows chances."""
        self._num_looked_up = 0
        """Accepted tokens that were looked up."""
        self._num_expected = 0.0
        """Tokens that look-ups are expected to gain in the step that is being made."""
        self._acceptance = FIRST_ACCEPTANCE
        self._sizes: dict[int, _Size] = {}
        """What is known of steps by how many binary digits the number of sequences has: 1, 2 to 3, 4 to 7, and so
        on."""
        self._size = self._size_of(1)
        """What is known of steps like the one that is being made."""
        self._plain_s = 0.0
        """Seconds that it is predicted to take without drafts; 0: that is not known."""
        self._pending: _Pending | None = None
        self._chances = Chances()
        self.prices = Prices()
        self._use = Use.DRAFTED
        """What the step that is being made may do with the drafter."""

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up besides (`look_up`)."""
        return self._knows_chances and self._is_adaptive

    @property
    def learns_times(self) -> bool:
        """Whether it wants to know what the step that has been made takes."""
        return self._knows_chances and self._is_adaptive and self._size.trial.is_on

    def begin(self, num_seqs: int, costs: StepCosts | None = None) -> Use:
        """Begin a step of about so many sequences. costs: as of `choose`; None: as before."""
        if not self.looks_up:
            return Use.DRAFTED
        self.prices.costs = self.prices.costs if costs is None else costs
        if self._pending is not None:
            size, num_rows, off, is_drafted, num_gained, num_looked_up = self._pending
            # what a row gets beside what it gets without the drafter, look-ups counted in both
            beside = num_rows + self._num_looked_up - num_looked_up
            share = (beside + self._num_gained - num_gained) / beside
            size.trial.learn(num_rows, num_rows * share, off, is_drafted=is_drafted)
            self._pending = None
        self._num_expected = 0.0
        self._size, self._plain_s = self._size_of(num_seqs), 0.0
        if self._size.trial.begin(num_seqs):
            self._use = Use.DRAFTED
        else:
            self._use = Use.OBSERVED if self._size.trial.is_on else Use.NONE
        return self._use

    def record_time(self, shape: StepShape, predicted_s: float, seconds: float) -> None:
        """Learn from the step that has been made how long steps with drafts take, of what is predicted, beside others
        of about as many sequences: the line of costs knows nothing of products that get dear from some number of rows
        on."""
        if shape.prefill_tokens or not shape.decode_rows or predicted_s <= 0 or seconds <= 0:
            return
        is_drafted, size = shape.draft_rounds > 0, self._size
        plain_s = self._plain_s
        if not is_drafted:
            plain_s = predicted_s = predicted_s + self.prices.correction_s(shape)
        elif self.prices.times is not None:
            made_s = self.prices.made_s(shape, shape.draft_rounds)
            predicted_s = plain_s + made_s + self.prices.verified_s(shape, shape.draft_tokens)
        if predicted_s <= 0 or plain_s <= 0:
            return
        size.off.learn(log_ratio(seconds, predicted_s), is_drafted=is_drafted)
        off = log_ratio(seconds, plain_s)
        if is_drafted:
            size.token_times.learn(shape.draft_tokens, off, self.prices.made_s(shape, shape.draft_rounds) / plain_s)
        else:
            size.token_times.learn_plain(off)
        if shape.decode_rows > shape.looked_up_rows:  # else there was nothing left for the drafter
            self._pending = _Pending(size, shape.decode_rows, off, is_drafted, self._num_gained, self._num_looked_up)

    def look_up(
        self,
        step: Step,
        chunks: list[Chunk],
        caps: list[int],
        costs: StepCosts,
        budget: int,
        *,
        beside_drafter: bool,
    ) -> None:
        """Look up drafts for decoding `chunks` of a step, and set those that pay; none in large batches. The other
        arguments are those of `choose`. beside_drafter: whether a sequence for which the drafter may be worth more is
        left to it."""
        if len(chunks) > MOST_LOOKED_UP:
            return
        lengths = LENGTHS if len(chunks) <= FEW else LONG_LENGTHS
        found = [
            look_up(chunk.seq.packed, chunk.seq.token_ids, cap, lengths)
            for chunk, cap in zip(chunks, caps, strict=True)
        ]
        if not any(found):
            return
        self.prices.costs, shape, counts = costs, step.shape, [0] * len(chunks)
        plain_s = self.prices.plain_s(shape)
        # what is looked up takes nothing to make
        made = self.prices.made_s(shape, 1) / plain_s if plain_s > 0 else 0.0
        proposals: list[Proposal] = []
        for place, (chunk, own) in enumerate(zip(chunks, found, strict=True)):
            if own is None:
                continue
            chances = self._chances.list(own.num_matched, len(own.token_ids))
            if beside_drafter and sum(chances) < self._gain(chunk.seq) - made:
                found[place] = None
            else:
                needs_sampling = chunk.seq.needs_sampling
                proposals += [Proposal(-chance, place, n, needs_sampling) for n, chance in enumerate(chances, 1)]
        for proposal in choose_found(sorted(proposals)[:budget], shape, self.prices, plain_s):
            counts[proposal.place] += 1
            self._num_expected -= proposal.negative_worth
        for count, chunk, own in zip(counts, chunks, found, strict=True):
            if own is not None and count:
                chunk.draft, chunk.num_matched, chunk.num_rounds = own.token_ids[:count], own.num_matched, 0
            elif own is not None:
                self._chances.forget(own.num_matched)

    def record_look_up(self, num_matched: int, num_looked_up: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft that was looked up behind `num_matched` tokens, as `record` does. num_looked_up:
        its tokens before a grammar cut those off that it refuses, which counts as one that was not kept."""
        self._chances.learn(num_matched, num_looked_up, num_accepted)
        self._num_looked_up += num_accepted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def choose(
        self, chunks: list[Chunk], caps: list[int], shape: StepShape, costs: StepCosts, budget: int
    ) -> list[int]:
        """Draft tokens for each of the decoding `chunks`, at most caps[i], together at most `budget` >= 0.

        shape: the step's without drafts. Costs that are all 0 are unknown: everything pays.
        """
        if self._knows_chances and self._is_adaptive:
            return self._choose_attempts(chunks, caps, shape, costs, budget)
        worths = (enumerate(self._worths(chunk.seq, caps[place]), 1) for place, chunk in enumerate(chunks))
        proposals = sorted(
            Proposal(-worth, place, length, chunks[place].seq.needs_sampling)
            for place, row in enumerate(worths)
            for length, worth in row
        )
        chosen = choose_proposals(proposals, budget, shape, costs) if self._is_adaptive else proposals[:budget]
        chosen = chosen or proposals[: min(budget, self._num_retried())]
        self._num_idle_steps = 0 if chosen else self._num_idle_steps + 1
        counts = [0] * len(chunks)
        for proposal in chosen:
            counts[proposal.place] += 1
        for count, chunk in zip(counts, chunks, strict=True):
            if not count and chunk.seq.acceptance is not None:
                chunk.seq.acceptance += FORGET_RATE * (self._acceptance - chunk.seq.acceptance)
        return counts

    def record(self, seq: Sequence, num_drafted: int, num_accepted: int, num_rounds: int | None = None) -> None:
        """Learn from a verified draft: its first `num_accepted` tokens were kept; the next one, if there was one, was
        not. num_rounds: tokens that were computed for it, where the drafter says so; then an empty draft counts too."""
        if num_rounds is not None:
            attempts = self._size.attempts
            attempts.record(num_rounds, num_drafted, num_accepted)
            self._num_gained += num_accepted
            gain = attempts.gain if seq.draft_gain is None else seq.draft_gain
            seq.draft_gain = gain + ATTEMPT_RATE * (num_accepted - gain)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        own = self._acceptance if seq.acceptance is None else seq.acceptance
        for place in range(min(num_drafted, num_accepted + 1)):
            is_accepted = place < num_accepted
            own += SEQUENCE_RATE * (is_accepted - own)
            self._acceptance += POOL_RATE * (is_accepted - self._acceptance)
        seq.acceptance = own

    def _choose_attempts(
        self, chunks: list[Chunk], caps: list[int], shape: StepShape, costs: StepCosts, budget: int
    ) -> list[int]:
        """`choose` for a drafter that knows chances. Drafts out of predictions count like its own."""
        counts = [0] * len(chunks)
        attempts, rows = self._size.attempts, shape.decode_rows
        num_expected = rows + self._num_expected
        order = sorted(
            (place for place, cap in enumerate(caps) if cap), key=lambda place: -self._gain(chunks[place].seq)
        )
        most = min(budget, sum(caps))
        prices = self.prices
        prices.costs = costs
        plain_s, factor = prices.plain_s(shape), 1.0
        call_s, round_s = prices.making_s(len(order))
        token_s = prices.token_s(shape, plain_s, round(attempts.num_verified * len(order)), most)
        token_s += costs.sampled_row_s * any(chunks[place].seq.needs_sampling for place in order)
        self._plain_s = plain_s
        if plain_s > 0 and rows < MANY:
            off = self._size.off
            gains = [self._gain(chunks[place].seq) for place in order]
            whole_s = round_s + call_s / max(1.0, attempts.num_rounds)
            num_tried = attempts.choose(gains, num_expected, plain_s, token_s, whole_s, off.longer)
            order = order[: num_tried or min(1, self._num_retried())]
            factor = off.factor(plain_s, attempts.extra_s(len(order), token_s, whole_s))
        elif plain_s > 0 and prices.times is not None:
            # all or none: whom earlier drafts gained much for is chance; predictions take nothing to make
            drafts_s = attempts.extra_s(len(order), token_s, round_s + call_s / max(1.0, attempts.num_rounds))
            if plain_s * len(order) * attempts.gain < num_expected * drafts_s:
                order = [place for place in order if chunks[place].seq.prediction] or order[
                    : min(1, self._num_retried())
                ]
        keep_from = go_from = 0.0
        lengths = [self.max_draft_tokens] * len(chunks)
        if plain_s > 0 and order:
            pace_s = plain_s / max(1.0, num_expected)
            keep_from = factor * token_s / pace_s
            if rows >= MANY:
                keep_from = num_expected * self._size.token_times.find_share(token_s / plain_s)
                lengths = [self._length_beside(rows, chunk.seq, keep_from) for chunk in chunks]
            go_from = (keep_from + factor * round_s / len(order) / pace_s) / NEXT_CHANCE
        for place in order:
            counts[place] = min(caps[place], budget, lengths[place])
            budget -= counts[place]
        self._num_idle_steps = 0 if any(counts) else self._num_idle_steps + 1
        for count, chunk in zip(counts, chunks, strict=True):
            if count and plain_s > 0:
                chunk.keep_from, chunk.go_from = keep_from, go_from
            elif not count and chunk.seq.draft_gain is not None:
                chunk.seq.draft_gain += FORGET_RATE * (attempts.gain - chunk.seq.draft_gain)
        return counts

    def _length_beside(self, rows: int, seq: Sequence, keep_from: float) -> int:
        """Most tokens to ask for beside MANY rows or more: of a prediction as many as are likely enough to be kept."""
        length = max(1, MANY_DRAFTS // rows)
        if not seq.prediction:
            return length
        return max(length, sum(worth >= keep_from for worth in self._worths(seq, self.max_draft_tokens)))

    def _gain(self, seq: Sequence) -> float:
        return self._size.attempts.gain if seq.draft_gain is None else seq.draft_gain

    def _size_of(self, num_seqs: int) -> "_Size":
        return self._sizes.setdefault(num_seqs.bit_length(), _Size())

    def _worths(self, seq: Sequence, cap: int) -> list[float]:
        acceptance = min(MAX_ACCEPTANCE, self._acceptance if seq.acceptance is None else seq.acceptance)
        return [acceptance**length for length in range(1, cap + 1)]

    def _num_retried(self) -> int:
        return 1 if self._num_idle_steps >= RETRY_EVERY else 0


@dataclass(slots=True)
class _Size:
    """What is known of steps of about so many sequences."""

    trial: Trial = field(default_factory=Trial)
    off: Off = field(default_factory=Off)
    attempts: Attempts = field(default_factory=Attempts)
    token_times: TokenTimes = field(default_factory=TokenTimes)


class _Pending(NamedTuple):
    """A step that has been computed, and whose tokens are not known yet."""

    size: _Size
    num_rows: int
    off: float
    """Logarithm of what it took, of what is predicted of it without drafts."""
    is_drafted: bool
    num_gained: int
    """Tokens that the drafter had gained before it."""
    num_looked_up: int
    """Tokens that look-ups had gained before it."""
