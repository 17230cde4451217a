"""One turn over all pools: observe, decide, act, publish. Not a loop; it receives its collaborators.

Invariant: what is away (Redis, Serve's controller) changes nothing while it is; what one pool's change raises does not
keep the others from their turn, and a pool that could not be changed is decided on anew next time, from Serve's state
then.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec import structs
from ray.exceptions import RayError
from redis.exceptions import RedisError

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.explain import change_of, explain, with_phases, with_schedule, with_shortage
from penstock.autoscale.journal import Journal
from penstock.autoscale.limits.budget import Claim, divide, grant
from penstock.autoscale.limits.schedules import coming, lead_s, scheduled_range
from penstock.autoscale.limits.shortage import Retreat, Shortage, bound_by_shortage, note_shortage
from penstock.autoscale.load_targets import with_targets
from penstock.autoscale.observation import Observation, ServeState
from penstock.autoscale.observe import AgedReport, observe
from penstock.autoscale.policy import STALE_S, Decision, Reason, State, decide
from penstock.autoscale.range import Range, limit
from penstock.autoscale.records.memory import Memory, RecordStore
from penstock.autoscale.records.record import age_of, restore
from penstock.autoscale.starts import PodTimes, expected_start_s
from penstock.autoscale.victim import choose_victims
from penstock.autoscale.zero import Usage, find_range, note_use, ready_in_s
from penstock.wire.explanation import KEPT_CHANGES, Change, PoolExplanation
from penstock.wire.scaling import PoolTarget, Targets
from penstock.wire.targets import NO_TARGETS, ClassTargets

BLIND = (Reason.STALE, Reason.UNKNOWN, Reason.BOUNDS, Reason.RESTORED)
"""Reasons of targets that say nothing of the load."""
HITS_S = 60.0
"""Seconds over which the tokens that a cache saved tell what it is worth."""
REPORTS, RECORDS = "Redis for reports", "Redis for records"

log = logging.getLogger("penstock.autoscale")


class ScaledPool(NamedTuple):
    name: str
    app_name: str
    max_rows: int
    """Sequences that a replica runs at once."""
    settings: AutoscaleConfig
    gpus: int = 0
    """GPUs that a replica takes of the budget; 0: the budget does not bind the pool."""
    targets: ClassTargets = NO_TARGETS
    """Targets of the pool's requests by class, as far as any are named."""


class Source(Protocol):
    async def read(self) -> Sequence[AgedReport]: ...
    async def publish(self, targets: Targets) -> None: ...


class Actuator(Protocol):
    async def read(self) -> Mapping[str, ServeState]: ...
    async def set_target(self, pool: str, target: int) -> None: ...
    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool: ...


@dataclass(slots=True)
class _PoolState:
    """What the scaler remembers of a pool between two turns."""

    state: State = field(default_factory=State)
    usage: Usage = field(default_factory=Usage)
    shortage: Shortage | None = None
    retreat: Retreat = field(default_factory=Retreat)
    target: int | None = None
    safe_target: int | None = None
    """Last target that was decided on fresh reports."""
    recalled: int | None = None
    """Target that an autoscaler before this one left, until Serve has it."""
    ready_in_s: float | None = None
    """Seconds until a first replica should be there; None: before the first turn."""
    reasons: Counter[str] = field(default_factory=Counter)
    hits: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)
    """Time, and prompt tokens that each replica's cache was expected to save so far; the oldest first."""
    explanation: PoolExplanation | None = None
    """Why the target is what it is; None until there is one."""
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES))


