"""A replica as Ray Serve runs it: composition root of runner, engine, token stream and index writer, in one process.

No request passes through Serve: routers come to the stream's port, which they learn from the metadata. Redis is
optional at every moment. Its life: built and probed off the event loop, healthy while the engine is, drained by the
destructor, for which Serve waits.
"""

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve

from penstock.base import log as logs
from penstock.base.environment import cluster_secret, redis_url, vllm_python
from penstock.base.pod import AFTER_GATEWAYS_S, this_pod
from penstock.base.redis import connect
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.store import IndexWriter
from penstock.text.source import ModelSource, resolve
from penstock.wire.discovery import REPLICA_DEPLOYMENT, ReplicaMetadata, to_metadata
from penstock.wire.errors import EngineFault
from penstock.wire.frames import BlockEvents, StepCosts
from penstock.wire.proof import is_proved
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, EngineLoad, Runner, StepReport
from penstock.workers.engine.probe import measure
from penstock.workers.engine.timed import TimedRunner
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.stream import StreamServer
from penstock.workers.vllm.engine import Launch, VllmEngine
from penstock.workers.vllm.launch import find_python, launch_of

DRAIN_S = 30.0
"""What running sequences get when the replica is to go, where nothing else is said."""
STOP_S = 10.0
"""For what comes after the drain."""
WRITE_EVERY_S = 0.25
"""Block events are written to Redis in batches: a write costs more than a frame. Gateways have them from the stream
already."""
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 10.0
NUM_CPUS = 0.001
"""Ray's count, for placement only: cores are divided by us, so it must never be what refuses a replica."""

log = logging.getLogger("penstock.replica")


class Replica:
    """The Serve deployment; `__init__` returns when routers can come."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, pool: str, model: str, config: EngineConfig, host: str | None, adapters_folder: str | None, drain_s: float
    ) -> None:
        logs.configure()
        self._pod = this_pod()
        self._drain_s = drain_s
        epoch = uuid.uuid4().hex
        secret = cluster_secret()
        hasher = ChainHasher(secret, config.block_size)
        self._streams = StreamServer(
            StreamInfo.of(epoch, config), self._on_events, lambda said: is_proved(said, secret, epoch)
        )
        started = await asyncio.to_thread(_start, model, config, hasher, self._streams.on_step)
        self._engine = started.engine
        _name_engine_thread()
        self._start_writer(epoch)
        host = host or str(ray.util.get_node_ip_address())
        port = await self._streams.start(
            self._engine, started.idle, host, adapters=_adapters(started.runner, config, adapters_folder)
        )
        self._metadata = ReplicaMetadata(
            f"{host}:{port}", epoch, pool, started.model_digest, started.max_model_len, config.block_size
        )
        self._leaving = asyncio.create_task(self._leave_with_pod(), name="pod")
        self._pod.serves()
        log.info("replica ready", extra=to_metadata(self._metadata))

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve broadcasts it to the gateways."""
        return to_metadata(self._metadata)

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises time and again."""
        if not self._engine.is_healthy(time.monotonic()):
            raise EngineFault("The engine's thread has ended, stalls, or fails step after step.")
        if self._writing is not None and self._writing.done():
            raise EngineFault("The index writer has ended.")

    async def __del__(self) -> None:
        """Serve's graceful end: refuse, drain, withdraw the index's copy, stop."""
        self._pod.has_stopped()
        has_drained = await self._streams.drain(self._drain_s)
        log.info("replica drained", extra={"num_aborted": 0 if has_drained else self._streams.num_inflight})
        self._streams.stop()
        self._leaving.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await asyncio.to_thread(self._engine.stop, timeout_s=STOP_S / 2)

    async def _leave_with_pod(self) -> None:
        """The pod is to go: routers hear it by a load report, later than clients that gateways of the same fate leave.
        The process stays, for Serve would put another into this pod."""
        await self._pod.until_asked()
        await asyncio.sleep(AFTER_GATEWAYS_S)
        await self._streams.drain(self._drain_s)
        self._pod.has_drained()

    def _start_writer(self, epoch: str) -> None:
        """Without a Redis there is none, and routers have only what the streams say."""
        self._unwritten: list[BlockEvents] = []
        self._writer: IndexWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        url = redis_url()
        if url is not None:
            replica_id = serve.get_replica_context().replica_id.unique_id
            self._writer = IndexWriter(connect(url), replica_id, epoch, self._snapshot)
            self._writing = asyncio.create_task(self._writer.run(), name="index writer")

    def _on_events(self, events: BlockEvents) -> None:
        if self._writer is None:
            return
        if not self._unwritten:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._push)
        self._unwritten.append(events)

    def _push(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if self._writer is not None:
            for events in unwritten:
                self._writer.push(events)

    async def _snapshot(self) -> BlockEvents:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[BlockEvents] = loop.create_future()

        def settle(snapshot: BlockEvents) -> None:
            loop.call_soon_threadsafe(_settle, found, snapshot)

        self._engine.request_snapshot(settle)
        return await found


class _Probe:
    """The engine's measurement at start, remembered: an engine that has not stepped has reported nothing."""

    costs = StepCosts()

    def __call__(self, runner: Runner, config: EngineConfig) -> StepCosts:
        self.costs = measure(runner, config)
        return self.costs


