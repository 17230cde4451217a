"""A replica as Ray Serve runs it: composition root of runner, engine, token stream and index writer, in one process.

No request passes through Serve: routers connect to the stream's port, which they learn from the metadata. Redis is
optional at every moment. A replica is built and probed off the event loop, healthy while its engine is, and drained by
the destructor, for which Serve waits.
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

import msgspec
import ray
from ray import serve

from penstock.base import log as logs
from penstock.base.environment import cluster_secret, redis_url, replica_secrets, vllm_python
from penstock.base.garbage import freeze_startup
from penstock.base.huge_pages import gather_memory_aside
from penstock.base.pod import AFTER_GATEWAYS_S, this_pod
from penstock.base.process_age import process_age_s
from penstock.base.redis import connect
from penstock.base.serve_options import serve_options
from penstock.base.tls import TlsContexts
from penstock.base.turns import take_turn
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.store import IndexWriter
from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.text.whole_words import find_word_ids
from penstock.wire.discovery import REPLICA_DEPLOYMENT, ReplicaMetadata, StartTimes, to_metadata
from penstock.wire.errors import EngineFault
from penstock.wire.frames import PROTOCOL_VERSION, Ability, BlockEvents, StepCosts
from penstock.wire.stream_config import GATEWAY_NAME, StreamConfig
from penstock.wire.targets import NO_TARGETS, ClassTargets
from penstock.workers.compute.lean_torch import import_torch
from penstock.workers.config import AdapterSlots, EngineConfig
from penstock.workers.engine.engine import Engine, EngineLoad, StepReport
from penstock.workers.engine.probe import measure, measure_rows
from penstock.workers.engine.row_times import RowTimes
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.timed import TimedRunner
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.grammars import Grammars
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer
from penstock.workers.vllm.engine import Launch, VllmEngine
from penstock.workers.vllm.launch import can_adapt, find_python, make_launch

DRAIN_S = 30.0
"""Time that running sequences get to finish when the replica is to go, seconds; the default."""
STOP_S = 10.0
"""Time for the steps after the drain, seconds."""
WRITE_EVERY_S = 0.25
"""Time between two batches of block events that are written to Redis, seconds: a write costs more than a frame.
Gateways have the events from the stream already."""

READY_MADE_S = 30.0
"""Age from which a process is one that Ray had ready before the replica was asked for; it counts from when it became
the replica, and a younger one from when it was made."""

PROBE_TURN_S = 30.0
"""Longest wait until no other replica on the machine measures its steps, seconds: two that share its cores would
measure each other."""

_DEFAULT_STREAM = StreamConfig()

log = logging.getLogger("penstock.replica")


class Replica:
    """The Serve deployment; `__init__` returns when routers can come."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        pool: str,
        model: str,
        config: EngineConfig,
        host: str | None,
        adapters_folder: str | None,
        drain_s: float,
        stream: StreamConfig = _DEFAULT_STREAM,
        targets: ClassTargets = NO_TARGETS,
    ) -> None:
        logs.configure()
        began_s = _find_beginning()
        self._pod = this_pod()
        self._drain_s = drain_s
        config = await asyncio.to_thread(_settle, model, config)
        epoch = uuid.uuid4().hex
        secrets = replica_secrets()
        hasher = ChainHasher(secrets.block, config.block_size)
        previous_secret = cluster_secret() if stream.accept_previous_hello else None
        door = Door(secrets.stream, epoch, previous_secret, None if stream.tls is None else GATEWAY_NAME)
        tls = None if stream.tls is None else TlsContexts(stream.tls, is_server=True).newest
        self._streams = StreamServer(
            StreamInfo.of(epoch, config),
            self._on_events,
            door,
            stream_interval_s=config.stream_interval_s,
            targets=targets if config.keep_tpot else NO_TARGETS,
        )
        has_adapters = adapters_folder is not None
        started = await asyncio.to_thread(
            _start_engine, model, config, hasher, self._streams.on_step, began_s, has_adapters=has_adapters
        )
        self._engine = started.engine
        _name_engine_thread()
        self._start_writer(epoch)
        host = host or str(ray.util.get_node_ip_address())
        port = await self._streams.start(
            self._engine,
            started.idle,
            host,
            adapters=_make_adapters(started.adapting, config, adapters_folder),
            tls=tls,
            grammars=_make_grammars(started.runner),
            count_compiled=_watch_compilations(config),
        )
        self._metadata = ReplicaMetadata(
            f"{host}:{port}",
            epoch,
            pool,
            started.model_digest,
            started.max_model_len,
            config.block_size,
            PROTOCOL_VERSION,
            secrets.stream_key_id.hex(),
            abilities=started.abilities,
            has_private_prefixes=started.has_private_prefixes,
            start=started.times,
        )
        self._leaving = asyncio.create_task(self._leave_with_pod(), name="pod")
        freeze_startup()
        self._pod.mark_ready()
        gather_memory_aside()
        log.info("replica ready", extra=to_metadata(self._metadata))

    def record_replica_metadata(self) -> dict[str, Any]:
        """The replica's address and identity, which Serve broadcasts to the gateways."""
        return to_metadata(self._metadata)

    async def check_health(self) -> None:
        """Raise if the replica can't serve. Serve replaces a replica whose check fails repeatedly."""
        if not self._engine.is_healthy(time.monotonic()):
            raise EngineFault("The engine's thread has ended, stalls, or computes nothing.")
        if self._writing is not None and self._writing.done():
            raise EngineFault("The index writer has ended.")

    async def __del__(self) -> None:
        """The end that Serve waits for: refuse new sequences, drain, withdraw the index's copy, stop."""
        self._pod.mark_stopped()
        has_drained = await self._streams.drain(self._drain_s)
        log.info("replica drained", extra={"num_aborted": 0 if has_drained else self._streams.num_inflight})
        self._streams.stop()
        self._leaving.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await asyncio.to_thread(self._engine.stop, timeout_s=STOP_S / 2)

    async def _leave_with_pod(self) -> None:
        """Drain when the pod is to go. Load reports tell the routers, after the pod's gateways have told their clients.
        The process stays, since Serve would start another one in this pod."""
        await self._pod.wait_for_drain()
        await asyncio.sleep(AFTER_GATEWAYS_S)
        await self._streams.drain(self._drain_s)
        self._pod.mark_drained()

    def _start_writer(self, epoch: str) -> None:
        """Start to write block events to Redis. Without a Redis nothing is written, and routers have the events of the
        streams only."""
        self._unwritten: list[BlockEvents] = []
        self._writer: IndexWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        url = redis_url("replica")
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

        def deliver(snapshot: BlockEvents) -> None:
            loop.call_soon_threadsafe(_set_result, found, snapshot)

        self._engine.request_snapshot(deliver)
        return await found


