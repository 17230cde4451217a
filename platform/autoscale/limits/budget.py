"""Replicas of several pools under one budget of GPUs. Pure.

Floors come first, by priority; then, from the highest priority down, what pools want beyond them. Of equals what a pool
has comes before what another one wants, so that equals never take replicas from each other; what is left goes one by
one to the pool with the fewest GPUs. `divide` says what each should have; `grant` what it may have now, since GPUs of
replicas that still stop can't be given twice. Invariants: neither exceeds the budget; a pool never gets less because
one of lower priority wants more.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple


class Claim(NamedTuple):
    """What a pool has, needs and wants, in replicas."""

    pool: str
    priority: int
    gpus: int
    """GPUs that one replica takes, at least 1."""
    least: int
    """Replicas that it is to have first."""
    wanted: int
    """Replicas that it would have without a budget; not below `least`."""
    target: int = 0
    """Replicas that were asked for."""
    num_held: int = 0
    """Replicas that hold GPUs, stopping ones included; at least those asked for count."""


def divide(gpus: int, claims: Sequence[Claim]) -> dict[str, int]:
    """The replicas that each pool should have out of so many GPUs. Of equals the earlier claim comes first."""
    by_priority = sorted(claims, key=lambda claim: -claim.priority)
    given = dict.fromkeys((claim.pool for claim in claims), 0)
    left = _fill(gpus, given, [(claim, claim.least) for claim in by_priority])
    for _, equals in groupby(by_priority, key=lambda claim: claim.priority):
        members = list(equals)
        left = _fill(left, given, [(claim, min(claim.target, claim.wanted)) for claim in members])
        left = _share(left, given, members)
    return given


def grant(gpus: int, claims: Sequence[Claim], shares: Mapping[str, int]) -> dict[str, int]:
    """The replicas that each pool may have now: its share at once where that is no more than it has, and else as much
    of it as others don't hold. shares: as divided."""
    free = gpus - sum(claim.gpus * max(claim.target, claim.num_held) for claim in claims)
    granted = {claim.pool: min(shares[claim.pool], claim.target) for claim in claims}
    for claim in sorted(claims, key=lambda claim: -claim.priority):
        # a pool's own stopping replicas are not free either
        more = min(shares[claim.pool] - granted[claim.pool], max(0, free) // claim.gpus)
        granted[claim.pool] += more
        free -= more * claim.gpus
    return granted


def _fill(left: int, given: dict[str, int], wishes: Iterable[tuple[Claim, int]]) -> int:
    """Gives each pool up to its wish, one pool after another. Returns the GPUs that are left."""
    for claim, wish in wishes:
        more = min(max(0, wish - given[claim.pool]), left // claim.gpus)
        given[claim.pool] += more
        left -= more * claim.gpus
    return left


def _share(left: int, given: dict[str, int], members: Sequence[Claim]) -> int:
    """Gives the members what they still want, a replica at a time to the one with the fewest GPUs."""
    while True:
        open_ones = [claim for claim in members if given[claim.pool] < claim.wanted and claim.gpus <= left]
        if not open_ones:
            return left
        poorest = min(open_ones, key=lambda claim: given[claim.pool] * claim.gpus)
        given[poorest.pool] += 1
        left -= poorest.gpus
