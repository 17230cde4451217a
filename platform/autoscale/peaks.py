"""The most of a number of replicas within a span of time, without all the numbers in it. Pure.

Peaks are kept with the oldest first, and each is larger than the next: a number is forgotten once a later one is as
large, because it can't be the most any more. So there are never more of them than replicas a pool may have.
"""

from typing import NamedTuple


class Peak(NamedTuple):
    at_s: float
    """Time at which the number was last needed."""
    replicas: int


def note_peak(peaks: tuple[Peak, ...], newest: Peak, keep_s: float) -> tuple[Peak, ...]:
    """The peaks with the newest, and without those that are older than `keep_s` by then."""
    kept = [peak for peak in peaks if peak.replicas > newest.replicas and newest.at_s - peak.at_s <= keep_s]
    return (*kept, newest)


def highest(peaks: tuple[Peak, ...], now: float, keep_s: float) -> int:
    """The largest number of the last `keep_s` seconds; 0 where there is none."""
    return max((peak.replicas for peak in peaks if now - peak.at_s <= keep_s), default=0)