class Scaler:
    def __init__(
        self,
        name: str,
        pools: Sequence[ScaledPool],
        source: Source,
        actuator: Actuator,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        budget_gpus: int | None = None,
        shortages: Callable[[], Mapping[str, Shortage]] = dict,
        pod_times: Callable[[], Mapping[str, PodTimes]] = dict,
        records: RecordStore | None = None,
    ) -> None:
        """name: of this process. budget_gpus: GPUs of all pools together; None: no bound. shortages: replicas that have
        no place now, by application. pod_times: of the newest pod that is ready, by application. records: where what is
        known outlives the process; None: nowhere."""
        self._pod_times = pod_times
        self._shortages = shortages
        self._budget_gpus = budget_gpus
        self._name = name
        self._pools = list(pools)
        self._source = source
        self._actuator = actuator
        self._journal = journal
        self._clock = clock
        self._unix_clock = unix_clock
        self._pool_states = {pool.name: _PoolState() for pool in pools}
        self._memory = None if records is None else Memory(records, clock, unix_clock)
        self._unavailable: set[str] = set()
        """Services that did not answer their last request."""

    async def reconcile(self) -> None:
        reports = await self._read_reports()
        await self._recall()
        serve_states = await self._read_replicas()
        seen = {
            pool.name: observe(pool.name, serve_states[pool.name], reports)
            for pool in self._pools
            if pool.name in serve_states
        }
        ranges = {pool.name: self._look(pool, seen[pool.name]) for pool in self._pools if pool.name in seen}
        granted = self._divide_budget(seen, ranges)
        for pool in self._pools:
            if pool.name in seen:
                allowed = ranges[pool.name].at_most(granted.get(pool.name, pool.settings.max_replicas), Reason.BUDGET)
                await self._reconcile_pool(pool, seen[pool.name], allowed)
        with self._tolerate("Redis for targets", (RedisError, OSError)):
            await self._source.publish(self._targets())
        await self._keep(self._pool_states)

    async def _recall(self) -> None:
        """Takes over what an autoscaler before this one knew, once Redis tells it; before that, this one goes on by
        itself."""
        if self._memory is None or self._memory.is_read or REPORTS in self._unavailable:
            return
        with self._tolerate(RECORDS, (RedisError, OSError)):
            now, unix_s = self._clock(), self._unix_clock()
            for name, record in (await self._memory.recall(self._pool_states)).items():
                pool_state = self._pool_states[name]
                pool_state.state = restore(pool_state.state, record, now, unix_s)
                pool_state.safe_target = pool_state.safe_target if record.target is None else record.target
                pool = next(pool for pool in self._pools if pool.name == name)
                if age_of(record, unix_s) <= pool.settings.scale_down_delay_s and not pool.settings.dry_run:
                    pool_state.recalled = record.target
                log.info("recalled", extra={"pool": name, "target": record.target, "age_s": age_of(record, unix_s)})

    async def _keep(self, names: Iterable[str]) -> None:
        """Writes what the next autoscaler should know of these pools; not in a turn in which Redis told no reports, and
        so waited for already."""
        if self._memory is None or REPORTS in self._unavailable:
            return
        with self._tolerate(RECORDS, (RedisError, OSError)):
            for name in names:
                pool_state = self._pool_states[name]
                if pool_state.target is not None:
                    await self._memory.keep(name, pool_state.safe_target, pool_state.state)

    async def _read_reports(self) -> Sequence[AgedReport]:
        """Reports of all gateways; none while Redis is away: then nothing changes."""
        with self._tolerate(REPORTS, (RedisError, OSError)):
            return await self._source.read()
        return []

    async def _read_replicas(self) -> Mapping[str, ServeState]:
        """State of all pools; none while Serve's controller is away or recovers its replicas: then no pool has its
        turn."""
        with self._tolerate("Serve's controller", (RayError, ValueError, TimeoutError)):
            return await self._actuator.read()
        return {}

    @contextmanager
    def _tolerate(self, service: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
        """Swallows these errors; logs a line when a service stops to answer, and one when it answers again."""
        try:
            yield
        except errors as error:
            if service not in self._unavailable:
                log.warning("not reached", extra={"service": service, "error": type(error).__name__})
            self._unavailable.add(service)
        else:
            if service in self._unavailable:
                log.info("reached again", extra={"service": service})
            self._unavailable.discard(service)

    def _look(self, pool: ScaledPool, observation: Observation) -> Range:
        """Notes how the pool is used. Returns what it may have, whatever others need."""
        pool_state, now, unix_s = self._pool_states[pool.name], self._clock(), self._unix_clock()
        hits = {replica.replica_id: replica.hit_tokens for replica in observation.replicas}
        pool_state.hits.append((now, hits))
        while now - pool_state.hits[0][0] > HITS_S:
            pool_state.hits.popleft()
        pool_state.usage = note_use(pool_state.usage, observation, now)
        ahead_s = lead_s(pool.settings, pool_state.state.starts.took_s)
        whole = scheduled_range(pool.settings, coming(pool.settings, unix_s), ahead_s, unix_s)
        pool_state.shortage = self._shortages().get(pool.app_name)
        num_running = len(observation.serve_state.running)
        if observation.age_s <= STALE_S:  # without news of the load the target is held, with or without a place
            pool_state.retreat = note_shortage(
                pool_state.retreat, pool_state.shortage, num_running, pool.settings.unplaced_s, now
            )
        allowed = find_range(pool.settings, whole, pool_state.usage, observation, now)
        return bound_by_shortage(allowed, pool_state.retreat)

    def _divide_budget(self, seen: Mapping[str, Observation], ranges: Mapping[str, Range]) -> dict[str, int]:
        """The most replicas that each pool under the budget may have now; pools that only say what they would do hold
        what they have, and are not bound."""
        if self._budget_gpus is None:
            return {}
        claims = [self._claim(pool, seen.get(pool.name), ranges.get(pool.name)) for pool in self._pools if pool.gpus]
        granted = grant(self._budget_gpus, claims, divide(self._budget_gpus, claims))
        bound = {pool.name for pool in self._pools if not pool.settings.dry_run}
        return {name: replicas for name, replicas in granted.items() if name in bound}

    def _claim(self, pool: ScaledPool, observation: Observation | None, allowed: Range | None) -> Claim:
        """What the pool would have without the budget. One that Serve does not know keeps what it was last told."""
        pool_state, settings = self._pool_states[pool.name], self._settings(pool)
        if observation is None or allowed is None:
            last = settings.max_replicas if pool_state.target is None else pool_state.target
            return Claim(pool.name, settings.priority, pool.gpus, last, last, last, last)
        serve_state = observation.serve_state
        num_held = len(serve_state.running) + serve_state.num_starting + serve_state.num_stopping
        if settings.dry_run:
            least = wanted = serve_state.target
        else:
            _, decision = decide(limit(settings, allowed), pool_state.state, observation, pool.max_rows, self._clock())
            least, wanted = allowed.least, decision.target
        return Claim(pool.name, settings.priority, pool.gpus, least, wanted, serve_state.target, num_held)

    def _settings(self, pool: ScaledPool) -> AutoscaleConfig:
        """The pool's settings, with the targets of the classes that came lately."""
        return with_targets(pool.settings, pool.targets, self._pool_states[pool.name].state.samples)

    async def _reconcile_pool(self, pool: ScaledPool, observation: Observation, allowed: Range) -> None:
        """Decides and acts. allowed: what the pool may have now."""
        pool_state, now = self._pool_states[pool.name], self._clock()
        allowed = _restore_target(pool_state, allowed, observation.serve_state)
        own = self._settings(pool)
        settings = limit(own, allowed)
        pool_state.state, decision = decide(settings, pool_state.state, observation, pool.max_rows, now)
        is_fresh = observation.age_s <= STALE_S
        if is_fresh and not pool.settings.min_replicas and pool_state.usage.empty_s is not None:
            # what was held has waited long: the first replica gets time to help
            pool_state.state = pool_state.state._replace(raised_s=now)
        decision = allowed.explain(decision, observation.serve_state.target)
        start_s = expected_start_s(pool_state.state.starts.took_s, settings.start_s)
        pool_state.ready_in_s = ready_in_s(start_s, pool_state.usage, now)
        pool_state.reasons[decision.reason.value] += 1
        pool_state.target = decision.target
        if decision.reason not in BLIND:
            pool_state.safe_target = decision.target
        if decision.target > observation.serve_state.target and RECORDS not in self._unavailable:
            await self._keep([pool.name])  # or a successor of one that ends now would take back what it asked for
        victims = self._choose_victims(observation, decision, pool_state.hits[0][1])
        outcome = (
            "kept"
            if decision.target == observation.serve_state.target
            else await self._act(pool, observation.serve_state, decision, victims)
        )
        unix_s = self._unix_clock()
        self._journal.note(pool.name, observation, decision, outcome, victims, unix_s)
        found = explain(pool.name, own, allowed, pool_state.state, observation, decision, now)
        ahead_s = lead_s(pool.settings, pool_state.state.starts.took_s)
        found = with_schedule(found, coming(pool.settings, unix_s), ahead_s)
        found = with_phases(found, observation, self._pod_times().get(pool.app_name))
        found = with_shortage(found, pool_state.shortage, pool_state.retreat, now)
        _keep_explanation(pool_state, structs.replace(found, outcome=outcome), unix_s)

    def _choose_victims(
        self, observation: Observation, decision: Decision, hits_before: Mapping[str, int]
    ) -> tuple[str, ...]:
        """Ids of the replicas that go; none while fewer run than were asked for: then the target is lowered to those
        that run, and Serve stops first what has not started."""
        serve_state = observation.serve_state
        count = serve_state.target - decision.target
        if count <= 0 or serve_state.num_starting or len(serve_state.running) < serve_state.target:
            return ()
        return choose_victims(serve_state.running, observation.replicas, hits_before, count)

    async def _act(
        self, pool: ScaledPool, serve_state: ServeState, decision: Decision, victims: tuple[str, ...]
    ) -> str:
        if pool.settings.dry_run:
            return "dry run"
        try:
            if victims:
                is_done = await self._actuator.step_down(pool.name, victims, serve_state.target - len(victims))
                return "applied" if is_done else "refused"
            await self._actuator.set_target(
                pool.name, max(decision.target, min(serve_state.target, len(serve_state.running)))
            )
        except (RayError, ValueError, TimeoutError) as error:
            log.warning("target not set", extra={"pool": pool.name, "error": type(error).__name__})
            return "failed"
        return "applied"

    def _targets(self) -> Targets:
        rows = [
            PoolTarget(name, pool_state.target, dict(pool_state.reasons), pool_state.ready_in_s)
            for name, pool_state in self._pool_states.items()
            if pool_state.target is not None
        ]
        return Targets(self._name, rows, self.explanations)

    @property
    def explanations(self) -> list[PoolExplanation]:
        """Why each pool's target is what it is, of those that have been decided on."""
        return [each.explanation for each in self._pool_states.values() if each.explanation is not None]


def _keep_explanation(pool_state: _PoolState, found: PoolExplanation, unix_s: float) -> None:
    """Keeps the explanation, and what it changes; a change that does not come about is kept once."""
    if found.was != found.target:
        change = change_of(found, unix_s)
        if not pool_state.changes or structs.replace(pool_state.changes[-1], unix_s=change.unix_s) != change:
            pool_state.changes.append(change)
    pool_state.explanation = structs.replace(found, changes=tuple(pool_state.changes))


def _restore_target(pool_state: _PoolState, allowed: Range, serve_state: ServeState) -> Range:
    """The range, with the target that an autoscaler before this one left as its lower bound until Serve has it: that
    one may have ended between deciding and acting."""
    if pool_state.recalled is None or serve_state.target >= min(pool_state.recalled, allowed.most):
        pool_state.recalled = None
        return allowed
    return allowed.at_least(pool_state.recalled, Reason.RESTORED)
