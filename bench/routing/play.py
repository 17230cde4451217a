"""One run of the contest: a routing policy on a load, and what came of it.

Every request counts: one that was refused or got no token in time is not in target, and its time to the first token is
taken as the longest that there is, so that nobody gains by refusing.
"""

from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np

from bench.autoscaling.replicas import ENGINE, TTFT_S, is_in_target
from bench.routing.loads import Load, mean_work_s
from bench.routing.rivals import POLICIES
from penstock.autoscale.journal import Journal
from penstock.router.config import GatewayConfig
from penstock.router.replicas.routing_policy import RoutedRequest, RoutingPolicy
from penstock.router.routing.policy import Decision, ReplicaView
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulation import Simulation

TIMEOUT_S = 120.0
"""Longest time of a request, and of the answers behind the last arrival."""
LEAD_PART = 0.25
"""Part of a run that is played before counting begins: the caches fill."""
GATEWAY = GatewayConfig(ttft_target_s=TTFT_S)


class Job(msgspec.Struct, frozen=True):
    """A run that is to be made. part: requests a second, as a part of what the replicas would take with one endless
    cache. seconds: its length, in simulated time."""

    load: str
    replicas: int
    policy: str
    part: float
    seed: int
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.load}, {self.replicas} replicas, {self.part:g} of the capacity, seed {self.seed}: {self.policy}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run, of the part that counts."""

    requests: int
    rate: float
    """Requests a second that came on the average."""
    goodput: float
    """Requests in target a second."""
    p50_s: float
    p90_s: float
    p99_s: float
    cached: float
    """Part of the prompts' tokens that were found in a cache."""
    imbalance: float
    """Requests in flight on the fullest replica over the mean of all, over the moments of decisions."""
    unanswered: int
    """Requests without an answer: refused, or too late."""


def play(load: Load, job: Job) -> Outcome:
    """The outcome of one run. Deterministic by seed. Raises KeyError for a policy that there is not."""
    rate = job.part * job.replicas / mean_work_s(load)
    policy = _Watch(POLICIES[job.policy](Random(f"policy {job.seed}")), LEAD_PART * job.seconds)
    judge = _Judge(LEAD_PART * job.seconds, job.seconds)
    simulation = Simulation(
        [SimulatedPool("pool", "edge", job.replicas, None, ENGINE)],
        GATEWAY,
        SimulationConfig(seed=job.seed),
        judge,
        _ignore,
        Journal(None),
        routing=policy,
    )
    simulation.run(iter(load.plan(job.seed, rate, job.seconds)), TIMEOUT_S, TIMEOUT_S)
    p50_s, p90_s, p99_s = np.quantile(judge.ttfts_s, [0.5, 0.9, 0.99]).tolist()
    span_s = (1 - LEAD_PART) * job.seconds
    return Outcome(
        requests=len(judge.ttfts_s),
        rate=len(judge.ttfts_s) / span_s,
        goodput=judge.in_target / span_s,
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        cached=judge.cached_tokens / judge.prompt_tokens,
        imbalance=policy.imbalance,
        unanswered=judge.unanswered,
    )


class _Watch:
    """A policy whose replicas' requests in flight are summed at each of its decisions from `begin_s` on."""

    def __init__(self, policy: RoutingPolicy, begin_s: float) -> None:
        self._policy = policy
        self._begin_s = begin_s
        self._fullest = self._mean = 0.0

    @property
    def imbalance(self) -> float:
        return self._fullest / self._mean if self._mean else 1.0

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if request.now_s >= self._begin_s and views:
            loads = [view.num_inflight for view in views]
            self._fullest += max(loads)
            self._mean += sum(loads) / len(loads)
        return self._policy(request, views)


class _Judge:
    """Counts requests that are over, of those that came from `begin_s` until `end_s`."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.ttfts_s: list[float] = []
        self.in_target = self.unanswered = self.cached_tokens = self.prompt_tokens = 0
        self._begin_s, self._end_s = begin_s, end_s

    def __call__(self, request: SimulatedRequest) -> None:
        at_s, times_s = request.at_s, request.token_times_s
        if not self._begin_s <= at_s < self._end_s:
            return
        self.ttfts_s.append(times_s[0] - at_s if times_s else TIMEOUT_S)
        self.unanswered += not request.is_finished
        self.in_target += request.is_finished and is_in_target(request.num_prompt_tokens, at_s, times_s)
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_tokens += (request.seq.num_cached_tokens or 0) if request.seq is not None else 0


def _ignore(_: object) -> None:
    """Changes of the number of ready replicas."""
