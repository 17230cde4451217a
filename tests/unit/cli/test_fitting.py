import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig, PoolConfig
from penstock.cli.fitting import check_models_fit
from penstock.workers.config import EngineConfig

GB = 10**9
DEMO = PoolConfig(name="a", engine=EngineConfig(kv_memory_bytes=GB))


def platform(*pools: PoolConfig) -> PlatformConfig:
    return PlatformConfig(pools=pools)


def test_what_fits_the_machine_may_start() -> None:
    check_models_fit(platform(msgspec.structs.replace(DEMO, replicas=3)), 4 * GB)


def test_replicas_that_do_not_fit_together_are_refused_with_each_pools_sum() -> None:
    with pytest.raises(ConfigError, match=r"take 3\.3 GB \(a 3 x 1\.10 GB\), more than the 3\.0 GB of this machine"):
        check_models_fit(platform(msgspec.structs.replace(DEMO, replicas=3)), 3 * GB)


def test_a_pool_that_does_not_fit_alone_is_told_what_would() -> None:
    with pytest.raises(ConfigError, match=r"KV cache of 0\.40 GB at most") as caught:
        check_models_fit(platform(DEMO), GB // 2)

    assert "pools['a']: this machine has 0.50 GB" in str(caught.value)


def test_pools_that_compute_nothing_here_are_not_asked() -> None:
    timed = PoolConfig(name="t", engine=EngineConfig(runner="timed", kv_memory_bytes=100 * GB))
    gpu = PoolConfig(name="g", model="nowhere", engine=EngineConfig(device="cuda"))

    check_models_fit(platform(timed, gpu), GB)
