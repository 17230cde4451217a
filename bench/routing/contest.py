"""The course of the contest: which runs there are, who makes them, and what is kept.

A run is known by its job, its load and the sources that it rests on: a change of this platform's routing plays ours
anew and nobody else. Runs are made seed by seed, so that a contest that was broken off has fewer seeds and all cells.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from bench.routing.loads import Load
from bench.routing.play import Job, Outcome, play
from bench.support.kept_runs import KeptRuns, compute_all, digest, make_key

BASIS: Final = (
    "platform/sim",
    "platform/prefix",
    "platform/wire",
    "platform/router/dispatch",
    "platform/router/replicas",
    "platform/workers/engine",
    "platform/workers/serving",
    "bench/autoscaling/replicas.py",
    "bench/routing/loads.py",
    "bench/routing/play.py",
    "bench/routing/rivals.py",
    "bench/routing/seen.py",
)
OURS: Final = ("platform/router/routing", "platform/perf")
"""What only ours decides by. Rivals read views that are made there, whose meaning is taken not to change."""
SECONDS: Final = {8: 120.0, 64: 60.0}
"""Length of a run by the number of replicas, simulated seconds."""


class Plan(NamedTuple):
    """What is to be played. parts: rates, as parts of the capacity."""

    replicas: Sequence[int]
    policies: Sequence[str]
    parts: Sequence[float]
    num_seeds: int
    seconds: float | None = None
    """None: by the number of replicas."""


class Cell(NamedTuple):
    """A load at a size and a rate: what policies are compared in."""

    load: str
    replicas: int
    part: float

    @property
    def label(self) -> str:
        return f"{self.load}, {self.replicas} replicas, {self.part:g} of the capacity"


Contest = dict[Cell, dict[str, list[Outcome]]]
"""Outcomes of every policy by cell, in the order of the seeds: as many of each policy."""


class Store:
    """Outcomes by job, in the file `path` of JSON lines."""

    def __init__(self, path: Path, loads: Sequence[Load]) -> None:
        self._runs = KeptRuns(path, Outcome)
        self._loads = {load.name: load.digest for load in loads}
        self._basis, self._ours = digest(BASIS), digest(BASIS + OURS)

    def get(self, job: Job) -> Outcome | None:
        return self._runs.get(self._key(job))

    def put(self, job: Job, outcome: Outcome) -> None:
        self._runs.put(self._key(job), job.label, outcome)

    def _key(self, job: Job) -> str:
        return make_key([job, self._ours if job.policy == "ours" else self._basis, self._loads[job.load]])


def list_jobs(plan: Plan, loads: Sequence[Load]) -> list[Job]:
    """All runs of a plan, the smaller sizes first, seed by seed."""
    return [
        Job(load.name, replicas, policy, part, seed, plan.seconds or SECONDS[replicas])
        for replicas in plan.replicas
        for seed in range(plan.num_seeds)
        for load in loads
        for part in plan.parts
        for policy in plan.policies
    ]


def hold_contest(
    plan: Plan,
    loads: Sequence[Load],
    store: Store,
    processes: int,
    on_done: Callable[[Job, Outcome, int], None],
    limit_s: float | None = None,
) -> Contest:
    """Make the runs that the store does not know, for at most about `limit_s`, and return what there is then.
    Deterministic. on_done: called with each new run and the number that are left."""
    jobs = list_jobs(plan, loads)
    new = [job for job in jobs if store.get(job) is None]
    by_name = {load.name: load for load in loads}
    begin_s = monotonic()
    runs = compute_all(new, [partial(play, by_name[job.load], job) for job in new], processes)
    for left, (job, outcome) in zip(range(len(new) - 1, -1, -1), runs, strict=False):
        store.put(job, outcome)
        on_done(job, outcome, left)
        if limit_s is not None and monotonic() - begin_s > limit_s:
            break
    runs.close()
    return collect(jobs, plan.policies, store.get)


def collect(jobs: Sequence[Job], policies: Sequence[str], get: Callable[[Job], Outcome | None]) -> Contest:
    """The outcomes by cell, of the seeds that every policy has played; cells without one are left out."""
    found: dict[Cell, dict[int, dict[str, Outcome]]] = {}
    for job in jobs:
        outcome = get(job)
        if outcome is not None:
            seeds = found.setdefault(Cell(job.load, job.replicas, job.part), {})
            seeds.setdefault(job.seed, {})[job.policy] = outcome
    contest: Contest = {}
    for cell, by_seed in found.items():
        whole = [by_policy for by_policy in by_seed.values() if len(by_policy) == len(policies)]
        if whole:
            contest[cell] = {policy: [by_policy[policy] for by_policy in whole] for policy in policies}
    return contest
