"""The p90 of the time to first token that no routing can go below: each request alone on an idle replica that has what
any earlier request computed.

Not a bound that can be reached: requests wait for each other's steps, and a prefix is in no cache before it has been
computed. Invariant: a routing's p90 in the simulator is no lower.
"""

from typing import NamedTuple

import numpy as np

from bench.autoscaling.replicas import BASE_S, ENGINE, PROMPT_TOKENS_S, ROW_S
from bench.routing.contest import SECONDS, Contest
from bench.routing.loads import BLOCK, Load, mean_work_s
from bench.routing.play import LEAD_PART, Job
from bench.routing.summary import OURS, WANTED_RATIO, over_seeds
from penstock.sim.content import make_keys, read_segments


class Floor(NamedTuple):
    """A cell's p90, seconds, means over its seeds."""

    floor_s: float
    rival: str
    """The rival with the lowest."""
    rival_s: float
    ours_s: float

    @property
    def is_out_of_reach(self) -> bool:
        """Whether WANTED_RATIO of the best rival's is below the floor: no routing gets there."""
        return WANTED_RATIO * self.rival_s < self.floor_s


def first_token_s(uncached_tokens: int) -> float:
    """Seconds that a prompt takes on an idle replica."""
    budget = ENGINE.max_batched_tokens
    assert isinstance(budget, int)
    steps = -(-uncached_tokens // budget)
    return steps * (BASE_S + ROW_S) + uncached_tokens / PROMPT_TOKENS_S


def find_floor_s(load: Load, job: Job) -> float:
    """The floor of a run, of the requests that count; the job's policy does not matter."""
    rate = job.part * job.replicas / mean_work_s(load)
    known, ttfts_s = set[bytes](), list[float]()
    for planned in load.plan(job.seed, rate, job.seconds):
        segments = read_segments(planned)
        keys = make_keys(segments, BLOCK)
        cached = next((place for place, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys)
        if LEAD_PART * job.seconds <= planned.at_s < job.seconds:
            ttfts_s.append(first_token_s(max(1, sum(segment.num_tokens for segment in segments) - cached * BLOCK)))
    return float(np.quantile(ttfts_s, 0.9))


def find_floors(contest: Contest, loads: list[Load], seconds: float | None = None) -> dict[str, Floor]:
    """The floor of each cell, by its label, with the p90 of those that played there. seconds: length of the runs; None:
    by the number of replicas."""
    by_name = {load.name: load for load in loads}
    found = {}
    for cell, policies in contest.items():
        length_s = seconds or SECONDS[cell.replicas]
        seeds = range(len(policies[OURS]))
        floors_s = [
            find_floor_s(by_name[cell.load], Job(cell.load, cell.replicas, OURS, cell.part, seed, length_s))
            for seed in seeds
        ]
        p90_s = {name: over_seeds(outcomes, "p90_s").mean for name, outcomes in policies.items()}
        rival = min((name for name in p90_s if name != OURS), key=p90_s.__getitem__)
        found[cell.label] = Floor(float(np.mean(floors_s)), rival, p90_s[rival], p90_s[OURS])
    return found


def format_floors(floors: dict[str, Floor]) -> tuple[str, list[str], list[list[str]]]:
    """The table of all floors."""
    rows = [
        [
            label,
            f"{each.floor_s:.2f} s",
            f"{each.rival_s:.2f} s {each.rival}",
            f"{WANTED_RATIO * each.rival_s:.2f} s" + (", below the floor" if each.is_out_of_reach else ""),
            f"{each.ours_s:.2f} s",
        ]
        for label, each in floors.items()
    ]
    heads = ["", "floor", "lowest rival's", f"{WANTED_RATIO:g} of that", "ours"]
    return "p90 TTFT beside the floor: every request alone on an idle replica with an endless shared cache", heads, rows
