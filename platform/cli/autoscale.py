"""`penstock autoscale`: the autoscaler of a platform that a RayService runs, from that platform's configuration."""

import asyncio
from pathlib import Path

from penstock.autoscale.kubernetes.run import Options, autoscale
from penstock.autoscale.scaler import ScaledPool
from penstock.base import log as logs
from penstock.cli.config import PlatformConfig, load_platform
from penstock.wire.discovery import pool_app_name


def run(config: Path, options: Options) -> None:
    """Runs until SIGTERM or SIGINT. Where no pool is scaled, worker pods still follow Serve's targets. Raises
    ConfigError."""
    platform = load_platform(config)
    logs.configure()
    asyncio.run(autoscale(options, scaled_pools(platform), platform.budget_gpus))


def scaled_pools(config: PlatformConfig) -> list[ScaledPool]:
    return [
        ScaledPool(
            pool.name,
            pool_app_name(pool.name),
            pool.engine.max_num_seqs,
            pool.autoscale,
            pool.counted_gpus,
            config.named_targets(pool),
        )
        for pool in config.pools
        if pool.autoscale is not None
    ]
