"""A rule in the place of production's autoscaler: observes, asks the rule, sets the target. Serve or Kubernetes choose
the replicas that go, as they do for the rivals: those that start, then the newest."""

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.autoscale.journal import Journal
from penstock.autoscale.observation import Observation
from penstock.autoscale.observe import observe
from penstock.autoscale.scaler import Actuator, ScaledPool, Source
from penstock.sim.simulation import MakeTurns, Turns


class Rule(Protocol):
    """A pool's autoscaler, with what it remembers. now: seconds."""

    def __call__(self, observation: Observation, now: float) -> int: ...


class _RuleTurns:
    def __init__(
        self, rule: Rule, pool: ScaledPool, source: Source, actuator: Actuator, clock: Callable[[], float]
    ) -> None:
        self._rule = rule
        self._pool = pool
        self._source = source
        self._actuator = actuator
        self._clock = clock

    async def reconcile(self) -> None:
        name, settings = self._pool.name, self._pool.settings
        state = (await self._actuator.read())[name]
        wanted = self._rule(observe(name, state, await self._source.read()), self._clock())
        target = min(max(wanted, settings.min_replicas), settings.max_replicas)
        if target != state.target:
            await self._actuator.set_target(name, target)


def in_turns(make_rule: Callable[[], Rule]) -> MakeTurns:
    """What makes a simulation ask a rule, for its only pool."""

    def make(
        name: str,  # noqa: ARG001 (as of Scaler)
        pools: Sequence[ScaledPool],
        source: Source,
        actuator: Actuator,
        journal: Journal,  # noqa: ARG001 (as of Scaler)
        clock: Callable[[], float],
        unix_clock: Callable[[], float],  # noqa: ARG001 (as of Scaler)
    ) -> Turns:
        (pool,) = pools
        return _RuleTurns(make_rule(), pool, source, actuator, clock)

    return make
