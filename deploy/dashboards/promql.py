"""PromQL as rules and dashboards write it, and what an expression names.

Expressions stand in their tables as they are read, with two short forms: `@` in a grouping is SITE, and a duration in
brackets is a true one, which `scaled` shortens for tests. Not a parser of all of PromQL: `faults` understands the forms
that are used here (selectors, groupings, functions), and promtool says whether an expression is one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SITE = "namespace, job"
"""Labels that Prometheus gives what it scrapes: they keep several installations apart. Without them (no Kubernetes) all
that is scraped as one job is one installation."""
SITE_LABELS = frozenset({"namespace", "job", "instance", "pod"})
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SUFFIXES = ("_bucket", "_count", "_sum")
"""Suffixes of a histogram's series."""
FOREIGN: Mapping[str, frozenset[str]] = {"up": SITE_LABELS}
"""Series that Prometheus itself makes, with their labels."""

_NAME = r"(?<![\w:$])(?:penstock[_:][\w:]*|up)(?![\w:(])"
_SERIES = re.compile(rf"({_NAME})(?:\{{([^}}]*)\}})?")
_RANGE = re.compile(r"\[(\d+)([smhd])\]")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_BY = re.compile(r"\bby\s*\(([^)]*)\)\s*\(")
_TEXT = re.compile(r'"[^"]*"')


class Series(NamedTuple):
    """A selector: the name and the labels that its matchers name."""

    name: str
    labels: tuple[str, ...]


def duration(seconds: float) -> str:
    """A length of time as Prometheus writes it: of 1 ms or more, in the largest unit that divides it."""
    if seconds % 1:
        return f"{max(1, round(1000 * seconds))}ms"
    unit = next(unit for unit in "dhms" if seconds % UNITS_S[unit] == 0)
    return f"{int(seconds) // UNITS_S[unit]}{unit}"


def seconds(written: str) -> int:
    """Seconds of a duration with one unit, such as 5m."""
    return int(written[:-1]) * UNITS_S[written[-1]]


def scaled(expression: str, scale: float = 1.0) -> str:
    """The expression with SITE written out and its windows `scale` times as long."""
    sited = expression.replace("(@", f"({SITE}")
    return _RANGE.sub(lambda found: f"[{duration(seconds(found[1] + found[2]) * scale)}]", sited)


def selected(expression: str, matchers: str) -> str:
    """The expression with the matchers added to every selector."""

    def add(found: re.Match[str]) -> str:
        own = (found[2] or "").strip()
        return f"{found[1]}{{{own}{', ' if own else ''}{matchers}}}"

    return _SERIES.sub(add, expression)


def series(expression: str) -> Iterator[Series]:
    """Every selector of the expression."""
    masked = _GROUPING.sub(lambda found: " " * len(found[0]), expression)
    for found in _SERIES.finditer(masked):
        yield Series(found[1], tuple(_LABEL.findall(_TEXT.sub("", found[2] or ""))))


def without_suffix(name: str) -> str:
    """The metric that a histogram's series belongs to; any other name as it is."""
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def grouped(expression: str) -> tuple[str, ...] | None:
    """Labels by which the outermost aggregation of the expression groups; None where none is outermost."""
    found = re.match(r"[\s(]*\w+\s+by\s*\(([^)]*)\)", expression)
    return None if found is None else tuple(found[1].replace(" ", "").split(","))


def faults(expression: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """Sentences about names and labels that nobody exports. known: labels by metric (a histogram's without suffix), and
    by recording rule."""
    found = []
    labels = {**known, **FOREIGN}
    for name, matched in series(expression):
        has = labels.get(name) or labels.get(without_suffix(name))
        if has is None:
            found.append(f"{name} is no metric and no recording rule")
            continue
        found += [f"{name} has no label {label}" for label in matched if label not in has | SITE_LABELS | {"le"}]
    for by in _BY.finditer(expression):
        inside = _balanced(expression, by.end() - 1)
        common = frozenset.intersection(
            *(labels.get(name) or labels.get(without_suffix(name)) or frozenset() for name, _ in series(inside))
        ) | {"le"}
        wanted = by[1].replace("@", SITE).replace(" ", "").split(",")
        found += [f"{inside} has no label {label}" for label in wanted if label not in common | SITE_LABELS]
    return found


def _balanced(text: str, start: int) -> str:
    """What stands in the parentheses that open at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return text[start + 1 : place]
    raise ValueError(f"{text!r} has a parenthesis that does not close")
