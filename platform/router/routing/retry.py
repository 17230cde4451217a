"""The time after which those that were refused should come back: not all in the same second. Pure; randomness comes in
as a parameter."""

from random import Random

SPREAD = 0.25
"""Part of a wait by which it is lengthened at most."""
MAX_SPREAD_S = 300.0
"""Longest addition, seconds: to a wait for the end of a month."""
MIN_SPREAD_S = 1.0
"""Longest addition to a short wait, seconds: the header that tells it has whole seconds."""


def spread_s(wait_s: float, random: Random) -> float:
    """A wait that is never shorter than the true one, seconds."""
    return wait_s + random.uniform(0.0, min(max(MIN_SPREAD_S, SPREAD * wait_s), MAX_SPREAD_S))
