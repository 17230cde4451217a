"""Serve from outside of its Ray cluster: the scaler's actuator by way of the serve agent, see `wire.serve_agent`.

Each call goes to one Ray cluster, which may be another one next time (the active one of a RayService).
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

from penstock.autoscale.observation import ServeState
from penstock.wire.serve_agent import (
    ANSWER_S,
    LAPSE_MS,
    WANTED_KEY,
    WANTED_MS,
    Answer,
    AppPlaces,
    Call,
    answer_key,
    call_key,
    calls_key,
    decode_answer,
    encode,
)

SLICE_S = 1
"""Seconds that one read of the answer waits: fewer than the Redis client gives a command."""
STARTING = ("STARTING", "UPDATING")
RUNNING, STOPPING = "RUNNING", "STOPPING"


class RemoteServe:
    """The calls of an actuator. Each raises TimeoutError where no answer comes, Redis being away included, and
    ValueError where there is no Ray cluster to ask or Serve could not do it."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        apps: Mapping[str, str],
        cluster: Callable[[], str | None],
        leader_term: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """apps: Serve application of each pool. cluster: name of the Ray cluster, None while there is none.
        leader_term: this leader's term; raises TimeoutError when it may not act any more."""
        self._client = client
        self._apps = dict(apps)
        self._cluster = cluster
        self._leader_term = leader_term
        self._clock = clock
        self._targets: dict[str, int] = {}
        """Targets by application, as last read."""

    async def read(self) -> dict[str, ServeState]:
        """State of the pools that Serve knows and is not recovering."""
        found = await self.locate(self._active_cluster())
        by_name = {places.app: places for places in found}
        self._targets = {places.app: places.target for places in found}
        return {pool: serve_state_of(by_name[app]) for pool, app in self._apps.items() if app in by_name}

    async def locate(self, cluster: str) -> list[AppPlaces]:
        """Places of all replicas in that Ray cluster."""
        return (await self._ask(cluster, Call(_new_id(), self._leader_term(), "read"))).apps

    async def set_target(self, pool: str, target: int) -> None:
        app = self._apps[pool]
        answer = await self._ask(
            self._active_cluster(), Call(_new_id(), self._leader_term(), "set", app, self._targets[app], target)
        )
        if not answer.is_done:
            raise ValueError("the target has changed meanwhile")

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        app = self._apps[pool]
        return (
            await self._ask(
                self._active_cluster(),
                Call(_new_id(), self._leader_term(), "down", app, self._targets[app], target, victims),
            )
        ).is_done

    async def remember(self, apps: Iterable[AppPlaces]) -> None:
        """Writes the applications' targets, for the process that builds them anew. Raises redis-py's errors."""
        await self._client.set(WANTED_KEY, encode({places.app: places.target for places in apps}), px=WANTED_MS)

    def _active_cluster(self) -> str:
        cluster = self._cluster()
        if cluster is None:
            raise ValueError("the RayService has no active Ray cluster")
        return cluster

    async def _ask(self, cluster: str, call: Call) -> Answer:
        try:
            answer = await self._exchange(cluster, call)
        except (RedisError, OSError) as error:
            raise TimeoutError(f"Redis is away: {type(error).__name__}") from error
        if answer.error is not None:
            raise ValueError(f"the serve agent answered: {answer.error}")
        return answer

    async def _exchange(self, cluster: str, call: Call) -> Answer:
        await self._client.set(call_key(call.id), encode(call), px=LAPSE_MS)
        async with self._client.pipeline(transaction=False) as batch:  # a cluster's client has no transactions
            batch.rpush(calls_key(cluster), call.id)
            batch.ltrim(calls_key(cluster), -64, -1)  # what nobody takes lapses; so do their names
            batch.pexpire(calls_key(cluster), 10 * LAPSE_MS)
            await batch.execute()
        deadline = self._clock() + ANSWER_S
        while self._clock() < deadline:
            found = cast(tuple[bytes, bytes] | None, await self._client.blpop([answer_key(call.id)], timeout=SLICE_S))
            answer = None if found is None else decode_answer(found[1])
            if answer is not None:
                return answer
        raise TimeoutError("the serve agent does not answer")


def serve_state_of(app: AppPlaces) -> ServeState:
    """An application's places as the scaler's state of a pool."""
    states = [replica.state for replica in app.replicas]
    return ServeState(
        target=app.target,
        running=tuple(replica.replica_id for replica in app.replicas if replica.state == RUNNING),
        num_starting=sum(state in STARTING for state in states),
        num_stopping=states.count(STOPPING),
    )


def _new_id() -> str:
    return uuid.uuid4().hex
