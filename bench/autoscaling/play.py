"""One run: an autoscaler on a window, and what came of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import msgspec

from bench.autoscaling.replicas import ENGINE, START_S, TTFT_S, is_in_target, work_s
from bench.autoscaling.windows import Window
from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.autoscale.scaler import Actuator, ScaledPool, Scaler, Source
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulation import MakeTurns, Simulation, Turns

POOL = "pool"
SLOT_S = 10.0
"""Length of the parts of a window for which misses are counted."""
DRAIN_S = 120.0
"""Seconds behind the window in which answers may still end."""
OTHER_REPLICAS = 30
"""Replicas of the other tier: enough for everything. Only what they answer is paid for."""
OTHER_PRICE = 2.0
"""Price of an answer there, as a multiple of what a full replica of the pool takes for it."""


class Run(NamedTuple):
    """How a window is played. replicas: at the beginning, None: as many as its first minutes need. autoscale: None
    where the number is fixed; then nobody has turns. has_other_tier: whether another tier answers what the pool
    would answer too late. gateway: the queue's settings."""

    replicas: int | None
    autoscale: AutoscaleConfig | None
    make_turns: MakeTurns = Scaler
    has_other_tier: bool = False
    gateway: GatewayConfig = GatewayConfig(ttft_target_s=TTFT_S)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run, of the part that counts."""

    requests: int
    in_target: int
    refused: int
    """Requests that were shed or refused; they are not in target."""
    hours: float
    """Replica-hours, from asked for to gone."""
    most: int
    """Highest target."""
    changes: int
    """Number of times that the target's direction changed."""
    bursts: dict[str, float] = {}
    """Part in target of the requests of each burst."""
    misses: list[int] = []
    """Requests not in target, by slots of SLOT_S."""
    other_hours: float = 0.0
    """Price of the answers of the other tier, in replica-hours."""
    targets: list[int] = []
    """An oracle's schedule."""

    @property
    def attained(self) -> float:
        return self.in_target / self.requests


def play(window: Window, run: Run, seed: int, *, model_error: float = 1.0, least: float = 0.0) -> Outcome:
    """The outcome of one run. Deterministic by seed. model_error: see `SimulationConfig`. least: a run that can no
    longer have this part in target is broken off there; of its outcome only `attained` means something, which is below
    that."""
    replicas = window.first_replicas if run.replicas is None else run.replicas
    pools = [SimulatedPool(POOL, "edge", replicas, run.autoscale, ENGINE)]
    if run.has_other_tier:
        pools.append(SimulatedPool("other", "cloud", OTHER_REPLICAS, None, ENGINE))
    config = SimulationConfig(seed=seed, start_s=START_S, model_error=model_error)
    watch, judge = _Watch(run.make_turns), _Judge(window, least)
    simulation = Simulation(pools, run.gateway, config, judge, _ignore, Journal(None), make_scaler=watch.make)
    with suppress(_HopelessError):
        simulation.run(window.plan(), 600.0, DRAIN_S)
    targets = [target for at_s, target in watch.targets if window.begin_s <= at_s < window.end_s] or [replicas]
    return Outcome(
        requests=judge.requests,
        in_target=judge.in_target,
        refused=judge.refused,
        hours=_count_hours(simulation, window),
        most=max(targets),
        changes=count_changes(targets),
        bursts={
            burst.name: 1 - sum(late) / len(late)
            for burst, late in ((burst, judge.by_burst[burst.name]) for burst in window.bursts)
            if late
        },
        misses=judge.misses,
        other_hours=judge.other_hours,
    )


def count_changes(targets: Sequence[int]) -> int:
    """Number of times that a course of targets turns from up to down or from down to up."""
    signs = [after > before for before, after in pairwise(targets) if after != before]
    return sum(before != after for before, after in pairwise(signs))


class _Watch:
    """Makes the autoscaler's turns and notes the target after each."""

    def __init__(self, make_turns: MakeTurns) -> None:
        self.targets: list[tuple[float, int]] = []
        self._make_turns = make_turns
        self._turns: Turns
        self._actuator: Actuator
        self._clock: Callable[[], float]

    def make(
        self,
        name: str,
        pools: Sequence[ScaledPool],
        source: Source,
        actuator: Actuator,
        journal: Journal,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> Turns:
        self._turns = self._make_turns(name, pools, source, actuator, journal, clock, unix_clock)
        self._actuator, self._clock = actuator, clock
        return self

    async def reconcile(self) -> None:
        await self._turns.reconcile()
        self.targets.append((self._clock(), (await self._actuator.read())[POOL].target))


class _HopelessError(Exception):
    """More requests than may be are late."""


class _Judge:
    """Counts requests that are over. Raises _HopelessError where the part `least` is out of reach."""

    def __init__(self, window: Window, least: float) -> None:
        self.requests = self.in_target = self.refused = 0
        self.by_burst: dict[str, list[bool]] = {burst.name: [] for burst in window.bursts}
        self.misses = [0] * (int((window.end_s - window.begin_s) / SLOT_S) + 1)
        self.other_hours = 0.0
        self._window = window
        self._most_late = (1 - least) * sum(window.begin_s <= row[0] < window.end_s for row in window.rows)

    def __call__(self, request: SimulatedRequest) -> None:
        window, at_s = self._window, request.at_s
        if not window.begin_s <= at_s < window.end_s:
            return
        is_late = not (request.is_finished and is_in_target(request.num_prompt_tokens, at_s, request.token_times_s))
        self.requests += 1
        self.in_target += not is_late
        self.refused += request.error is not None
        if request.tier == "cloud":
            self.other_hours += OTHER_PRICE * work_s(request.num_prompt_tokens, len(request.token_times_s)) / 3600
        self.misses[int((at_s - window.begin_s) / SLOT_S)] += is_late
        for burst in window.bursts:
            if burst.begin_s <= at_s < burst.end_s:
                self.by_burst[burst.name].append(is_late)
        if self.requests - self.in_target > self._most_late:
            raise _HopelessError


def _count_hours(simulation: Simulation, window: Window) -> float:
    return sum(_spans_s(simulation, window)) / 3600


def _spans_s(simulation: Simulation, window: Window) -> Iterator[float]:
    for life in simulation.fleet.lives.values():
        if life.pool != POOL:
            continue
        end_s = window.end_s if life.ended_s is None else min(window.end_s, life.ended_s)
        yield max(0.0, end_s - max(window.begin_s, life.asked_s))


def _ignore(_: object) -> None:
    """Changes of the number of ready replicas."""
