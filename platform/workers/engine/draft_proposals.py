"""The choice of proposed tokens that are worth verifying together: those that give a step the most tokens in the least
time, the criterion of SmartSpec (Liu et al. 2024, arXiv 2406.14066), with a length for each sequence. Pure."""

from typing import NamedTuple

from penstock.perf.model import count_tokens
from penstock.wire.frames import StepCosts
from penstock.workers.engine.draft_costs import WORTH_IT
from penstock.workers.engine.draft_prices import Prices, line_s, step_s
from penstock.workers.engine.sequence import StepShape


class Proposal(NamedTuple):
    """A draft's `length`-th token. Sorted, the best comes first, and none before the shorter ones of its sequence."""

    negative_worth: float
    """Minus the chance that the token is kept, -1 to 0."""
    place: int
    """Index of the sequence in the batch; 0 is the first."""
    length: int
    """Number of the draft's tokens up to this one, 1 or more."""
    needs_sampling: bool = False
    """Whether its sequence's tokens take more than the largest logit."""


def choose_proposals(proposals: list[Proposal], budget: int, shape: StepShape, costs: StepCosts) -> list[Proposal]:
    """The proposals of a drafter, at most `budget`, that give the most tokens in the least time; of equals, the most.
    They come in with the best first."""
    # where rounds cost nothing, the greatest length decides nothing
    depths = (
        range(1, max((proposal.length for proposal in proposals), default=0) + 1)
        if costs.draft_round_s
        else (max((g.length for g in proposals), default=0),)
    )
    plain_s = line_s(costs, shape)
    num_computed = count_tokens(shape.rows, shape.prefill_tokens, 0)
    best: list[Proposal] = []
    best_tokens, best_s = float(shape.decode_rows), step_s(costs, shape.rows, num_computed, plain_s)
    for depth in depths:
        candidates = [proposal for proposal in proposals if proposal.length <= depth][:budget]
        tokens, seconds = float(shape.decode_rows), plain_s + depth * costs.draft_round_s
        for count, proposal in enumerate(candidates, 1):
            tokens -= proposal.negative_worth
            seconds += costs.draft_token_s + costs.sampled_row_s * proposal.needs_sampling
            taken_s = step_s(costs, shape.rows, num_computed + count, seconds)
            if tokens * best_s >= best_tokens * taken_s:
                best, best_tokens, best_s = candidates[:count], tokens, taken_s
    return best


def choose_found(proposals: list[Proposal], shape: StepShape, prices: Prices, plain_s: float) -> list[Proposal]:
    """The same of those that were looked up, which take nothing to make; those that gain too little are left. plain_s:
    seconds of the step without any."""
    best, tokens, sampled_s = 0, float(shape.decode_rows), 0.0
    best_tokens, best_s = WORTH_IT * tokens, plain_s
    for count, proposal in enumerate(proposals, 1):
        tokens -= proposal.negative_worth
        sampled_s += prices.costs.sampled_row_s * proposal.needs_sampling
        seconds = plain_s + sampled_s + prices.verified_s(shape, count)
        if tokens * best_s >= best_tokens * seconds:
            best, best_tokens, best_s = count, tokens, seconds
    return proposals[:best]
