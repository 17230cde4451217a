"""Beam search: of the continuations of some answers, the likeliest go on (the algorithm of transformers' `generate`
with `num_beams` and `early_stopping=False`). Pure; no blocks, no torch.

Every beam's likeliest tokens are candidates, with the log probabilities of its tokens summed. Of the best
`num_beams` candidates those that end an answer are hypotheses, whose score is that sum divided by a power of their
length; the best others go on. It ends when no beam can beat the worst of `num_beams` hypotheses any more, or at the
greatest length. Of equal candidates the one of the earlier beam, then with the lower token, comes first. Nothing is
drawn: a search that starts over finds the same.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.wire.frames import BeamOutput, Finish, SamplingParams, TokenLogprobs


class Continuation(NamedTuple):
    """A beam with one token more."""

    negative_score: float
    """Minus the summed log probabilities. Sorted, the best comes first."""
    beam: int
    """Index of the beam that goes on."""
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Path:
    """The output of a beam so far, and what it scores."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    """Summed log probabilities."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token; empty where nobody wants them."""


class Hypothesis(NamedTuple):
    score: float
    path: Path
    finish: Finish


class BeamSearch:
    """The search of one request, from its prompt on."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        """params: with `num_beams` of 1 or more, as the request has them."""
        self._params = params
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.paths = [Path()]
        """The beams that go on; one, without a token, at the beginning."""
        self._num_steps = 0
        self._finished: list[Hypothesis] = []

    def start_over(self) -> None:
        """Forget all but the parameters: its beams are gone."""
        self.paths = [Path()]
        self._finished = []
        self._num_steps = 0

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens of each beam that must be known: enough go on whatever ends there."""
        return max(2, 1 + len(self._ends)) * self._params.num_beams

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all beams, those included that were given up."""
        return self._num_steps * self._params.num_beams

    @property
    def num_output_tokens(self) -> int:
        return len(self.paths[0].token_ids)

    def advance(self, rows: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Take the likeliest tokens behind each beam, `num_candidates` of them. Returns the beams that go on, as
        continuations of the ones before; none when the search is over, and `best` has its result."""
        num_beams, length = self._params.num_beams, self.num_output_tokens + 1
        self._num_steps += 1
        best = heapq.nsmallest(self.num_candidates, self._candidates(rows))
        candidates = [Continuation(*each) for each in best]
        is_longest = length >= self._params.max_tokens
        going = [each for each in candidates if not is_longest and each.token_id not in self._ends][:num_beams]
        for each in candidates[:num_beams]:
            if is_longest or each.token_id in self._ends:
                self._add(each, rows, length)
        self.paths = [self._extend(each, rows) for each in going]
        return going if going and self._can_improve(length) else []

    def best(self) -> list[BeamOutput]:
        """The best hypotheses, at most `num_returned`, when the search is over."""
        kept = sorted(self._finished, key=lambda each: -each.score)[: self._params.num_returned]
        return [BeamOutput([*each.path.token_ids], each.finish, self._shown(each.path)) for each in kept]

    def _candidates(self, rows: Sequence[TokenLogprobs]) -> Iterator[tuple[float, int, int, float]]:
        """Continuations as bare tuples: of thousands a few are kept."""
        may_end = self.num_output_tokens >= self._params.min_tokens
        for beam, (path, row) in enumerate(zip(self.paths, rows, strict=True)):
            for token_id, logprob in row.top:
                if may_end or token_id not in self._ends:
                    yield -(path.score + logprob), beam, token_id, logprob

    def _extend(self, each: Continuation, rows: Sequence[TokenLogprobs]) -> Path:
        before = self.paths[each.beam]
        logprobs = before.logprobs
        if self._params.logprobs is not None:
            shown = TokenLogprobs(each.logprob, rows[each.beam].top[: self._params.logprobs])
            logprobs = (*logprobs, shown)
        return Path((*before.token_ids, each.token_id), -each.negative_score, logprobs)

    def _add(self, each: Continuation, rows: Sequence[TokenLogprobs], length: int) -> None:
        """Add a hypothesis, and drop the worst if there are too many; of equals the older is kept."""
        finish = Finish.STOP if each.token_id in self._ends else Finish.LENGTH
        score = -each.negative_score / length**self._params.length_penalty
        self._finished.append(Hypothesis(score, self._extend(each, rows), finish))
        self._finished = sorted(self._finished, key=lambda found: -found.score)[: self._params.num_beams]

    def _can_improve(self, length: int) -> bool:
        """Whether the best beam, were it to end now, would beat the worst hypothesis."""
        if len(self._finished) < self._params.num_beams:
            return True
        best: float = self.paths[0].score / length**self._params.length_penalty
        return best > self._finished[-1].score

    def _shown(self, path: Path) -> list[TokenLogprobs] | None:
        return None if self._params.logprobs is None else [*path.logprobs]
