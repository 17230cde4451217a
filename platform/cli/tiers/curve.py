"""What escalating a share of the requests gives and costs, from the answers of both models to the same questions. Pure.

Agreement is the share of requests whose final answer is the cloud model's: one that is sent on has it by definition.
The final answer is the last number in a text, or all of its words; see `final_answer`. A threshold is the mean log
probability below which a request is sent on, so the curve goes through the questions from the least sure one upward;
questions of which the edge was equally sure go together. The rival is a share drawn at random. Invariant: the curve
begins with no request sent on and ends with all of them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from random import Random
from typing import Literal, NamedTuple

from penstock.cli.tiers.questions import Answer, Question

Match = Literal["auto", "number", "text"]
"""What of two answers must be the same: the last number, the words, or what the question's label ends in."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ENDS_IN_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?[\s.%]*$")
_NO_WORD = re.compile(r"[^\w\s]+")
CERTAINTY = 0.95


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens at one model, in any currency."""

    input: float
    output: float

    def cost(self, num_prompt_tokens: int, num_tokens: int) -> float:
        return (self.input * num_prompt_tokens + self.output * num_tokens) / 1e6


class Pair(NamedTuple):
    """One question as both models answered it."""

    score: float
    """Mean log probability of the edge's first tokens."""
    agrees: bool
    edge_cost: float
    """Cost of the edge's whole answer, which counts where the request stays."""
    tried_cost: float
    """Cost of the edge's first tokens, which counts where the request is sent on."""
    cloud_cost: float
    edge_is_right: bool | None = None
    """Whether the edge's final answer is the label's; None: there is no label."""
    cloud_is_right: bool | None = None


class Point(NamedTuple):
    """What one threshold gives."""

    threshold: float
    """Mean log probability below which a request is sent on."""
    share: float
    """Share of the requests that are."""
    agreement: float
    cost: float
    """Cost of a request, on average."""
    accuracy: float | None
    """Share of the requests whose final answer is the label's; None: there are no labels."""


class Interval(NamedTuple):
    low: float
    high: float


def final_answer(text: str, match: Match) -> str:
    """What is compared of an answer. match: not auto. Of a text without a number it is the words in any case."""
    if match == "number":
        found = _NUMBER.findall(text)
        if found:
            return _canonical(found[-1])
    return " ".join(_NO_WORD.sub(" ", text.casefold()).split())


def _canonical(number: str) -> str:
    """The number without separators of thousands and without zeros that say nothing: 1,800.0 is 1800."""
    plain = number.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def match_of(question: Question, match: Match) -> Match:
    """How the answers to a question are compared."""
    if match != "auto":
        return match
    return "number" if question.label is not None and _ENDS_IN_NUMBER.search(question.label) else "text"


def pair_of(
    question: Question,
    edge: Answer,
    cloud: Answer,
    num_tokens: int,
    match: Match,
    edge_prices: Prices,
    cloud_prices: Prices,
) -> Pair:
    """num_tokens: the edge's first ones, which are judged."""
    how = match_of(question, match)
    edge_says, cloud_says = final_answer(edge.text, how), final_answer(cloud.text, how)
    label = None if question.label is None else final_answer(question.label, how)
    num_prompt, num_tried = edge.num_prompt_tokens, min(num_tokens, edge.num_tokens)
    return Pair(
        edge.mean_logprob(num_tokens),
        edge_says == cloud_says,
        edge_prices.cost(num_prompt, edge.num_tokens),
        edge_prices.cost(num_prompt, num_tried),
        cloud_prices.cost(cloud.num_prompt_tokens, cloud.num_tokens),
        None if label is None else edge_says == label,
        None if label is None else cloud_says == label,
    )


def draw_curve(pairs: Sequence[Pair]) -> list[Point]:
    """The points of all thresholds that differ in what they send on, from none to all. pairs: one at least."""
    groups = _by_score(pairs)
    totals = _Totals(
        len(pairs), sum(pair.agrees for pair in pairs), sum(pair.edge_cost for pair in pairs), _count_right(pairs)
    )
    points = [totals.point(groups[0][0].score)]
    for index, group in enumerate(groups):
        is_last = index + 1 == len(groups)
        totals = totals.without(group)
        points.append(totals.point(0.0 if is_last else (group[0].score + groups[index + 1][0].score) / 2))
    return points


