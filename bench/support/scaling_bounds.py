"""What has to hold of an autoscaler's turns whatever goes wrong, simulated or live: no target far above the
undisturbed run's, few changes of direction, the last safe target kept where nothing is known. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.autoscale.policy import Reason
from penstock.autoscale.scaler import BLIND

MOST_TIMES = 1.2
"""Highest target, of the undisturbed run's. On a pool of few replicas a fifth is less than one of them: rounded up."""
MOST_CHANGES = 4
"""Changes of direction in a run, which is shorter than the hour in which so many are allowed."""


class Turn(NamedTuple):
    """A decision. before: the target until then. outcome: as in `Journal.note`."""

    at_s: float
    before: int
    target: int
    reason: Reason
    outcome: str


def most_allowed(undisturbed: int) -> int:
    """The highest target that a fault may lead to, where without one it is `undisturbed`."""
    return math.ceil(MOST_TIMES * undisturbed)


def count_changes(targets: Iterable[int]) -> int:
    """How often the targets turn from going up to going down, or back."""
    signs = [after > before for before, after in pairwise(targets) if after != before]
    return sum(before != after for before, after in pairwise(signs))


def below_safe(turns: Sequence[Turn]) -> list[Turn]:
    """Turns without fresh reports whose target is below the last one that rested on such."""
    found, safe = [], 0
    for turn in turns:
        if turn.reason in BLIND:
            if turn.target < max(safe, turn.before):
                found.append(turn)
        elif turn.outcome in ("kept", "applied"):
            safe = turn.target
    return found


def wrongs(turns: Sequence[Turn], undisturbed: int) -> list[str]:
    """Sentences about the bounds that are not kept. undisturbed: the highest target without a fault."""
    most, changes = max(turn.target for turn in turns), count_changes([turn.before for turn in turns])
    bounds = [
        (most <= most_allowed(undisturbed), f"the target rose to {most}, without a fault to {undisturbed}"),
        (changes <= MOST_CHANGES, f"{changes} changes of direction"),
        *((False, f"without news {turn.target} replaced a safe target: {turn}") for turn in below_safe(turns)),
    ]
    return [sentence for is_kept, sentence in bounds if not is_kept]