def pool_app(
    pool: str,
    model: str,
    config: EngineConfig,
    num_replicas: int,
    host: str | None = "127.0.0.1",
    adapters_folder: str | None = None,
    resource: str | None = None,
    drain_s: float = DRAIN_S,
) -> serve.Application:
    """The Serve application of a pool, to be run as `pool_app_name(pool)` with `route_prefix=None` and
    `external_scaler_enabled=True`.

    host: where the token streams listen; None: on the address of the replica's node, for gateways elsewhere.
    adapters_folder: of the store that the gateways share; None: no adapters are served. resource: Ray's, of which each
    replica takes one. drain_s: what running sequences get when a replica is to go.
    """
    resources = {"resources": {resource: 1}} if resource is not None else {}
    deployment = serve.deployment(
        name=REPLICA_DEPLOYMENT,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": NUM_CPUS}
        | ({"num_gpus": config.num_gpus} if config.num_gpus else {})
        | resources,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s + STOP_S,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},
    )
    application: serve.Application = deployment(Replica).bind(pool, model, config, host, adapters_folder, drain_s)
    return application


class _Started(NamedTuple):
    engine: Engine | VllmEngine
    idle: EngineLoad
    """Before the first sequence."""
    model_digest: str
    max_model_len: int
    runner: Runner | None = None
    """What loads adapters, where the engine serves any."""


def _start(model: str, config: EngineConfig, hasher: ChainHasher, on_step: Callable[[StepReport], None]) -> _Started:
    """The engine, serving. Blocks for seconds, with vLLM for a minute. Raises ConfigError or EngineFault."""
    source = resolve(model)
    if config.runner == "vllm":
        vllm = VllmEngine(_launch(source, config), config, on_step)
        vllm.start()
        return _Started(vllm, vllm.load, source.digest, vllm.max_model_len)
    runner = _load(source, config)
    probe = _Probe()
    engine = Engine(runner, config, hasher, on_step, measure_costs=probe)
    engine.start()
    return _Started(
        engine,
        EngineLoad(0, 0, 0, 0, runner.num_blocks, runner.num_blocks, 0, probe.costs),
        source.digest,
        runner.max_model_len,
        runner,
    )


def _launch(source: ModelSource, config: EngineConfig) -> Launch:
    python = find_python(config, vllm_python())
    from penstock.workers.vllm.model import hf_folder  # torch takes seconds to import

    return launch_of(source, str(hf_folder(source)), config, python, os.environ)


def _load(source: ModelSource, config: EngineConfig) -> Runner:
    """What computes the checkpoint. Blocks for seconds. Raises ConfigError."""
    if config.runner == "timed":
        runner: Runner = TimedRunner(config)
    else:
        from penstock.workers.compute.runner import (
            load_runner,
        )  # torch takes seconds to import, and a timed replica never needs it

        runner = load_runner(source, config)
    log.info("model loaded", extra={"model_digest": source.digest})
    return runner


def _adapters(runner: Runner | None, config: EngineConfig, folder: str | None) -> Adapters | None:
    """None: this replica serves none."""
    if runner is None or folder is None or not config.adapters.slots:
        return None
    return Adapters(
        Path(folder), partial(runner.load_adapter, max_rank=config.adapters.max_rank), config.adapters.slots
    )


def _settle(found: asyncio.Future[BlockEvents], snapshot: BlockEvents) -> None:
    if not found.done():
        found.set_result(snapshot)


def _name_engine_thread() -> None:
    """So that `top -H` and the benchmarks can tell the engine's CPU time from the stream's."""
    for thread in threading.enumerate():
        if thread.name == "penstock-engine":
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text("engine", encoding="ascii")
