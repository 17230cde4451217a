"""The autoscaler's agent inside a Ray cluster: executes its calls, one after another, through Serve's controller. See
`wire.serve_agent`.

It decides nothing. Serve places it and replaces it when it dies; then the calls that wait are executed by the next one,
if they have not lapsed. Invariant: a call is executed at most once, and only while Serve's state is what its
caller read.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Protocol, cast

import redis.asyncio
from ray import serve
from ray.exceptions import RayError
from redis.exceptions import RedisError

from penstock.autoscale.actuator import ServeActuator
from penstock.base import log as logs
from penstock.base.environment import REDIS_URL, ray_cluster, redis_url
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.redis import connect
from penstock.base.serve_options import serve_options
from penstock.wire.serve_agent import (
    LAPSE_MS,
    SERVE_AGENT_APP,
    Answer,
    AppPlaces,
    Call,
    answer_key,
    call_key,
    calls_key,
    decode_call,
    encode,
)

WAIT_S = 1
"""Seconds that one read waits for the next call: fewer than the Redis client gives a command."""
PAUSE_S = 0.5
"""Seconds until Redis is tried again."""
STOP_S = 5.0

log = logging.getLogger("penstock.serve_agent")


class ServeControl(Protocol):
    """The calls of `autoscale.actuator.ServeActuator`."""

    async def locate(self) -> list[AppPlaces]: ...
    async def set_target(self, name: str, target: int) -> None: ...
    async def step_down(self, name: str, victims: tuple[str, ...], target: int) -> bool: ...


class CallExecutor:
    """Executes calls, those of the latest leader only."""

    def __init__(self, control: ServeControl) -> None:
        self._control = control
        self._term = 0
        """Term of the latest leader that sent a call."""

    async def execute(self, call: Call) -> Answer:
        if call.term < self._term:
            return Answer(is_done=False, error="a later leader has sent a call")
        self._term = call.term
        try:
            return await self._call_serve(call)
        except (RayError, ValueError, TimeoutError) as error:
            return Answer(is_done=False, error=type(error).__name__)

    async def _call_serve(self, call: Call) -> Answer:
        if call.op == "down":
            return Answer(is_done=await self._control.step_down(call.app, call.victims, call.target))
        apps = await self._control.locate()
        if call.op == "read":
            return Answer(apps=apps)
        if not any(app.app == call.app and app.target == call.was for app in apps):
            return Answer(is_done=False)
        await self._control.set_target(call.app, call.target)
        return Answer()


async def serve_calls(client: redis.asyncio.Redis, cluster: str, executor: CallExecutor) -> None:
    """Executes calls as they come, until cancelled. Redis may go and come back."""
    while True:
        try:
            call = await next_call(client, cluster)
            if call is not None:
                await _reply(client, call, await executor.execute(call))
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("Redis is away", extra={"error": type(error).__name__})
            await asyncio.sleep(PAUSE_S)


async def next_call(client: redis.asyncio.Redis, cluster: str) -> Call | None:
    """Wait for the next call. Returns None if none came within WAIT_S, or if it has lapsed. Raises redis-py's
    errors."""
    found = cast(tuple[bytes, bytes] | None, await client.blpop([calls_key(cluster)], timeout=WAIT_S))
    data = None if found is None else cast(bytes | None, await client.getdel(call_key(found[1].decode())))
    return None if data is None else decode_call(data)


async def _reply(client: redis.asyncio.Redis, call: Call, answer: Answer) -> None:
    key = answer_key(call.id)
    async with client.pipeline(transaction=False) as batch:  # a cluster's client has no transactions
        batch.rpush(key, encode(answer))
        batch.pexpire(key, LAPSE_MS)
        await batch.execute()
    if call.op != "read":
        log.info(
            "executed",
            extra={
                "op": call.op,
                "app": call.app,
                "target": call.target,
                "victims": list(call.victims),
                "is_done": answer.is_done,
            },
        )


class ServeAgent:
    """The Serve deployment that runs the agent."""

    async def __init__(self, apps: Sequence[str]) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure()
        url = redis_url("gateway")
        if url is None:
            raise ConfigError(f"{REDIS_URL} is not set: the autoscaler's calls come through Redis")
        self._client = connect(url)
        cluster = ray_cluster(os.environ)
        self._main = asyncio.create_task(
            serve_calls(self._client, cluster, CallExecutor(ServeActuator({app: app for app in apps}))),
            name="serve-agent",
        )
        log.info("serve agent ready", extra={"ray_cluster": cluster, "apps": list(apps)})

    async def check_health(self) -> None:
        """Raise if the agent's loop has ended. Serve replaces an agent whose check fails repeatedly."""
        if self._main.done():
            raise PenstockError("The serve agent's loop has ended; its log has the cause.")

    async def __del__(self) -> None:
        self._main.cancel()
        await asyncio.wait([self._main], timeout=STOP_S)


def serve_agent_app(apps: Sequence[str], resource: str | None = None) -> serve.Application:
    """The Serve application of the agent, to be run as SERVE_AGENT_APP with `route_prefix=None`. apps: the Serve
    applications that it reports and scales. resource: Ray's, of which it takes one unit."""
    deployment = serve.deployment(**serve_options(SERVE_AGENT_APP, 2 * STOP_S, resource=resource))
    application: serve.Application = deployment(ServeAgent).bind(tuple(apps))
    return application
