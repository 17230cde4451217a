"""A heuristic oracle: few replica-hours with 99 % in target, by one who knows all arrivals and may try again.

Replicas are asked for a start time before the load needs them. The load's own demand curve, smoothed, held and scaled,
gives schedules, beside fixed numbers; of each form the smallest scale that reaches the part is found by bisection in
the simulator, and the cheapest schedule is then trimmed where nothing was late. What is found can be reached, so it is
an upper bound on the true optimum's hours, no more. Invariant: the schedule that is returned has been played, and
reached the part unless MOST replicas do not.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.autoscaling.entries import Entry
from bench.autoscaling.play import SLOT_S, Outcome
from bench.autoscaling.replicas import MOST, START_S, work_s
from bench.autoscaling.windows import Window

ATTAINED = 0.99
RAISED_SHARES = (0.0, 0.02, 0.05, 0.1)
"""Shares of its replica-hours by which a schedule may be raised for another seed."""
TOKEN_S = 0.05
"""Time per output token by which a request's work is spread over time."""
LEAST_SCALE, MOST_SCALE = 0.8, 20.0

Play = Callable[[Entry], Outcome]
Curve = npt.NDArray[np.float64]


class Form(NamedTuple):
    """A form of schedule, seconds: what the demand is averaged over, for how long a need is held, and how long before
    it replicas are asked for."""

    mean_s: float
    hold_s: float
    ahead_s: float = 1.3 * START_S


FORMS = (Form(180.0, 120.0), Form(60.0, 60.0), Form(30.0, 240.0), Form(10.0, 20.0), Form(600.0, 600.0))


class Found(NamedTuple):
    entry: Entry
    outcome: Outcome


def find(
    play: Play, window: Window, *, forms: Sequence[Form] = FORMS, num_halvings: int = 4, num_trims: int = 16
) -> Found:
    """The cheapest schedule that was found. play: plays the window."""
    demand = demand_curve(window)
    best = find_fixed(play, demand)
    for form in forms:
        best = _cheapest(play, shape_curve(demand, form), best, num_halvings)
    return _trim(play, window, best, num_trims)


def find_fixed(play: Play, demand: Curve) -> Found:
    """The schedule of the fewest replicas that are always there and reach the part; MOST where none do."""
    low, high = max(0, math.ceil(demand.mean()) - 1), math.ceil(demand.mean())
    best = _try(play, np.ones_like(demand), high)
    while best.outcome.attained < ATTAINED and high < MOST:
        low, high = high, min(MOST, 2 * high)
        best = _try(play, np.ones_like(demand), high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _try(play, np.ones_like(demand), middle)
        if tried.outcome.attained >= ATTAINED:
            high, best = middle, tried
        else:
            low = middle
    return best


def adjust(play: Play, found: Entry) -> Found:
    """A schedule that was found with one seed, played with another; where that is too few, with one replica more in as
    many of its fullest slots as cost a few percent. What then still misses keeps what it attained."""
    targets = np.array(found.settings["targets"], dtype=np.float64)
    fullest = np.argsort(-targets, kind="stable")
    for share in RAISED_SHARES:
        raised = targets.copy()
        raised[fullest[: math.ceil(share * targets.sum())]] += 1
        entry = _entry(raised)
        outcome = play(entry)
        if outcome.attained >= ATTAINED:
            break
    return Found(entry, outcome)


def demand_curve(window: Window) -> Curve:
    """Replicas' worth of work a second, by slots of SLOT_S from the beginning of what is played."""
    curve = np.zeros(int(window.end_s / SLOT_S) + 1)
    for at_s, prompt, output in window.rows:
        end_s = at_s + TOKEN_S * output
        first, last = int(at_s / SLOT_S), min(int(end_s / SLOT_S), len(curve) - 1)
        curve[first : last + 1] += work_s(prompt, output) / (last - first + 1) if last >= first else 0.0
    return curve / SLOT_S


def shape_curve(demand: Curve, form: Form) -> Curve:
    """The demand as the form asks for it: averaged, then the highest of what is to come within its time."""
    width = max(1, round(form.mean_s / SLOT_S))
    padded = np.pad(demand, (width // 2, width - 1 - width // 2), mode="edge")
    mean = np.convolve(padded, np.full(width, 1 / width), mode="valid")
    reach = max(1, round((form.ahead_s + form.hold_s) / SLOT_S))
    return np.array([mean[place : place + reach].max() for place in range(len(mean))])


def _cheapest(play: Play, curve: Curve, best: Found, num_halvings: int) -> Found:
    """The better of `best` and this curve's schedule of the smallest scale that reaches the part. A curve that does not
    at the hours of `best` is given up."""
    low, high = LEAST_SCALE, _scale_for(curve, sum(best.entry.settings["targets"]))
    for number in range(num_halvings + 1):
        scale = (low * high) ** 0.5 if number else high
        tried = _try(play, curve, scale)
        if tried.outcome.attained >= ATTAINED:
            high = scale
            best = min(best, tried, key=lambda found: found.outcome.hours)
        elif number:
            low = scale
        else:
            break
    return best


def _scale_for(curve: Curve, total: int) -> float:
    """The scale at which a curve's schedule has that total of targets."""
    low, high = 0.1, MOST_SCALE
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_targets(middle * curve)) > total else (middle, high)
    return low


def _trim(play: Play, window: Window, found: Found, num_trims: int) -> Found:
    """The schedule with one replica less wherever that leaves the part in target: parts without misses first, all of
    them at once, then fewer."""
    chosen: list[int] | None = None
    for _ in range(num_trims):
        targets = list(found.entry.settings["targets"])
        if chosen is None:
            chosen = _spare(window, found)
        if not chosen:
            return found
        for place in chosen:
            targets[place] = max(1, targets[place] - 1)
        entry = _entry(targets)
        outcome = play(entry)
        if outcome.attained >= ATTAINED and outcome.hours < found.outcome.hours:
            found, chosen = Found(entry, outcome), None
        else:
            chosen = chosen[: len(chosen) // 2]
    return found


def _spare(window: Window, found: Found) -> list[int]:
    """Slots of the schedule behind which nothing was late for a start time, those with the most targets for their
    demand first."""
    targets, misses = found.entry.settings["targets"], found.outcome.misses
    demand = demand_curve(window)
    first, reach = int(window.begin_s / SLOT_S), round(START_S / SLOT_S)
    clean = [place for place in range(len(misses)) if not any(misses[place : place + reach])]
    return sorted(
        (first + place for place in clean if first + place < len(targets)),
        key=lambda place: -targets[place] / (demand[place : place + reach].max() + 0.1),
    )


def _try(play: Play, curve: Curve, scale: float) -> Found:
    entry = _entry(scale * curve)
    return Found(entry, play(entry))


def _entry(targets: Sequence[float] | Curve) -> Entry:
    return Entry("schedule", {"slot_s": SLOT_S, "targets": list(_targets(targets))})


def _targets(curve: Sequence[float] | Curve) -> Iterator[int]:
    return (min(MOST, max(1, int(np.ceil(value - 1e-9)))) for value in curve)
