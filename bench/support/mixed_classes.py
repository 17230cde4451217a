"""A load of two classes for benches of targets: interactive requests and batch ones, each at a part of what a pool
computes of that kind alone; played in the simulator or against a platform, and judged alike.

Deterministic by seed, but for a real platform's times. A request is in target if it was answered, its first token came
in time, and its tokens at the pace of its target: what comes first of the three names its outcome.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from bench.support.loopback import ChatClient, prompt
from penstock.autoscale.journal import Journal
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulation import Simulation
from penstock.wire.targets import NO_TARGETS, Target
from penstock_loadtest.planned import Planned

TEMPLATE_TOKENS = 30
"""Tokens that the demo model's chat template puts around a message, roughly; part of a prompt's length here."""


class Kind(NamedTuple):
    """Requests of one class; tokens of prompts and answers are drawn uniformly, the ends among them."""

    service_class: str
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


INTERACTIVE = Kind("interactive", (60, 240), (24, 96))
BATCH = Kind("batch", (120, 720), (32, 160))
KINDS = (INTERACTIVE, BATCH)


@dataclass
class Judged:
    """What became of the requests of one class that came within the measured time."""

    target: Target
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    """Tokens of answers that came within the measured time, whoever's they were."""
    seconds: float = 0.0

    def judge(self, ttft_s: float | None, token_times_s: Sequence[float]) -> None:
        """Count a request. ttft_s: None if it was not answered whole. token_times_s: of each of its tokens."""
        if ttft_s is None or len(token_times_s) < 2:
            self.outcomes["failed"] += 1
            return
        tpot_s = (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)
        self.ttft_s.append(ttft_s)
        self.tpot_s.append(tpot_s)
        self.gaps_s += [b - a for a, b in itertools.pairwise(token_times_s)]
        if self.target.ttft_s is not None and ttft_s > self.target.ttft_s:
            self.outcomes["ttft"] += 1
        elif self.target.tpot_s is not None and tpot_s > self.target.tpot_s:
            self.outcomes["tpot"] += 1
        else:
            self.outcomes["met"] += 1

    def add(self, other: "Judged") -> None:
        """Add another run's."""
        self.outcomes += other.outcomes
        self.ttft_s += other.ttft_s
        self.tpot_s += other.tpot_s
        self.gaps_s += other.gaps_s
        self.tokens += other.tokens
        self.seconds += other.seconds

    @property
    def share(self) -> float:
        """Part of the requests in target."""
        return self.outcomes["met"] / max(1, self.outcomes.total())

    @property
    def tpot_share(self) -> float:
        """Part of the answered requests whose tokens kept the pace."""
        assert self.target.tpot_s is not None
        return sum(each <= self.target.tpot_s for each in self.tpot_s) / max(1, len(self.tpot_s))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def draw_plan(rates: Mapping[Kind, float], seconds: float, seed: int) -> list[Planned]:
    """Requests by Poisson processes, each of its kind's tenant, which is named as the class. rates: requests a
    second."""
    drawn: list[tuple[float, Kind, int, int]] = []
    for kind, rate in rates.items():
        rng = random.Random(f"{seed} {kind.service_class}")
        at_s = rng.expovariate(rate) if rate else seconds
        while at_s < seconds:
            drawn.append((at_s, kind, rng.randint(*kind.prompt_tokens), rng.randint(*kind.output_tokens)))
            at_s += rng.expovariate(rate)
    return [
        Planned(
            index=index,
            at_s=at_s,
            endpoint="completions",
            prompt=[-1 - index, prompt_tokens],
            max_tokens=output_tokens,
            tenant=kind.service_class,
        )
        for index, (at_s, kind, prompt_tokens, output_tokens) in enumerate(sorted(drawn))
    ]


def simulate_plan(
    plan: Sequence[Planned], pool: SimulatedPool, window: tuple[float, float], target: Target, *, seed: int = 0
) -> dict[str, Judged]:
    """Play a plan in the simulator. window: begin and end of the measured time, seconds."""
    judged = _begin(target, window)
    over: list[SimulatedRequest] = []
    classes = {kind.service_class: kind.service_class for kind in KINDS}
    simulation = Simulation(
        [pool],
        GatewayConfig(),
        SimulationConfig(seed=seed, classes=classes),
        over.append,
        lambda observed: None,  # noqa: ARG005 (the number of replicas never changes)
        Journal(None),
        has_tenants=True,
    )
    simulation.run(iter(plan), 120.0, 120.0)
    for request in over:
        each, times_s = judged[request.planned.tenant], request.token_times_s
        each.tokens += sum(window[0] <= at_s < window[1] for at_s in times_s)
        if window[0] <= request.at_s < window[1]:
            is_whole = request.error is None and request.is_finished
            each.judge(times_s[0] - request.at_s if is_whole else None, times_s)
    return judged


def find_capacity(kind: Kind, pool: SimulatedPool) -> float:
    """Requests of a kind that the pool ends a second if it has nothing else and never waits for one, simulated, without
    targets."""
    free = pool._replace(targets=NO_TARGETS)
    rate, seconds = 60.0 * pool.replicas, 80.0
    ended: list[SimulatedRequest] = []
    simulation = Simulation(
        [free],
        GatewayConfig(),
        SimulationConfig(),
        ended.append,
        lambda observed: None,  # noqa: ARG005 (as above)
        Journal(None),
    )
    simulation.run(iter(draw_plan({kind: rate}, seconds, 1)), 120.0, 120.0)
    window = 0.4 * seconds, 0.9 * seconds
    whole = [each.end_s for each in ended if each.is_finished and each.error is None and each.end_s is not None]
    return sum(window[0] <= end_s < window[1] for end_s in whole) / (window[1] - window[0])


async def play_plan(
    plan: Sequence[Planned], clients: Mapping[str, ChatClient], window: tuple[float, float], target: Target
) -> dict[str, Judged]:
    """Play a plan against a platform. clients: by class."""
    judged = _begin(target, window)
    began_s = time.perf_counter()

    async def send(planned: Planned) -> None:
        assert isinstance(planned.prompt, list)
        rng = random.Random(planned.index)
        content = prompt(rng, int(planned.prompt[1]) - TEMPLATE_TOKENS)
        await asyncio.sleep(max(0.0, planned.at_s - (time.perf_counter() - began_s)))
        sent_s = time.perf_counter() - began_s
        each = judged[planned.tenant]
        try:
            answer = await clients[planned.tenant].chat(content, planned.max_tokens)
        except (RuntimeError, ConnectionError, TimeoutError, httpx.HTTPError):
            answer = None
        times_s = [] if answer is None else [sent_s + arrival for arrival in answer.arrivals]
        each.tokens += sum(window[0] <= at_s < window[1] for at_s in times_s)
        if window[0] <= planned.at_s < window[1]:
            each.judge(None if answer is None else times_s[0] - planned.at_s, times_s)

    async with asyncio.TaskGroup() as tasks:
        for planned in plan:
            tasks.create_task(send(planned))
    return judged


def _begin(target: Target, window: tuple[float, float]) -> dict[str, Judged]:
    """The interactive class is judged by the target; batch has none."""
    targets = {INTERACTIVE: target, BATCH: Target()}
    return {kind.service_class: Judged(targets[kind], seconds=window[1] - window[0]) for kind in KINDS}
