"""The gateway as Ray Serve runs it: composition root of the HTTP surface, dispatch, the links to the replicas, and
discovery.

Serve places, watches and replaces the process; HTTP comes to the process's own port (see `listener`), tokens over its
own streams. Life: up when it listens, healthy while its tasks run, drained by the destructor, for which Serve waits.
"""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import cast

import redis.asyncio
from ray import serve

from penstock.adapters.config import AdaptersConfig
from penstock.adapters.registry import Registry
from penstock.adapters.sources.bring import NO_SECRETS, Sources, SourceSecrets, read_secrets
from penstock.adapters.store import AdapterStore
from penstock.base import log as logs
from penstock.base.cores import pin_process
from penstock.base.environment import REDIS_URL, cluster_secret, provider_key, redis_url, source_credential
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.garbage import freeze_startup
from penstock.base.huge_pages import gather_memory_aside
from penstock.base.metrics import Metrics
from penstock.base.pod import SPREAD_S, this_pod
from penstock.base.redis import connect as connect_redis
from penstock.base.serve_options import serve_options
from penstock.base.subsecrets import block_secret
from penstock.base.telemetry import TelemetryConfig
from penstock.base.tls import TlsContexts
from penstock.base.tracing import open_tracing
from penstock.perf.costs_page import show_costs
from penstock.prefix.native_index import open_index
from penstock.prefix.store import IndexStore
from penstock.router.api.asgi import make_app
from penstock.router.batches.capacity import Capacity
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.dependencies import BatchDependencies, make_dependencies
from penstock.router.batches.run import LineRunner
from penstock.router.batches.runner import BatchRunner
from penstock.router.completions.admission import Admission
from penstock.router.completions.constraints import ConstraintChecker
from penstock.router.completions.dependencies import GatewayDependencies, PoolReplicas
from penstock.router.completions.endpoint import CompletionsEndpoint
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.router.config import GatewayConfig, PoolSpec, ProviderConfig
from penstock.router.dispatch.dispatcher import RoutingDispatcher
from penstock.router.dispatch.holds import never_known
from penstock.router.dispatch.shares.charges import Charges
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.models.adapter_models import AdapterDependencies, AdapterModels
from penstock.router.models.catalogue import Checkpoint, build_served_models
from penstock.router.models.published_prefixes import PublishedWatch
from penstock.router.models.request_targets import find_targets
from penstock.router.models.served_model import ServedModel
from penstock.router.providers.caps import ProviderCaps
from penstock.router.providers.provider import Providers
from penstock.router.replicas.adapter_placement import AdapterPlacer
from penstock.router.replicas.discovery import ReplicaDiscovery
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.link import Greeter, connect
from penstock.router.replicas.pool_costs import PoolCosts
from penstock.router.replicas.replica_client import Link, Member, make_pool_callbacks
from penstock.router.replicas.report import Reporter, Waiting
from penstock.router.replicas.routing_policy import RoutingPolicy
from penstock.router.routing.chains import Chains
from penstock.router.routing.native_search import open_search
from penstock.router.transport.connection_balance import Spread, SpreadingApp
from penstock.router.transport.connections import ConnectionLimits
from penstock.router.transport.drain import DrainingApp, wait_until_known
from penstock.router.transport.listener import Listener
from penstock.tenancy.data_loss import LossWatch
from penstock.tenancy.keys import KeyReader, KeyStore
from penstock.tenancy.limits import Limiter
from penstock.tenancy.service_exchange import ServiceExchange
from penstock.tenancy.tariffs import TariffRule, Tariffs
from penstock.tenancy.usage import UsageLog
from penstock.text.grammar_check import GrammarChecks
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.discovery import GATEWAY_APP
from penstock.wire.frames import DownFrame
from penstock.wire.money import shown
from penstock.wire.stream_config import StreamConfig
from penstock.wire.targets import GatewayTargets

DRAIN_S = 10
"""Time for answers under way when the gateway is to go, where nothing else is configured, seconds."""
STOP_S = 5.0
"""Longest time for what comes after the drain."""
LINE_RECEIPTS = 1
"""Receipts of lines that are kept: nobody can ask for them."""
HEALTH_PERIOD_S = 0.5
HEALTH_TIMEOUT_S = 5.0