def _by_score(pairs: Sequence[Pair]) -> list[list[Pair]]:
    ordered = sorted(pairs, key=lambda pair: pair.score)
    return [list(group) for _, group in groupby(ordered, key=lambda pair: pair.score)]


class _Right(NamedTuple):
    """Answers that are right, of so many that have a label."""

    num_right: int
    num_labelled: int


def _count_right(pairs: Iterable[Pair]) -> _Right:
    known = [pair.edge_is_right for pair in pairs if pair.edge_is_right is not None]
    return _Right(sum(known), len(known))


class _Totals(NamedTuple):
    """Sums over all questions, while some of them are sent on."""

    num_pairs: int
    num_agreed: int
    cost: float
    right: _Right
    num_away: int = 0

    def without(self, group: Iterable[Pair]) -> "_Totals":
        """The sums when these are sent on too."""
        count = agreed = gained = 0
        cost = 0.0
        for pair in group:
            count += 1
            agreed += not pair.agrees
            cost += pair.tried_cost + pair.cloud_cost - pair.edge_cost
            gained += bool(pair.cloud_is_right) - bool(pair.edge_is_right)
        right = self.right._replace(num_right=self.right.num_right + gained)
        return _Totals(self.num_pairs, self.num_agreed + agreed, self.cost + cost, right, self.num_away + count)

    def point(self, threshold: float) -> Point:
        accuracy = self.right.num_right / self.right.num_labelled if self.right.num_labelled else None
        count = self.num_pairs
        return Point(threshold, self.num_away / count, self.num_agreed / count, self.cost / count, accuracy)


def area_above_random(pairs: Sequence[Pair]) -> float:
    """The area between the agreement's curve and the line of a share drawn at random, over shares from 0 to 1: the
    agreement that the order gains, averaged over all shares. 0: no better than drawing; below it: worse."""
    return _area([(pair.score, pair.agrees) for pair in pairs])


def _area(pairs: list[tuple[float, bool]]) -> float:
    """The area of pairs of a score and whether the answers agree."""
    pairs.sort()
    count = len(pairs)
    num_differing = count - sum([agrees for _, agrees in pairs])
    area, away, found = 0.0, 0, 0
    for _, group in groupby(pairs, key=itemgetter(0)):
        agreements = [agrees for _, agrees in group]
        before = found - num_differing * away / count
        away, found = away + len(agreements), found + len(agreements) - sum(agreements)
        area += len(agreements) * (before + found - num_differing * away / count) / 2
    return area / count**2


def largest_area(pairs: Sequence[Pair]) -> float:
    """The area of an order that knows which answers differ and sends those on first."""
    return area_above_random([pair._replace(score=-1.0 * (not pair.agrees)) for pair in pairs])


def interval(pairs: Sequence[Pair], num_samples: int = 2000, seed: int = 0) -> Interval:
    """The 95 % interval of `area_above_random`, by the percentiles of resamples (bootstrap; Efron, 1979)."""
    random = Random(seed)
    judged = [(pair.score, pair.agrees) for pair in pairs]
    areas = sorted(_area(random.choices(judged, k=len(judged))) for _ in range(num_samples))
    rest = (1 - CERTAINTY) / 2
    return Interval(areas[int(rest * num_samples)], areas[int((1 - rest) * num_samples) - 1])


def propose_for_agreement(points: Sequence[Point], agreement: float) -> Point:
    """The point that sends on least among those that agree so much; there is always one, since all is the cloud's."""
    return next(point for point in points if point.agreement >= agreement or point is points[-1])


def propose_for_share(points: Sequence[Point], share: float) -> Point:
    """The point that sends on most, but no more than that share."""
    return [point for point in points if point.share <= share][-1]
