"""A platform's Serve applications, made of its configuration: one of the gateways, one of each pool. `penstock up` runs
them with `serve.run_many` (driver), a RayService by the names in its serveConfigV2 (serve_apps); both are the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from ray import serve

from penstock.adapters.config import AdaptersConfig
from penstock.adapters.peft import BaseShapes
from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig, PoolConfig
from penstock.router.app import DRAIN_S as GATEWAY_DRAIN_S
from penstock.router.app import gateway_app
from penstock.router.config import AdapterBase, PoolSpec
from penstock.router.replicas.routing_policy import RoutingPolicy
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.discovery import pool_app_name
from penstock.wire.stream_config import StreamConfig
from penstock.wire.targets import NO_TARGETS, ClassTargets
from penstock.workers.compute.model_config import read_config
from penstock.workers.replica import DRAIN_S as REPLICA_DRAIN_S
from penstock.workers.replica import pool_app

_DEFAULT_STREAM = StreamConfig()


class Placement(NamedTuple):
    """Where processes go, and how they are reached."""

    replicas: int
    resource: str | None = None
    """Ray's custom resource of which each takes a whole unit: where a node has one of it, one to a node. None:
    anywhere."""
    host: str | None = "127.0.0.1"
    """Address that a replica's token stream listens on; None: the address of its node."""
    drain_s: int | None = None
    """Seconds that requests under way get when their process is to end; None: each kind's own default."""


def gateway_application(
    config: PlatformConfig, placement: Placement, make_routing: Callable[[], RoutingPolicy] | None = None
) -> serve.Application:
    """The application of all gateways. make_routing: as of `gateway_app`. Raises ConfigError for a pool whose
    checkpoint can't be read."""
    targets = config.gateway_targets
    specs = [pool_spec(pool, targets.classes) for pool in config.pools]
    return gateway_app(
        config.gateway,
        specs,
        config.telemetry,
        config.providers,
        config.adapters if config.adapters.folder is not None else None,
        num_replicas=placement.replicas,
        resource=placement.resource,
        drain_s=GATEWAY_DRAIN_S if placement.drain_s is None else placement.drain_s,
        stream=config.stream,
        batches=config.batches if config.batches.folder is not None else None,
        make_routing=make_routing,
        targets=targets,
        tariffs=config.tariffs,
    )


def pool_application(
    pool: PoolConfig,
    adapters: AdaptersConfig,
    placement: Placement,
    stream: StreamConfig = _DEFAULT_STREAM,
    targets: ClassTargets = NO_TARGETS,
) -> serve.Application:
    """The application of one pool, to be run with `external_scaler_enabled`. targets: the platform's, which count where
    the pool names none."""
    return pool_app(
        pool.name,
        pool.model,
        pool.engine,
        placement.replicas,
        host=placement.host,
        adapters_folder=adapters.folder,
        resource=placement.resource,
        drain_s=REPLICA_DRAIN_S if placement.drain_s is None else placement.drain_s,
        stream=stream,
        targets=_targets(pool, targets),
    )


def pool_spec(pool: PoolConfig, targets: ClassTargets = NO_TARGETS) -> PoolSpec:
    """A pool as gateways are configured with it. targets: those of `pool_application`. Raises ConfigError for a
    checkpoint that can't be read."""
    engine = pool.engine
    configured = engine.max_model_len
    if engine.runner == "timed":
        configured = min(
            engine.timed.max_model_len,
            configured or engine.timed.max_model_len,
            engine.timed.num_blocks * engine.block_size,
        )
        _check_vocabulary(pool)
    if pool.tool_parser != "auto":
        load_tokenizer(resolve(pool.model)).with_tool_parser(pool.tool_parser)  # refuses what can't be
    return PoolSpec(
        name=pool.name,
        served_names=pool.names,
        tier=pool.tier,
        model=pool.model,
        app_name=pool_app_name(pool.name),
        exact=engine.exact or engine.runner == "timed",
        is_scaled=pool.autoscale is not None,
        starts_on_demand=pool.autoscale is not None and not pool.autoscale.min_replicas,
        num_replicas=pool.replicas if pool.autoscale is None or pool.autoscale.dry_run else None,
        adapters=_adapter_base(pool),
        max_model_len=configured or resolve(pool.model).max_model_len,
        tool_parser=pool.tool_parser,
        reasoning_parser=pool.reasoning_parser,
        price_per_hour=pool.price_per_hour,
        targets=_targets(pool, targets),
        keeps_tpot=engine.keep_tpot and engine.runner != "vllm",
        escalation=pool.escalation,
    )


def _targets(pool: PoolConfig, others: ClassTargets) -> ClassTargets:
    return others if pool.targets is None else pool.targets.or_else(others)


def _adapter_base(pool: PoolConfig) -> AdapterBase | None:
    """What the pool's adapters are checked against. None where it serves none: it has no slots for them, or its
    checkpoint is none that our engine computes."""
    engine = pool.engine
    if not engine.adapters.slots:
        return None
    try:
        model = read_config(resolve(pool.model))
    except ConfigError:
        return None  # a timed pool may take its tokenizer from any checkpoint; a computing one says so itself, better
    return AdapterBase(shapes=BaseShapes(model.num_layers, model.linear_shapes), max_rank=engine.adapters.max_rank)


def _check_vocabulary(pool: PoolConfig) -> None:
    """Refuse a timed pool whose runner makes up token ids that the tokenizer has not. Raises ConfigError."""
    has, made_up = load_tokenizer(resolve(pool.model)).vocab_size, pool.engine.timed.vocab_size
    if made_up > has:
        raise ConfigError(
            f"pool {pool.name}: engine.timed.vocab_size is {made_up}, but {pool.model} has only {has} tokens"
        )