class _Probe:
    """Measures the engine's costs at start and keeps them: an engine that has not stepped has reported nothing."""

    costs = StepCosts()

    def __call__(self, runner: Runner, config: EngineConfig) -> StepCosts:
        if config.device != "cpu" or isinstance(runner, TimedRunner):
            self.costs = measure(runner, config)
            return self.costs
        with take_turn(PROBE_TURN_S) as has_turn:
            if not has_turn:
                log.info("steps measured without a turn: others may have computed meanwhile")
            self.costs = measure(runner, config)
        return self.costs

    def measure_rows(self, runner: Runner, config: EngineConfig, costs: StepCosts) -> RowTimes | None:
        with take_turn(PROBE_TURN_S):
            return measure_rows(runner, config, costs)


def pool_app(
    pool: str,
    model: str,
    config: EngineConfig,
    num_replicas: int,
    host: str | None = "127.0.0.1",
    adapters_folder: str | None = None,
    resource: str | None = None,
    drain_s: float = DRAIN_S,
    stream: StreamConfig = _DEFAULT_STREAM,
    targets: ClassTargets = NO_TARGETS,
) -> serve.Application:
    """The Serve application of a pool, to be run as `pool_app_name(pool)` with `route_prefix=None` and
    `external_scaler_enabled=True`.

    host: where the token streams listen; None: on the address of the replica's node, for gateways elsewhere.
    adapters_folder: the store that the gateways share; None: no adapters are served. resource: a custom resource of
    Ray, of which each replica takes one. drain_s: time that running sequences get when a replica is to go, seconds.
    stream: the same as the gateways'. targets: of the pool's requests by class, as far as the configuration names any;
    a replica goes by `tpot_s`.
    """
    options = serve_options(
        REPLICA_DEPLOYMENT,
        drain_s + STOP_S,
        num_replicas=num_replicas,
        num_gpus=config.num_gpus,
        resource=resource,
    )
    deployment = serve.deployment(**options)
    application: serve.Application = deployment(Replica).bind(
        pool, model, config, host, adapters_folder, drain_s, stream, targets
    )
    return application


class _Started(NamedTuple):
    """An engine that serves, and what the replica reports of it."""

    engine: Engine | VllmEngine
    idle: EngineLoad
    """The engine's load before the first sequence."""
    model_digest: str
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    adapting: Runner | VllmEngine | None = None
    """What loads adapters; None: they are not served."""
    runner: Runner | None = None
    """Runner that compiles grammars; None with vLLM, which does not here."""
    abilities: tuple[str, ...] = ()
    """What the engine can do that not every one can."""
    has_private_prefixes: bool = False
    """Whether its cache shares not even published prefixes between tenants."""
    times: StartTimes = StartTimes(0.0, 0.0)


def _settle(model: str, config: EngineConfig) -> EngineConfig:
    """The settings, with a number for the token budget of a step. Raises ConfigError."""
    if config.max_batched_tokens != "auto":
        return config
    # a timed replica never needs torch
    import_torch(config.device)
    from penstock.workers.compute.token_budget import settle  # noqa: PLC0415 (torch takes seconds to import)

    return settle(resolve(model), config)