_DEFAULT_STREAM = StreamConfig()
_NO_TARGETS = GatewayTargets()

log = logging.getLogger("penstock.gateway")


class Core:
    """The gateway without Serve: everything it holds, wired."""

    def __init__(
        self,
        config: GatewayConfig,
        pools: Sequence[PoolSpec],
        checkpoints: dict[str, Checkpoint],
        secret: bytes,
        client: redis.asyncio.Redis,
        router_id: str,
        telemetry: TelemetryConfig | None = None,
        providers: Sequence[ProviderConfig] = (),
        provider_keys: Mapping[str, str] = MappingProxyType({}),
        adapters: AdaptersConfig | None = None,
        stream: StreamConfig = _DEFAULT_STREAM,
        batches: BatchesConfig | None = None,
        routing: RoutingPolicy | None = None,
        source_secrets: SourceSecrets = NO_SECRETS,
        targets: GatewayTargets = _NO_TARGETS,
        tariffs: Sequence[TariffRule] = (),
    ) -> None:
        """secret: the cluster's. checkpoints: by `PoolSpec.model`. provider_keys: by provider, of those that want one.
        telemetry None: nothing is traced. batches None: no files are kept, no batches run. routing None: replicas are
        chosen by production's policy. source_secrets: for the places that adapters come from. targets: for models whose
        pools do not agree on any. tariffs: what tenants are charged; none: nothing."""
        self._greeter = Greeter(router_id, secret, accepts_previous=stream.accept_previous_hello)
        self._tls = None if stream.tls is None else TlsContexts(stream.tls, is_server=False)
        self._pools = {pool.name: pool for pool in pools}
        self._metrics = Metrics()
        self._costs = PoolCosts(self._pools, time.monotonic)
        self._shown_costs: dict[tuple[str, str], int] = {}
        """Costs that the metrics hold already, by pool and kind, in 1e-9 of the unit of prices."""
        self.tracing = None if telemetry is None else open_tracing(telemetry, router_id, self._count_spans, Random())
        self._index = open_index()
        counters = VirtualCounters()
        charges = Charges(counters)
        spread = Spread()
        self.exchange = ServiceExchange(client, router_id, counters, charges.correct, loads=spread)
        self._queue = WaitQueue(config.max_queue, config.queue_timeout_s, counters, config.tenant_queue_share)
        self.fleet = Fleet(
            self._pools,
            self._connect,
            self._index,
            make_pool_callbacks(self._metrics, self._pools, self._queue.wake, self._costs.take),
            Random(),
            IndexStore(client).snapshot,
        )
        scaled = [pool.name for pool in pools if pool.is_scaled]
        self.reporter = (
            Reporter(client, router_id, scaled, self.fleet, self._waiting, self._index.num_held, self._metrics)
            if scaled
            else None
        )
        self.discovery = ReplicaDiscovery(router_id, {pool.name: pool.app_name for pool in pools}, self.fleet.update)
        limiter = Limiter(client, router_id)
        self.admission = Admission(
            limiter,
            UsageLog(client, router_id, before_write=limiter.tell_charges),
            self._metrics,
            tariffs=Tariffs(tariffs),
        )
        self._caps = ProviderCaps(limiter, providers, config.provider_cap, self._metrics, Random())
        self.loss_watch = LossWatch(client, self._metrics.redis_losses.inc, self._metrics.redis_away.set)
        self.providers = Providers(providers, provider_keys, self._queue.wake, self._metrics)
        self.checks = GrammarChecks()
        chains = Chains(block_secret(secret))
        self.published = PublishedWatch(
            client, {checkpoint.digest: checkpoint.tokenizer for checkpoint in checkpoints.values()}, chains.publish
        )
        models = build_served_models(pools, providers, checkpoints, partial(_context, self.fleet))
        self.deps = GatewayDependencies(
            config=config,
            models=models,
            dispatcher=RoutingDispatcher(
                self._pools,
                self.fleet,
                self._index,
                self._queue,
                charges,
                chains,
                config,
                self._metrics,
                Random(),
                self.providers.by_name,
                ready_in_s=never_known if self.reporter is None else self.reporter.ready_in_s,
                searching=open_search(),
                routing=routing,
                caps=self._caps,
            ),
            keys=KeyStore(cast(KeyReader, client), secret, config.key_cache_s, stale_s=60.0 * config.key_grace_minutes),
            admission=self.admission,
            metrics=self._metrics,
            replicas=self._replicas,
            providers={provider.name: provider for provider in providers},
            has_provider=lambda: self.providers.has_available,
            refresh=self._refresh,
            adapters=None if adapters is None else self._adapters(adapters, client, models, source_secrets),
            targets=find_targets(pools, targets, config.ttft_target_s),
            tracing=self.tracing,
            constraints=ConstraintChecker(find=self.checks.find_error),
            batches=None if batches is None else make_dependencies(batches, client),
        )
        self.app = SpreadingApp(make_app(self.deps), spread)
        self.batch_runner = None if self.deps.batches is None else self._batch_runner(self.deps.batches, router_id)

    def _batch_runner(self, parts: BatchDependencies, router_id: str) -> BatchRunner:
        """Lines are answered by an endpoint of their own, which keeps no receipts of them where others look."""
        deps = dataclasses.replace(self.deps, tracing=None)
        lines = CompletionsEndpoint(deps, RequestMetrics(deps.metrics, deps.models), Receipts(LINE_RECEIPTS))
        runner = LineRunner(
            parts=parts,
            serve=lines.serve_line,
            find_tenant=deps.keys.tenant_by_id,
            capacity=Capacity(parts.config.max_parallel, lambda: not self._queue.num_unheld and deps.can_serve()),
            max_line_bytes=deps.config.max_body_bytes,
            count=lambda outcome: deps.metrics.batch_lines.labels(outcome).inc(),
            charge=lambda tenant, usage: deps.admission.add_usage(tenant, *usage),
            note_charge=lambda usage: deps.admission.count_charge(usage.model, usage.used.charge_nano),
            now=deps.now,
            clock=deps.clock,
            random=deps.random,
        )
        return BatchRunner(runner, router_id)

    def _waiting(self, pool: str) -> Waiting:
        return Waiting(self._queue.num_waiting(pool), self._queue.oldest_s(pool))

    def _connect(
        self, member: Member, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]
    ) -> AbstractAsyncContextManager[Link]:
        tls = None if self._tls is None else self._tls.newest
        return connect(member.address, self._greeter.greet(member), on_frame, on_lost, tls)

    def _adapters(
        self,
        config: AdaptersConfig,
        client: redis.asyncio.Redis,
        models: Mapping[str, ServedModel],
        secrets: SourceSecrets,
    ) -> AdapterDependencies:
        assert config.folder is not None, "a gateway with adapters is started with their folder"
        registry = Registry(client, config.max_per_tenant)
        placer = AdapterPlacer(self.fleet.ready_clients)
        return AdapterDependencies(
            config,
            registry,
            AdapterStore(Path(config.folder)),
            AdapterModels(registry, models, self._pools),
            placer,
            Sources(config, secrets, time.time),
        )

    def _replicas(self) -> list[PoolReplicas]:
        return [
            PoolReplicas(
                name, self._pools[name].tier, status.num_connected, starts_on_demand=self._pools[name].starts_on_demand
            )
            for name, status in self.fleet.status().items()
        ]

    def _count_spans(self, outcome: str, count: int) -> None:
        self._metrics.spans.labels(outcome).inc(count)

    def _refresh(self) -> None:
        metrics = self._metrics
        metrics.step_cost.clear()  # cliffs come and go with the replicas that have them
        self.admission.refresh_metrics()
        self._caps.refresh_metrics()
        for labels, nano in self._costs.totals_nano().items():
            metrics.cost.labels(*labels).inc(shown(max(0, nano - self._shown_costs.get(labels, 0))))
            self._shown_costs[labels] = max(nano, self._shown_costs.get(labels, 0))
        if self.batch_runner is not None:
            metrics.batches_running.set(self.batch_runner.num_running)
        self.providers.count_open()
        for name, status in self.fleet.status().items():
            metrics.replicas.labels(name, self._pools[name].tier).set(status.num_connected)
            wanted = self._pools[name].num_replicas
            if wanted is not None:
                metrics.replicas_wanted.labels(name).set(wanted)
            metrics.running_sequences.labels(name).set(status.num_running)
            metrics.waiting_sequences.labels(name).set(status.num_waiting)
            metrics.kv_blocks_free.labels(name).set(status.free_blocks)
            metrics.kv_blocks.labels(name).set(status.total_blocks)
            for coefficient, value in show_costs(self.fleet.mean_costs(name)).items():
                metrics.step_cost.labels(name, coefficient).set(value)
            metrics.queue_length.labels(name).set(self._queue.num_waiting(name))
            metrics.index_blocks.labels(name).set(
                sum(self._index.num_held(client.member.replica_id) for client in self.fleet.ready_clients([name]))
            )


