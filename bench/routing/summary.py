"""The contest's figures from its outcomes: means over seeds, intervals, and a verdict for each cell.

Intervals are Student's, 95 %. A rival is compared with ours seed by seed, for both had the same requests: of the
differences (of p90 of the quotients' logarithms) there is one for each seed.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import msgspec

from bench.routing.contest import Cell, Contest
from bench.routing.play import Outcome

OURS: Final = "ours"
STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 0.975 quantile of Student's distribution by degrees of freedom, from 1."""
MOST_SEEDS: Final = len(STUDENT) + 1
WANTED_RATIO: Final = 0.8
"""p90 TTFT of ours over the best rival's that is wanted where prompts share unevenly."""
MEASURES: Final = ("goodput", "p50_s", "p90_s", "p99_s", "cached", "imbalance")


class Interval(NamedTuple):
    """A mean over seeds with half the width of its interval; None with one seed."""

    mean: float
    half: float | None

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is; a mean without one is not."""
        return self.half is not None and self.mean - self.half > 0


class Verdict(NamedTuple):
    """The comparison of ours with the rivals in a cell. better: rivals whose goodput is higher than ours beyond the
    interval, or higher at all with one seed. p90_ratio: ours over the lowest rival's, geometric mean, with the interval
    of it."""

    better: list[str]
    best_rival: str
    """The rival with the highest goodput."""
    goodput: Interval
    """Goodput of ours less that rival's."""
    quickest: str
    """The rival with the lowest p90 TTFT."""
    p90_ratio: float
    p90_low: float | None
    p90_high: float | None


def estimate(values: Sequence[float]) -> Interval:
    """Mean and interval of one to MOST_SEEDS values."""
    if len(values) == 1:
        return Interval(values[0], None)
    return Interval(fmean(values), STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values)))


def compare(policies: Mapping[str, Sequence[Outcome]], measure: str) -> dict[str, Interval]:
    """Each policy's measure less ours, by seeds."""
    ours = [getattr(outcome, measure) for outcome in policies[OURS]]
    return {
        name: estimate([getattr(outcome, measure) - own for outcome, own in zip(outcomes, ours, strict=True)])
        for name, outcomes in policies.items()
    }


def judge(policies: Mapping[str, Sequence[Outcome]]) -> Verdict:
    """The verdict of a cell that has ours and a rival at least."""
    differences = compare(policies, "goodput")
    rivals = [name for name in policies if name != OURS]
    is_better = {
        name: found.mean > 0 if found.half is None else found.is_above_zero for name, found in differences.items()
    }
    best = max(rivals, key=lambda name: differences[name].mean)
    logs = {
        name: [math.log(own.p90_s / other.p90_s) for own, other in zip(policies[OURS], policies[name], strict=True)]
        for name in rivals
    }
    quickest = max(rivals, key=lambda name: fmean(logs[name]))
    ratio = estimate(logs[quickest])
    return Verdict(
        better=[name for name in rivals if is_better[name]],
        best_rival=best,
        goodput=Interval(0.0 - differences[best].mean, differences[best].half),
        quickest=quickest,
        p90_ratio=math.exp(ratio.mean),
        p90_low=None if ratio.half is None else math.exp(ratio.mean - ratio.half),
        p90_high=None if ratio.half is None else math.exp(ratio.mean + ratio.half),
    )


def describe(verdict: Verdict, *, is_uneven: bool) -> str:
    """The verdict as a line."""
    goodput = (
        f"less goodput than {', '.join(verdict.better)}" if verdict.better else "goodput no lower than any rival's"
    )
    is_single = verdict.p90_low is None
    between = " (one seed, no interval)" if is_single else f" ({verdict.p90_low:.2f} to {verdict.p90_high:.2f})"
    ratio = f"p90 TTFT {verdict.p90_ratio:.2f}{between} times that of {verdict.quickest}"
    if not is_uneven:
        return f"{goodput}; {ratio}"
    met = "met" if verdict.p90_ratio <= WANTED_RATIO else "not met"
    return f"{goodput}; {ratio}, at most {WANTED_RATIO:g} is wanted: {met}"


