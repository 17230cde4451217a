"""Whether the models of a configuration fit this machine together, by their checkpoints' headers: what `penstock up`
asks before Ray starts and a weight is read.

Pools on a GPU are asked by each replica, which sees its GPU; those of vLLM by vLLM.
"""

from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig, PoolConfig
from penstock.perf.planning.fits import Least
from penstock.text.source import resolve
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.planned import check_fits, least_of

GB = 10**9


def check_models_fit(config: PlatformConfig, total_bytes: int) -> None:
    """Refuse pools on the CPU whose weights and least caches take more than the machine has. Raises ConfigError with
    the sum and what would fit."""
    asked = [pool for pool in config.pools if pool.engine.runner == "torch" and pool.engine.device == "cpu"]
    needs = [(pool, _least_of(pool)) for pool in asked]
    for pool, least in needs:
        check_fits(least, total_bytes // least.parts, pool.engine, f"pools[{pool.name!r}]: this machine")
    wanted = sum(_bytes_of(pool, least) for pool, least in needs)
    if wanted > total_bytes:
        each = "; ".join(
            f"{pool.name} {pool.most_replicas} x {least.num_bytes * least.parts / GB:.2f} GB" for pool, least in needs
        )
        raise ConfigError(
            f"the weights and KV caches of all replicas take {wanted / GB:.1f} GB ({each}), more than the "
            f"{total_bytes / GB:.1f} GB of this machine: lower replicas (or autoscale.max_replicas), or "
            "engine.kv_memory_bytes; nothing was started"
        )


def _least_of(pool: PoolConfig) -> Least:
    source = resolve(pool.model)
    return least_of(source, read_config(source), pool.engine, is_float32=pool.engine.dtype == "float32")


def _bytes_of(pool: PoolConfig, least: Least) -> int:
    return pool.most_replicas * least.parts * least.num_bytes
