"""One look at every pool, and what follows from it: observe, decide, act, tell. Not a loop; it receives its
collaborators.

Invariant: what is away (Redis, Serve's controller) changes nothing while it is; what one pool's change raises does not
keep the others from their turn, and a pool that could not be changed is decided on anew next time, from what Serve says
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
from penstock.autoscale.policy import Decision, State, decide
from penstock.autoscale.victim import choose_victims
from penstock.wire.scaling import PoolTarget, Targets

HITS_S = 60.0
"""What a cache has saved in so long says what it is worth."""

log = logging.getLogger("penstock.autoscale")


class ScaledPool(NamedTuple):
    name: str
    app_name: str
    max_rows: int
    """Sequences that a replica runs at once."""
    settings: AutoscaleConfig


class Source(Protocol):
    async def read(self) -> Sequence[AgedReport]: ...
    async def tell(self, targets: Targets) -> None: ...


class Actuator(Protocol):
    async def read(self) -> Mapping[str, ServeState]: ...
    async def set_target(self, pool: str, target: int) -> None: ...
    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool: ...


@dataclass(slots=True)
class _Kept:
    state: State = field(default_factory=State)
    target: int | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    hits: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)
    """By time, oldest first: prompt tokens that each replica's cache was expected to save."""


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
    ) -> None:
        """name: of this process."""
        self._name = name
        self._pools = list(pools)
        self._source = source
        self._actuator = actuator
        self._journal = journal
        self._clock = clock
        self._unix_clock = unix_clock
        self._kept = {pool.name: _Kept() for pool in pools}
        self._away: set[str] = set()
        """What did not answer the last time it was asked."""

    async def reconcile(self) -> None:
        heard = await self._read_reports()
        placed = await self._read_replicas()
        for pool in self._pools:
            if pool.name in placed:
                await self._reconcile_pool(pool, observe(pool.name, placed[pool.name], heard))
        with self._reaching("Redis for targets", (RedisError, OSError)):
            await self._source.tell(self._targets())

    async def _read_reports(self) -> Sequence[AgedReport]:
        """Nothing, while Redis is away: then there is no news, and nothing changes."""
        with self._reaching("Redis for reports", (RedisError, OSError)):
            return await self._source.read()
        return []

    async def _read_replicas(self) -> Mapping[str, ServeState]:
        """No pool, while Serve's controller is away or has to find its replicas again: then no pool has its turn."""
        with self._reaching("Serve's controller", (RayError, ValueError, TimeoutError)):
            return await self._actuator.read()
        return {}

    @contextmanager
    def _reaching(self, whom: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
        """Swallows these errors; a line of the log when somebody stops to answer, and one when he does again."""
        try:
            yield
        except errors as error:
            if whom not in self._away:
                log.warning("not reached", extra={"whom": whom, "error": type(error).__name__})
            self._away.add(whom)
        else:
            if whom in self._away:
                log.info("reached again", extra={"whom": whom})
            self._away.discard(whom)

    async def _reconcile_pool(self, pool: ScaledPool, seen: Observation) -> None:
        kept, now = self._kept[pool.name], self._clock()
        hits = {replica.replica_id: replica.hit_tokens for replica in seen.replicas}
        kept.hits.append((now, hits))
        while now - kept.hits[0][0] > HITS_S:
            kept.hits.popleft()
        kept.state, decision = decide(pool.settings, kept.state, seen, pool.max_rows, now)
        kept.reasons[decision.reason.value] += 1
        kept.target = decision.target
        victims = self._victims(seen, decision, kept.hits[0][1])
        outcome = (
            "kept" if decision.target == seen.placed.target else await self._act(pool, seen.placed, decision, victims)
        )
        self._journal.note(pool.name, seen, decision, outcome, victims, self._unix_clock())

    def _victims(self, seen: Observation, decision: Decision, hits_before: Mapping[str, int]) -> tuple[str, ...]:
        """None while replicas that are still starting can go instead: Serve stops those first."""
        count = seen.placed.target - decision.target
        if count <= 0 or seen.placed.num_starting:
            return ()
        return choose_victims(seen.placed.running, seen.replicas, hits_before, count)

    async def _act(self, pool: ScaledPool, placed: ServeState, decision: Decision, victims: tuple[str, ...]) -> str:
        if pool.settings.dry_run:
            return "dry run"
        try:
            if victims:
                is_done = await self._actuator.step_down(pool.name, victims, placed.target - len(victims))
                return "applied" if is_done else "refused"
            await self._actuator.set_target(pool.name, max(decision.target, placed.target - placed.num_starting))
        except (RayError, ValueError, TimeoutError) as error:
            log.warning("target not set", extra={"pool": pool.name, "error": type(error).__name__})
            return "failed"
        return "applied"

    def _targets(self) -> Targets:
        rows = [
            PoolTarget(name, kept.target, dict(kept.reasons))
            for name, kept in self._kept.items()
            if kept.target is not None
        ]
        return Targets(self._name, rows)
