"""One turn over all pools: observe, decide, act, publish. Not a loop; it receives its collaborators.

Invariant: what is away (Redis, Serve's controller) changes nothing while it is; what one pool's change raises does not
keep the others from their turn, and a pool that could not be changed is decided on anew next time, from Serve's state
then.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ray.exceptions import RayError
from redis.exceptions import RedisError

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.autoscale.observation import Observation, ServeState
from penstock.autoscale.observe import AgedReport, observe
from penstock.autoscale.policy import STALE_S, Decision, Reason, State, decide
from penstock.autoscale.range import Range, limit
from penstock.autoscale.records.memory import Memory, RecordStore
from penstock.autoscale.records.record import age_of, restore
from penstock.autoscale.starts import expected_start_s
from penstock.autoscale.victim import choose_victims
from penstock.autoscale.zero import Usage, find_range, note_use, ready_in_s
from penstock.wire.scaling import PoolTarget, Targets

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
    target: int | None = None
    safe_target: int | None = None
    """Last target that was decided on fresh reports."""
    recalled: int | None = None
    """Target that an autoscaler before this one left, until Serve has it."""
    ready_in_s: float | None = None
    """Seconds until a first replica should be there; None: one is."""
    reasons: Counter[str] = field(default_factory=Counter)
    hits: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)
    """Time, and prompt tokens that each replica's cache was expected to save so far; the oldest first."""


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
        records: RecordStore | None = None,
    ) -> None:
        """name: of this process. records: where what is known outlives the process; None: nowhere."""
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
        for pool in self._pools:
            if pool.name in serve_states:
                await self._reconcile_pool(pool, observe(pool.name, serve_states[pool.name], reports))
        with self._tolerate("Redis for targets", (RedisError, OSError)):
            await self._source.publish(self._targets())
        await self._keep()

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

    async def _keep(self) -> None:
        """Writes what the next autoscaler should know; while Redis does not answer, no turn waits for it twice."""
        if self._memory is None or REPORTS in self._unavailable:
            return
        with self._tolerate(RECORDS, (RedisError, OSError)):
            for name, pool_state in self._pool_states.items():
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

    async def _reconcile_pool(self, pool: ScaledPool, observation: Observation) -> None:
        pool_state, now = self._pool_states[pool.name], self._clock()
        hits = {replica.replica_id: replica.hit_tokens for replica in observation.replicas}
        pool_state.hits.append((now, hits))
        while now - pool_state.hits[0][0] > HITS_S:
            pool_state.hits.popleft()
        pool_state.usage = note_use(pool_state.usage, observation, now)
        allowed = _restore_target(
            pool_state, find_range(pool.settings, pool_state.usage, observation, now), observation.serve_state
        )
        settings = limit(pool.settings, allowed)
        pool_state.state, decision = decide(settings, pool_state.state, observation, pool.max_rows, now)
        is_fresh = observation.age_s <= STALE_S
        if is_fresh and not pool.settings.min_replicas and pool_state.usage.empty_s is not None:
            # what was held has waited long: the first replica gets time to help
            pool_state.state = pool_state.state._replace(raised_s=now)
        decision = allowed.explain(decision, observation.serve_state.target)
        start_s = expected_start_s(pool_state.state.starts.took_s, settings.start_s)
        pool_state.ready_in_s = ready_in_s(start_s, pool_state.usage, observation, now)
        pool_state.reasons[decision.reason.value] += 1
        pool_state.target = decision.target
        if decision.reason not in BLIND:
            pool_state.safe_target = decision.target
        victims = self._choose_victims(observation, decision, pool_state.hits[0][1])
        outcome = (
            "kept"
            if decision.target == observation.serve_state.target
            else await self._act(pool, observation.serve_state, decision, victims)
        )
        self._journal.note(pool.name, observation, decision, outcome, victims, self._unix_clock())

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
        return Targets(self._name, rows)


def _restore_target(pool_state: _PoolState, allowed: Range, serve_state: ServeState) -> Range:
    """The range, with the target that an autoscaler before this one left as its lower bound until Serve has it: that
    one may have ended between deciding and acting."""
    if pool_state.recalled is None or serve_state.target >= min(pool_state.recalled, allowed.most):
        pool_state.recalled = None
        return allowed
    return allowed.at_least(pool_state.recalled, Reason.RESTORED)
