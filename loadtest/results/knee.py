"""Where a server's knee lies: the highest rate at which it still holds its goodput. Pure: the steps made so far in, the
next step or the result out.

The rate is raised by a factor until the goodput falls under the share (lowered, if already the first step does), then
the bracket is halved on the logarithmic scale to the precision, and the rate found is run once more. A rate counts as
held only when every run at it held, so a confirmation that fails goes on below it. `ladder.py` makes the runs;
`ladder.json` is a Ladder.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

Purpose = Literal["raise", "lower", "bisect", "confirm"]
LOWEST = 6
"""How many times a first rate that does not hold is lowered by the factor, before no rate is taken to hold."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the next step depends on, beside the steps before it."""

    start_rate: float
    max_rate: float
    factor: float = 2.0
    share: float = 0.9  # goodput below it is not held
    precision: float = 0.05  # the rate that holds and the one that does not are at most so far apart
    max_steps: int = 30


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate. Latencies are in seconds; None if nothing was measured."""

    number: int  # 1, 2, 3 ...
    rate: float
    purpose: Purpose
    reason: str
    folder: str  # of the run, below the ladder's
    goodput: float | None  # share of the judged requests; None: none was judged
    judged: int
    goodput_per_s: float | None
    offered_rate: float | None
    achieved_rate: float | None
    output_tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    shed: int
    failed: int
    unfinished: int
    is_balanced: bool  # the ledger of the run
    is_late: bool  # the tester sent late: the step measured the tester along with the server
    is_dead: bool = False  # the server answered nothing, or was not there after the step


class Next(NamedTuple):
    """A step to make."""

    rate: float
    purpose: Purpose
    reason: str


class Done(NamedTuple):
    """Nothing more to measure."""

    is_confirmed: bool
    reason: str


class Bracket(NamedTuple):
    """What is known of the knee."""

    held: float | None
    """The highest rate below every one that did not hold."""
    missed: float | None
    """The lowest rate that did not hold."""
    runs: int
    """Number of runs at `held`."""


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ladder.json."""

    url: str
    model: str
    unit: str  # of every rate
    rules: Rules
    settings: dict[str, object]  # everything else that a ladder that goes on must have in common with its beginning
    steps: list[Step]
    knee: float | None  # highest rate that holds, as far as is known; None: none is
    missed: float | None  # lowest rate that does not
    is_confirmed: bool  # the knee was measured twice, to the precision
    is_complete: bool  # nothing more to measure
    verdict: str  # for people


def is_held(step: Step, rules: Rules) -> bool:
    return step.goodput is not None and step.goodput >= rules.share and not step.is_dead


def find_bracket(steps: Sequence[Step], rules: Rules) -> Bracket:
    missed = min((step.rate for step in steps if not is_held(step, rules)), default=None)
    held = max((step.rate for step in steps if missed is None or step.rate < missed), default=None)
    return Bracket(held, missed, sum(step.rate == held for step in steps))


def choose_next_step(steps: Sequence[Step], rules: Rules, unit: str = "requests/s") -> Next | Done:
    """The next step after these, which are in the order they were made, or the end of the ladder."""
    if not steps:
        return Next(rules.start_rate, "raise", "the first rate")
    if steps[-1].is_dead:
        return Done(False, f"The server stopped answering at {_rate(steps[-1].rate, unit)}.")
    found = find_bracket(steps, rules)
    if found.missed is None and found.held is not None and found.held >= rules.max_rate:
        return Done(False, f"Goodput holds up to {_rate(found.held, unit)}, the highest rate that was allowed.")
    if found.held is None and found.missed is not None and found.missed <= rules.start_rate / rules.factor**LOWEST:
        return Done(False, f"Goodput is under {rules.share:.0%} even at {_rate(found.missed, unit)}.")
    if (
        found.held is not None
        and found.missed is not None
        and found.missed / found.held <= 1 + rules.precision
        and found.runs > 1
    ):
        return Done(
            True,
            f"The knee is at {_rate(found.held, unit)}: goodput held {found.runs} times, and did not at "
            f"{_rate(found.missed, unit)}.",
        )
    if len(steps) >= rules.max_steps:
        return Done(False, f"{len(steps)} steps did not settle it.")
    return _step(found, rules)


def _step(found: Bracket, rules: Rules) -> Next:
    if found.missed is None and found.held is not None:
        return Next(min(found.held * rules.factor, rules.max_rate), "raise", f"goodput held at {found.held:.4g}")
    assert found.missed is not None, "no step is neither held nor missed"
    if found.held is None:
        return Next(found.missed / rules.factor, "lower", f"goodput did not hold at {found.missed:.4g}")
    if found.missed / found.held > 1 + rules.precision:
        return Next(
            math.sqrt(found.held * found.missed), "bisect", f"held at {found.held:.4g}, not at {found.missed:.4g}"
        )
    return Next(found.held, "confirm", f"the highest rate that held; {found.missed:.4g} did not")


def _rate(rate: float, unit: str) -> str:
    return f"{rate:.3g} {unit}"


def make_ladder(
    url: str, model: str, unit: str, rules: Rules, settings: dict[str, object], steps: Sequence[Step]
) -> Ladder:
    """The ladder as it is known after these steps."""
    found, following = find_bracket(steps, rules), choose_next_step(steps, rules, unit)
    if isinstance(following, Done):
        verdict = following.reason
    else:
        so_far = "no rate is known to hold" if found.held is None else f"goodput held at {_rate(found.held, unit)}"
        so_far += "" if found.missed is None else f", not at {_rate(found.missed, unit)}"
        verdict = f"Not finished after {len(steps)} steps: {so_far}."
    return Ladder(
        url=url,
        model=model,
        unit=unit,
        rules=rules,
        settings=settings,
        steps=list(steps),
        knee=found.held,
        missed=found.missed,
        is_confirmed=isinstance(following, Done) and following.is_confirmed,
        is_complete=isinstance(following, Done),
        verdict=verdict,
    )