def _start_engine(
    model: str,
    config: EngineConfig,
    hasher: ChainHasher,
    on_step: Callable[[StepReport], None],
    replica_began_s: float,
    *,
    has_adapters: bool,
) -> _Started:
    """Start a pool's engine. Blocks for seconds, with vLLM for a minute. replica_began_s: monotonic time.
    has_adapters: the platform has a folder of adapters. Raises ConfigError or EngineFault."""
    began_s = time.monotonic()
    source = resolve(model)
    if config.runner == "vllm":
        has_adapters = has_adapters and can_adapt(source, config)
        vllm = VllmEngine(_plan_launch(source, config, has_adapters), config, hasher, on_step, began_s=replica_began_s)
        vllm.start()
        adapting = vllm if has_adapters else None
        times = StartTimes(time.monotonic() - began_s, 0.0)
        return _Started(
            vllm, vllm.load, source.digest, vllm.max_model_len, adapting, has_private_prefixes=True, times=times
        )
    runner = _load_runner(source, config if has_adapters else _without_adapters(config))
    loaded_s = time.monotonic()
    probe = _Probe()
    engine = Engine(
        runner, config, hasher, on_step, measure_costs=probe, measure_rows=probe.measure_rows, began_s=replica_began_s
    )
    engine.start()
    return _Started(
        engine,
        EngineLoad(0, 0, 0, 0, runner.num_blocks, runner.num_blocks, 0, probe.costs),
        source.digest,
        runner.max_model_len,
        runner,
        runner,
        () if isinstance(runner, TimedRunner) else tuple(Ability),
        times=StartTimes(loaded_s - began_s, time.monotonic() - loaded_s),
    )


def _without_adapters(config: EngineConfig) -> EngineConfig:
    """The settings for a runner that keeps no memory for adapters."""
    return msgspec.structs.replace(config, adapters=AdapterSlots(slots=0))


def _plan_launch(source: ModelSource, config: EngineConfig, has_adapters: bool) -> Launch:
    python = find_python(config, vllm_python())
    from penstock.workers.vllm.model import prepare_folder  # noqa: PLC0415 (torch takes seconds to import)

    folder = str(prepare_folder(source))
    return make_launch(source, folder, config, python, os.environ, has_adapters=has_adapters)


def _load_runner(source: ModelSource, config: EngineConfig) -> Runner:
    """The runner that computes the checkpoint. Blocks for seconds. Raises ConfigError."""
    if config.runner == "timed":
        words = find_word_ids(load_tokenizer(source)) if config.timed.answers == "words" else ()
        runner: Runner = TimedRunner(config, choices=words)
    else:
        # a timed replica never needs torch
        import_torch(config.device)
        from penstock.workers.compute.loading import load_runner  # noqa: PLC0415 (torch takes seconds to import)

        runner = load_runner(source, config)
    log.info("model loaded", extra={"model_digest": source.digest})
    return runner


def _make_adapters(adapting: Runner | VllmEngine | None, config: EngineConfig, folder: str | None) -> Adapters | None:
    """Make the replica's adapter slots. Returns None if it serves no adapters."""
    if adapting is None or folder is None or not config.adapters.slots:
        return None
    return Adapters(
        Path(folder),
        partial(adapting.load_adapter, max_rank=config.adapters.max_rank),
        config.adapters.slots,
        unload=adapting.unload_adapter,
        forget=None if isinstance(adapting, VllmEngine) else adapting.forget_adapter,
    )


def _make_grammars(runner: Runner | None) -> Grammars | None:
    """Make what compiles constraints. Returns None if the pool's engine can't make answers keep to any."""
    return Grammars(runner.compile_grammar) if runner is not None and runner.has_constraints else None


def _watch_compilations(config: EngineConfig) -> Callable[[], int]:
    """Begin to count the kernels that are compiled: all that serving needs are there. Our own engine on a GPU has
    some."""
    if config.runner != "torch" or config.device != "cuda":
        return lambda: 0
    # whoever computes on a GPU has it imported already
    from penstock.workers.compute.triton.compilations import Compilations  # noqa: PLC0415 (others go without torch)

    compilations = Compilations(is_warning=True)
    compilations.begin()
    return lambda: compilations.num_compiled


def _find_beginning() -> float:
    """Monotonic time at which this process began to be a replica, seconds."""
    age_s = process_age_s()
    return time.monotonic() - (age_s if age_s < READY_MADE_S else 0.0)


def _set_result(found: asyncio.Future[BlockEvents], snapshot: BlockEvents) -> None:
    if not found.done():
        found.set_result(snapshot)


def _name_engine_thread() -> None:
    """Name the engine's thread for the kernel, so that `top -H` and the benchmarks can tell its CPU time from the
    stream's."""
    for thread in threading.enumerate():
        if thread.name == "penstock-engine":
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text("engine", encoding="ascii")