def to_json(contest: Contest, uneven: Mapping[str, bool]) -> list[dict[str, Any]]:
    """What routing.json holds of each cell."""
    found = []
    for cell, policies in contest.items():
        verdict = judge(policies)
        differences = {measure: compare(policies, measure) for measure in MEASURES}
        found.append(
            {
                **cell._asdict(),
                "seeds": len(policies[OURS]),
                "rate": fmean(outcome.rate for outcome in policies[OURS]),
                "verdict": describe(verdict, is_uneven=uneven[cell.load]),
                **{f"ours_{name}": msgspec.to_builtins(value) for name, value in verdict._asdict().items()},
                "policies": {
                    name: {
                        **{measure: _pair(over_seeds(outcomes, measure)) for measure in MEASURES},
                        "unanswered": fmean(outcome.unanswered for outcome in outcomes),
                        "less_ours": {measure: _pair(differences[measure][name]) for measure in MEASURES},
                    }
                    for name, outcomes in policies.items()
                },
            }
        )
    return found


def format_cell(cell: Cell, policies: Mapping[str, Sequence[Outcome]]) -> tuple[str, list[str], list[list[str]]]:
    """A cell's table as its caption, headings and cells."""
    differences, p90 = compare(policies, "goodput"), compare(policies, "p90_s")
    rate = fmean(outcome.rate for outcome in policies[OURS])
    heads = ["", "goodput/s", "minus ours", "TTFT p50", "p90", "minus ours", "p99", "cached", "imbalance", "unanswered"]
    rows = [
        [
            name,
            _text(over_seeds(outcomes, "goodput"), 2),
            "" if name == OURS else _text(differences[name], 2),
            _text(over_seeds(outcomes, "p50_s"), 2),
            _text(over_seeds(outcomes, "p90_s"), 2),
            "" if name == OURS else _text(p90[name], 2),
            _text(over_seeds(outcomes, "p99_s"), 2),
            f"{100 * over_seeds(outcomes, 'cached').mean:.1f} %",
            f"{over_seeds(outcomes, 'imbalance').mean:.2f}",
            f"{fmean(outcome.unanswered for outcome in outcomes):.0f}",
        ]
        for name, outcomes in policies.items()
    ]
    return f"{cell.label}: {rate:.1f} requests/s", heads, rows


def format_verdicts(contest: Contest, uneven: Mapping[str, bool]) -> tuple[str, list[str], list[list[str]]]:
    """The table of all verdicts."""
    rows = []
    for cell, policies in contest.items():
        verdict = judge(policies)
        rows.append(
            [
                cell.label,
                f"{over_seeds(policies[OURS], 'goodput').mean:.2f}",
                f"{over_seeds(policies[verdict.best_rival], 'goodput').mean:.2f} {verdict.best_rival}",
                _text(verdict.goodput, 2),
                describe(verdict, is_uneven=uneven[cell.load]),
            ]
        )
    return "ours beside the best rival of each cell", ["", "goodput/s", "best rival", "difference", "verdict"], rows


def over_seeds(outcomes: Sequence[Outcome], measure: str) -> Interval:
    """Mean and interval of a measure of one policy's runs."""
    return estimate([getattr(outcome, measure) for outcome in outcomes])


def _pair(interval: Interval) -> list[float | None]:
    """Mean and half width, rounded."""
    return [round(interval.mean, 4), None if interval.half is None else round(interval.half, 4)]


def _text(interval: Interval, digits: int) -> str:
    half = "" if interval.half is None else f" ± {interval.half:.{digits}f}"
    return f"{round(interval.mean, digits) + 0.0:.{digits}f}{half}"  # a difference of nothing has no sign
