"""The rivals that play live: the two best of each load by the simulated contest's record, bench/routing.json. Pure.

They are the one with the highest goodput and the one with the lowest p90 of the time to first token, at the same part
of the capacity as is played here; where both are one, the second by goodput.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.routing_live.policies import OURS


class Rivals(NamedTuple):
    """The two best rivals of a load, with what they had in the simulated contest, by name."""

    goodput: dict[str, float]
    """Requests in target a second."""
    p90_s: dict[str, float]

    @property
    def names(self) -> list[str]:
        return list(self.goodput)


def read_rivals(path: Path, replicas: int, part: float) -> dict[str, Rivals]:
    """The two best rivals of each load that the record has, at that size and part of the capacity."""
    cells: Sequence[Mapping[str, Any]] = json.loads(path.read_bytes())["cells"]
    return {
        cell["load"]: choose_rivals(cell["policies"])
        for cell in cells
        if cell["replicas"] == replicas and cell["part"] == part
    }


def choose_rivals(policies: Mapping[str, Mapping[str, Any]]) -> Rivals:
    """The two best. policies: measures of each by name, as means with half the width of their intervals."""
    goodput = {name: measures["goodput"][0] for name, measures in policies.items() if name != OURS}
    p90_s = {name: policies[name]["p90_s"][0] for name in goodput}
    by_goodput = sorted(goodput, key=lambda name: (-goodput[name], p90_s[name]))
    quickest = min(goodput, key=lambda name: (p90_s[name], -goodput[name]))
    chosen = [by_goodput[0], by_goodput[1] if quickest == by_goodput[0] else quickest]
    return Rivals({name: goodput[name] for name in chosen}, {name: p90_s[name] for name in chosen})
