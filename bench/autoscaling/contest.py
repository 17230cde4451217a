"""The course of the bench and the settings that rivals may try: tune on earlier windows, freeze, score on later
ones.

Every rival gets TRIES settings on each earlier window, and then keeps the cheapest that had 99 % in target there, or
the one with the most in target where none had: one setting for each trace, which favours the rivals, for ours is one
setting for all. All fixed numbers, and every second of the other settings beside the frozen one, are played on the
scored windows too, with one seed, for the frontier and for the rows "in hindsight", which no operator could have.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from bench.autoscaling.entries import Entry
from bench.autoscaling.oracle import ATTAINED, FORMS, demand_curve, shape_curve
from bench.autoscaling.play import SLOT_S, Outcome
from bench.autoscaling.runs import Job, Part, Store, Windows, run_all
from bench.autoscaling.windows import Window

TRIES: Final = 8
STATIC_SCALES: Final = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)
"""Fixed numbers of replicas that are tried, as multiples of the highest mean demand of a minute."""
UTILISATIONS: Final = (0.5, 0.57, 0.65, 0.75, 0.85, 0.95)
"""Settings of ours for the frontier."""
GRIDS: Final[dict[str, tuple[Mapping[str, Any], ...]]] = {
    "ray": tuple(
        {"target_ongoing": target, "upscale_delay_s": up_s, "downscale_delay_s": down_s}
        for target, (up_s, down_s) in product((5.0, 7.0, 9.0, 12.0), ((30.0, 600.0), (0.0, 180.0)))
    ),
    "keda": tuple(
        {"target": target, "stabilisation_s": down_s}
        for target, down_s in product((0.1, 0.5, 2.0, 8.0), (300.0, 900.0))
    ),
    "hpa": tuple(
        {"target": target, "stabilisation_s": down_s}
        for target, down_s in product((5.0, 7.0, 9.0, 12.0), (300.0, 900.0))
    ),
    "dynamo": tuple(
        {"headroom": headroom, "interval_s": interval_s, "predictor": predictor}
        for headroom, (interval_s, predictor) in product((1.3, 1.6, 2.0, 2.6), ((180.0, "constant"), (60.0, "trend")))
    ),
}
NAMES: Final = {
    "ours": "ours",
    "ours and a floor": "ours, floor of a day",
    "ours and order": "ours, floor of a day, overdue last",
    "ours and another tier": "ours and another tier",
    "static": "static peak",
    "ray default": "Ray Serve, default",
    "ray": "Ray Serve, tuned",
    "keda": "KEDA, queue",
    "hpa": "HPA, in flight",
    "dynamo": "Dynamo-like",
    "oracle": "oracle",
}


class Point(NamedTuple):
    """An entry on a scored window: one point of its frontier."""

    name: str
    window: str
    entry: Entry
    outcome: Outcome


class Scored(NamedTuple):
    """An autoscaler on a scored window: the setting that was frozen, and an outcome for each seed."""

    name: str
    window: str
    entry: Entry
    outcomes: list[Outcome]


class Contest(NamedTuple):
    """All that was played."""

    scored: list[Scored]
    frontier: list[Point]


class Plan(NamedTuple):
    """What is to be played. ours: settings that differ from the policy's defaults. names: keys of NAMES that take
    part."""

    ours: Mapping[str, Any]
    names: Sequence[str]
    windows: Sequence[str]
    num_seeds: int
    num_tries: int = TRIES
    has_frontier: bool = True
    oracle: Mapping[str, Any] = {}
    """Arguments of the search that differ from its defaults."""
    model_error: float = 1.0


Runner = Callable[[Sequence[Job]], list[Outcome]]


def hold_contest(
    plan: Plan, windows: Windows, store: Store, processes: int, on_done: Callable[[Job, Outcome, int], None]
) -> Contest:
    """Tune, freeze and score. Deterministic; what the store knows is not played again."""

    def runner(jobs: Sequence[Job]) -> list[Outcome]:
        return run_all(jobs, windows, store, processes, on_done)

    frozen = _freeze(plan, windows, runner)
    jobs = [
        Job(entry, window, "scored", seed, plan.model_error)
        for (_, window), entry in frozen.items()
        for seed in range(plan.num_seeds)
    ]
    outcomes = iter(runner(jobs))
    scored = [
        Scored(name, window, entry, [next(outcomes) for _ in range(plan.num_seeds)])
        for (name, window), entry in frozen.items()
    ]
    if "oracle" in plan.names:
        scored += _play_oracle(plan, runner)
    if not plan.has_frontier:
        return Contest(scored, [])
    points = _play_frontier(plan, windows, runner)
    known = {(point.name, point.window, point.entry.label) for point in points}
    points += [
        Point(each.name, each.window, each.entry, each.outcomes[0])
        for each in scored
        if each.name in (*GRIDS, "ours") and (each.name, each.window, each.entry.label) not in known
    ]
    return Contest(scored, points)


def choose_tuned(entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> Entry:
    """The entry that is frozen: the cheapest that had ATTAINED in target, or else the one that had the most."""
    pairs = list(zip(entries, outcomes, strict=True))
    enough = [pair for pair in pairs if pair[1].attained >= ATTAINED]
    if enough:
        return min(enough, key=lambda pair: pair[1].hours)[0]
    return max(pairs, key=lambda pair: pair[1].attained)[0]


def list_tries(name: str, window: Window, num_tries: int) -> list[Entry]:
    """The settings that a rival may try on a window."""
    if name == "static":
        peak = float(shape_curve(demand_curve(window), FORMS[0]._replace(mean_s=60.0)).max())
        counts = sorted({max(1, math.ceil(scale * peak)) for scale in STATIC_SCALES[:num_tries]})
        return [Entry("static", {"replicas": count}) for count in counts]
    return [Entry(name, settings) for settings in GRIDS[name][:num_tries]]


def _freeze(plan: Plan, windows: Windows, runner: Runner) -> dict[tuple[str, str], Entry]:
    """Each autoscaler's setting for each window."""
    fixed = {
        "ours": Entry("ours", plan.ours),
        "ours and a floor": Entry("ours and a floor", plan.ours),
        "ours and order": Entry("ours and order", plan.ours),
        "ours and another tier": Entry("ours and another tier", plan.ours),
        "ray default": Entry("ray"),
    }
    frozen = {(name, window): entry for name, entry in fixed.items() if name in plan.names for window in plan.windows}
    tuned = [name for name in plan.names if name == "static" or name in GRIDS]
    places = list(product(tuned, plan.windows))
    tries = [list_tries(name, windows[window][0], plan.num_tries) for name, window in places]
    jobs = [
        job
        for (_, window), entries in zip(places, tries, strict=True)
        for job in _jobs(entries, window, "tuning", plan.model_error)
    ]
    outcomes = iter(runner(jobs))
    for place, entries in zip(places, tries, strict=True):
        frozen[place] = choose_tuned(entries, [next(outcomes) for _ in entries])
    return frozen


