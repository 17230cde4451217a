"""The outcome of one request against the targets of its class, as the gateway saw it. Pure.

Not the deadline, which ends a request, and no judgement of answers. A request fails where the platform could not answer
it; not where the caller was wrong, had reached a limit of its own, or left. Invariant: a request has one outcome or
none, the first that holds of failed, ttft, tpot and met.
"""

from enum import StrEnum
from typing import NamedTuple

from penstock.router.completions.completion import Choice, Completion
from penstock.router.transport.client import ClientGone
from penstock.wire.errors import BudgetSpent, RateLimited, RequestError
from penstock.wire.targets import Target


class Outcome(StrEnum):
    """What became of a request."""

    FAILED = "failed"
    """The request was refused for want of capacity, ended by its deadline, or broke."""
    TTFT = "ttft"
    """The first token came later than the target."""
    TPOT = "tpot"
    """The tokens after the first took longer than the target, on the average of its slowest choice."""
    MET = "met"


class Timing(NamedTuple):
    """What the gateway saw of one request, seconds."""

    waited_s: float
    """Time from the request's arrival until now, when it is over."""
    ttft_s: float | None = None
    """Time from the request's arrival to the first token of any choice; None: there was none."""
    tpot_s: float | None = None
    """Mean time per output token after the first, of the choice where it was longest; None: no choice has a second
    token, or all came at once."""


def time_request(completion: Completion | None, began_s: float, now: float) -> Timing:
    """Times of a request that is over. completion: None where it had no sequences yet. began_s, now: on its clock."""
    choices = [] if completion is None else [choice for prompt in completion.prompts for choice in prompt]
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    tpots = [found for choice in choices if (found := tpot_of(choice)) is not None]
    return Timing(now - began_s, min(firsts) - began_s if firsts else None, max(tpots, default=None))


def tpot_of(choice: Choice) -> float | None:
    """Mean time per output token after the first, seconds. Returns None for fewer than two tokens, and for beams, whose
    tokens come at once."""
    if choice.first_token_s is None or choice.num_tokens < 2 or choice.generation.sampling.num_beams:
        return None
    return (choice.last_token_s - choice.first_token_s) / (choice.num_tokens - 1)


def judge(target: Target, timing: Timing, error: BaseException | None, *, is_admitted: bool) -> Outcome | None:
    """The outcome of a request that is over. Returns None for one that counts nowhere.

    error: what ended it; None: it finished. is_admitted: it has passed the limits of its tenant, so that a RateLimited
    comes of a full queue. A request whose client left counts if its first token was late by then, and nowhere else.
    """
    if _has_failed(error, is_admitted=is_admitted):
        return Outcome.FAILED
    if error is not None and not has_left(error):
        return None
    first_s = timing.waited_s if timing.ttft_s is None else timing.ttft_s
    if target.ttft_s is not None and first_s > target.ttft_s:
        return Outcome.TTFT
    if error is not None:
        return None
    if target.tpot_s is not None and timing.tpot_s is not None and timing.tpot_s > target.tpot_s:
        return Outcome.TPOT
    return Outcome.MET


def has_left(error: BaseException) -> bool:
    """Whether the client left, or the gateway ends: either cancels the request, and a cancellation is no Exception."""
    return isinstance(error, ClientGone) or not isinstance(error, Exception)


def _has_failed(error: BaseException | None, *, is_admitted: bool) -> bool:
    if error is None or has_left(error) or isinstance(error, RequestError):
        return False
    if isinstance(error, BudgetSpent):
        return False
    return is_admitted or not isinstance(error, RateLimited)
