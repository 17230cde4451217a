"""What the live runs say, beside their goals. Pure.

Conversations are compared over all rounds: shares from the cache of all prompts' tokens, means of the time to first
token of all requests; the intervals are of the rounds' quotients (Student's, 95 %).
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from bench.routing.summary import Interval, estimate
from bench.routing_live.contest import measure_cached
from penstock_loadtest.results.records import Record


class Reused(NamedTuple):
    """What came of one run of conversations."""

    cached: float
    """Share of the prompts' tokens that was found in a cache."""
    ttft_s: float
    """Mean time to the first token."""
    requests: int
    not_finished: int
    """Requests whose answer was not whole, and turns that therefore never left."""


class Comparison(NamedTuple):
    """The quotients of ours over pinned, of the rounds' means. Intervals are of the quotients of each round."""

    shared_tokens: int
    ours: Reused
    pinned: Reused
    share: Interval
    ttft: Interval

    def is_met(self, least_share: float, most_ttft: float) -> bool:
        """Whether the quotients are within the goals, and every turn was answered."""
        is_whole = not self.ours.not_finished and not self.pinned.not_finished
        return is_whole and self.share.mean >= least_share and self.ttft.mean <= most_ttft


def read_reuse(records: Sequence[Record], turns_not_sent: int) -> Reused:
    """What the records of one run say; at least one request must have got a token."""
    ttfts_s = [record.ttft_s for record in records if record.ttft_s is not None]
    unfinished = sum(record.outcome != "finished" for record in records)
    return Reused(measure_cached(records), fmean(ttfts_s), len(records), unfinished + turns_not_sent)


def compare(shared_tokens: int, ours: Sequence[Reused], pinned: Sequence[Reused]) -> Comparison:
    """The comparison of runs in the same order of rounds."""
    pairs = list(zip(ours, pinned, strict=True))
    return Comparison(
        shared_tokens,
        _average(ours),
        _average(pinned),
        estimate([own.cached / other.cached for own, other in pairs]),
        estimate([own.ttft_s / other.ttft_s for own, other in pairs]),
    )


def _average(runs: Sequence[Reused]) -> Reused:
    return Reused(
        fmean(run.cached for run in runs),
        fmean(run.ttft_s for run in runs),
        sum(run.requests for run in runs),
        sum(run.not_finished for run in runs),
    )


def word(*, is_met: bool) -> str:
    """The verdict as tables have it."""
    return "met" if is_met else "not met"


def show(interval: Interval, digits: int = 3) -> str:
    """A mean with its interval."""
    half = "" if interval.half is None else f" ± {interval.half:.{digits}f}"
    return f"{interval.mean:.{digits}f}{half}"