def _play_oracle(plan: Plan, runner: Runner) -> list[Scored]:
    """A search with the first seed, whose schedules the other seeds adjust."""
    entry = Entry("oracle", plan.oracle)
    firsts = runner([Job(entry, window, "scored", 0, plan.model_error) for window in plan.windows])
    others = runner(
        [
            Job(_follow(first), window, "scored", seed, plan.model_error)
            for window, first in zip(plan.windows, firsts, strict=True)
            for seed in range(1, plan.num_seeds)
        ]
    )
    left = iter(others)
    return [
        Scored("oracle", window, entry, [first, *(next(left) for _ in range(1, plan.num_seeds))])
        for window, first in zip(plan.windows, firsts, strict=True)
    ]


def _follow(first: Outcome) -> Entry:
    return Entry("oracle", {"slot_s": SLOT_S, "targets": first.targets})


def _play_frontier(plan: Plan, windows: Windows, runner: Runner) -> list[Point]:
    """Every setting on every scored window, with the first seed."""
    places = [
        (name, window, entry)
        for name, window in product(plan.names, plan.windows)
        for entry in _list_frontier(plan, name, windows[window][1])
    ]
    outcomes = runner([Job(entry, window, "scored", 0, plan.model_error) for _, window, entry in places])
    return [Point(*place, outcome) for place, outcome in zip(places, outcomes, strict=True)]


def _list_frontier(plan: Plan, name: str, window: Window) -> list[Entry]:
    if name == "ours":
        return [Entry("ours", {**plan.ours, "target_utilisation": value}) for value in UTILISATIONS[: plan.num_tries]]
    tries = list_tries(name, window, plan.num_tries) if name == "static" or name in GRIDS else []
    if name == "static":
        return tries
    return [entry for number, entry in enumerate(tries) if (number // 2 + number) % 2 == 0]  # like a chessboard


def _jobs(entries: Sequence[Entry], window: str, part: Part, model_error: float) -> list[Job]:
    return [Job(entry, window, part, 0, model_error) for entry in entries]
