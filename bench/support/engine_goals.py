"""What bench.engine compares, how far it is to go, and how rounds become rows. Pure."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.support.report import Row

VLLM, LLAMA, BF16 = "vLLM", "llama.cpp", "bf16"


class Goal(NamedTuple):
    what: str
    rival: str
    unit: str
    bound: float | None = None
    """Least ratio ours / rival; None: the ratio is reported, and is no goal."""
    stretch: float | None = None
    is_ceiling: bool = False
    """Whether `bound` is the largest ratio allowed instead."""


class Pair(NamedTuple):
    """Figures of both sides in one round."""

    ours: float
    rival: float | None
    """Figure of the rival; None: that rival is not there."""


class Finding(NamedTuple):
    goal: Goal
    rounds: Sequence[Pair]

    @property
    def ratios(self) -> list[float]:
        """Ratio ours / rival of each round; empty where the rival is missing."""
        return [pair.ours / pair.rival for pair in self.rounds if pair.rival]

    @property
    def is_met(self) -> bool:
        """Whether the median of the rounds' own ratios meets the bound. A goal whose rival is missing is not met."""
        goal, ratios = self.goal, self.ratios
        if goal.bound is None:
            return True
        return bool(ratios) and _reaches(statistics.median(ratios), goal.bound, goal.is_ceiling)


def rows(finding: Finding) -> Iterator[Row]:
    """Medians, and where there is a goal and more than one round, the median and the worst of the rounds' ratios, with
    the goal in the rival's column."""
    goal, ratios = finding.goal, finding.ratios
    rivals = [pair.rival for pair in finding.rounds if pair.rival is not None]
    name = f"{goal.what} (rival: {goal.rival})"
    if goal.bound is not None and len(finding.rounds) == 1:
        name = f"{goal.what}, {_wanted(goal)} of {goal.rival}'s"
    yield Row(
        name,
        statistics.median(pair.ours for pair in finding.rounds),
        statistics.median(rivals) if rivals else None,
        goal.unit,
    )
    if goal.bound is None or len(ratios) < 2:
        return
    worst, extreme = ("highest", max(ratios)) if goal.is_ceiling else ("lowest", min(ratios))
    yield Row(
        f"{name}: ratio, median of {len(ratios)} rounds, {_wanted(goal)}", statistics.median(ratios), goal.bound, ""
    )
    yield Row(f"{name}: ratio, {worst} of them", extreme, goal.bound, "")


def verdict(finding: Finding) -> str | None:
    """Sentence on whether the goal is met; None where there is no goal."""
    goal, ratios = finding.goal, finding.ratios
    if goal.bound is None:
        return None
    wanted = _wanted(goal)
    if not ratios:
        return f"NOT MET, no {goal.rival} to compare with: {goal.what}, {wanted}"
    value = statistics.median(ratios)
    said = f"{goal.what}: {value:.3f} of {goal.rival}'s, {wanted}"
    if not finding.is_met:
        return f"NOT MET: {said}"
    if goal.stretch is None:
        return f"met: {said}"
    return (
        f"met, stretch goal {goal.stretch:g} {'too' if _reaches(value, goal.stretch, goal.is_ceiling) else 'not'}: "
        f"{said}"
    )


def _wanted(goal: Goal) -> str:
    return f"{'at most' if goal.is_ceiling else 'at least'} {goal.bound:g}"


def _reaches(value: float, bound: float, is_ceiling: bool) -> bool:
    return value <= bound if is_ceiling else value >= bound