def _context(fleet: Fleet, pools: Sequence[PoolSpec]) -> int:
    """The longest context among pools, in tokens: of their replicas, or as configured while there are none."""
    found = [client.member.max_model_len for client in fleet.ready_clients(pool.name for pool in pools)]
    return max(found, default=max(pool.max_model_len for pool in pools))


class Gateway:
    """The Serve deployment; `__init__` returns when it listens, and in a pod when the load balancer knows it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: GatewayConfig,
        pools: tuple[PoolSpec, ...],
        telemetry: TelemetryConfig | None,
        providers: tuple[ProviderConfig, ...],
        adapters: AdaptersConfig | None,
        drain_s: int,
        stream: StreamConfig = _DEFAULT_STREAM,
        batches: BatchesConfig | None = None,
        make_routing: Callable[[], RoutingPolicy] | None = None,
        targets: GatewayTargets = _NO_TARGETS,
        tariffs: tuple[TariffRule, ...] = (),
    ) -> None:
        logs.configure()
        if config.pin_cores:
            pin_process(config.pin_cores)
        self._pod = this_pod()
        self._drain_s = drain_s
        url = redis_url("gateway")
        if url is None:
            raise ConfigError(f"{REDIS_URL} is not set: a gateway looks API keys up in Redis")
        checkpoints = await asyncio.to_thread(_load_checkpoints, pools)
        keys = {
            provider.name: provider_key(provider.name, provider.api_key_env)
            for provider in providers
            if provider.api_key_env is not None
        }
        router_id = f"gateway-{uuid.uuid4().hex[:8]}"
        core = Core(
            config,
            pools,
            checkpoints,
            cluster_secret(),
            connect_redis(url),
            router_id,
            telemetry,
            providers,
            keys,
            adapters,
            stream,
            batches,
            None if make_routing is None else make_routing(),
            NO_SECRETS if adapters is None else read_secrets(adapters.sources, source_credential),
            targets,
            tariffs,
        )
        self._drain = DrainingApp(core.app)
        self._listener = Listener(
            self._drain,
            config.host,
            [port for port in (config.port, config.admin_port) if port is not None],
            drain_s,
            ConnectionLimits(config.max_connections, config.max_connections_per_address, config.head_timeout_s),
            config.trusted_proxies,
            None if config.tls is None else TlsContexts(config.tls, is_server=True).newest,
        )
        self._stopping = asyncio.Event()
        freeze_startup()
        self._main = asyncio.create_task(self._run(core), name="gateway")
        gather_memory_aside()
        log.info(
            "gateway ready", extra={"host": config.host, "port": config.port, "pools": [pool.name for pool in pools]}
        )
        if self._pod.folder is not None:
            await asyncio.wait(
                [self._main, asyncio.create_task(wait_until_known(core.deps.can_serve))],
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def check_health(self) -> None:
        """Raise if a task of the gateway has ended. Serve replaces a gateway whose check fails repeatedly."""
        if self._main.done():
            raise PenstockError("A task of the gateway has ended; its log has the cause.")

    async def __del__(self) -> None:
        """Serve's graceful end: no more connections, then the answers under way, then the links."""
        self._stopping.set()
        await asyncio.wait([self._main], timeout=SPREAD_S + self._drain_s + STOP_S)

    async def _run(self, core: Core) -> None:
        """Serve until Serve or the pod ends the gateway, or a task that never ends has ended."""
        async with core.providers, core.fleet:
            discovering = asyncio.create_task(core.discovery.run(), name="discovery")
            admitting = asyncio.create_task(core.admission.run(), name="admission")
            sharing = asyncio.create_task(core.exchange.run(), name="shares")
            watching = asyncio.create_task(core.loss_watch.run(), name="watch over Redis' data")
            publishing = asyncio.create_task(core.published.run(), name="published prefixes")
            tasks = [discovering, admitting, sharing, watching, publishing]
            if core.reporter is not None:
                tasks.append(asyncio.create_task(core.reporter.run(), name="reports"))
            batching = None
            if core.batch_runner is not None:
                batching = asyncio.create_task(core.batch_runner.run(), name="batches")
                tasks.append(batching)
            stopping = asyncio.create_task(self._stopping.wait())
            pod_ending = asyncio.create_task(self._pod.wait_for_drain())
            try:
                serving = self._listener.start()
                self._pod.mark_ready()
                done, _ = await asyncio.wait(
                    [*tasks, stopping, pod_ending, serving], return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {stopping, pod_ending}:
                    log.error("part ended", extra={"part": task.get_name()}, exc_info=task.exception())
                if batching is not None:
                    batching.cancel()  # other gateways go on with them at once
                await self._stop_listening()
                if done == {pod_ending}:
                    await stopping  # the pod goes, and Serve must not put another gateway into it before
            finally:
                for task in (*tasks, stopping, pod_ending):
                    if task is not admitting:
                        task.cancel()
                if batching is not None:
                    await asyncio.wait([batching])  # it counts what it has used, and gives up its leases
                admitting.cancel()
                await asyncio.wait([admitting])  # it writes what is left of usage
                await asyncio.to_thread(core.checks.close)
                if core.tracing is not None:
                    await asyncio.to_thread(core.tracing.close)

    async def _stop_listening(self) -> None:
        """Take no more connections, then let the answers under way finish. In a pod the load balancer in front learns
        of it first."""
        if self._pod.folder is not None:
            self._drain.begin()
            self._pod.mark_stopped()
            await asyncio.sleep(SPREAD_S)
        await self._listener.stop()
        self._pod.mark_drained()


def _load_checkpoints(pools: Sequence[PoolSpec]) -> dict[str, Checkpoint]:
    """Tokenizer and identity of each model, by `PoolSpec.model`. Blocks; raises ConfigError."""
    found: dict[str, Checkpoint] = {}
    for model in {pool.model for pool in pools}:
        source = resolve(model)
        found[model] = Checkpoint(load_tokenizer(source), source.digest)
    return found


def gateway_app(
    config: GatewayConfig,
    pools: Sequence[PoolSpec],
    telemetry: TelemetryConfig | None = None,
    providers: Sequence[ProviderConfig] = (),
    adapters: AdaptersConfig | None = None,
    num_replicas: int = 1,
    resource: str | None = None,
    drain_s: int = DRAIN_S,
    stream: StreamConfig = _DEFAULT_STREAM,
    batches: BatchesConfig | None = None,
    make_routing: Callable[[], RoutingPolicy] | None = None,
    targets: GatewayTargets = _NO_TARGETS,
    tariffs: Sequence[TariffRule] = (),
) -> serve.Application:
    """The Serve application of the gateways, to be run as GATEWAY_APP with `route_prefix=None`. telemetry: with None
    nothing is traced, whatever the environment has. adapters: with None no adapters are served. num_replicas: number of
    gateways; all listen on the same port, so each is on a node of its own. resource: a resource of Ray of which each
    takes one unit. drain_s: time for answers under way when a gateway is to end. stream: the same as the pools'.
    batches: with None no files are kept and no batches run. make_routing: makes each gateway's choice of a replica;
    with None it is production's. targets: for models whose pools do not agree on any. tariffs: what tenants are
    charged."""
    options = serve_options(
        GATEWAY_APP,
        SPREAD_S + drain_s + 2 * STOP_S,
        num_replicas=num_replicas,
        resource=resource,
        health_period_s=HEALTH_PERIOD_S,
        health_timeout_s=HEALTH_TIMEOUT_S,
    )
    deployment = serve.deployment(**options)
    application: serve.Application = deployment(Gateway).bind(
        config,
        tuple(pools),
        telemetry,
        tuple(providers),
        adapters,
        drain_s,
        stream,
        batches,
        make_routing,
        targets,
        tuple(tariffs),
    )
    return application
