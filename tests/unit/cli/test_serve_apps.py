"""What a RayService's serveConfigV2 names, built as Serve builds it."""

import importlib
from typing import Any

import msgspec
import pytest
from ray import serve

from penstock.autoscale.config import AutoscaleConfig
from penstock.base.errors import ConfigError
from penstock.cli import serve_apps
from penstock.cli.applications import Placement, gateway_application, pool_application
from penstock.cli.config import PlatformConfig, PoolConfig
from penstock.wire.targets import ClassTargets, Target

POOL: dict[str, object] = {"name": "a", "served_names": ["x"], "replicas": 2, "engine": {"runner": "timed"}}
CONFIG: dict[str, object] = {"gateway": {"host": "0.0.0.0"}, "pools": [POOL]}


def bound(application: serve.Application) -> Any:
    return application._bound_deployment


def test_the_names_in_the_chart_are_builders() -> None:
    module = importlib.import_module("penstock.cli.serve_apps")

    assert all(callable(getattr(module, name)) for name in ("gateway", "pool", "serve_agent"))


def test_a_gateway_lives_in_a_pod_of_its_own_and_lives_as_long_as_its_streams() -> None:
    deployment = bound(serve_apps.gateway({"config": CONFIG, "replicas": 3, "drain_s": 120}))

    assert (deployment.name, deployment.num_replicas) == ("gateway", 3)
    assert deployment.ray_actor_options["resources"] == {"gateway": 1}
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 120 + 5


def test_a_replica_lives_in_a_pod_of_its_pool_and_listens_on_the_pods_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)

    deployment = bound(serve_apps.pool({"pool": POOL, "drain_s": 200}))

    assert (deployment.name, deployment.num_replicas) == ("replica", 2)
    assert deployment.ray_actor_options["resources"] == {"pool-a": 1}
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 200
    assert deployment.init_args[3] is None, "the address of its node"


def test_the_same_functions_build_what_penstock_up_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    config = msgspec.convert(CONFIG, PlatformConfig)

    gateway, pool = bound(serve_apps.gateway({"config": CONFIG})), bound(serve_apps.pool({"pool": POOL}))

    assert gateway.init_args == bound(gateway_application(config, Placement(1))).init_args
    local = bound(pool_application(config.pools[0], config.adapters, Placement(2)))
    assert [arg for place, arg in enumerate(pool.init_args) if place != 3] == [
        arg for place, arg in enumerate(local.init_args) if place != 3
    ]


def test_gateways_have_every_target_and_replicas_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    targets = {"objective": 0.95, "interactive": {"ttft_s": 0.5, "tpot_s": 0.05}}
    pool = {**POOL, "targets": {"interactive": {"tpot_s": 0.02}}}
    config = {**CONFIG, "gateway": {"ttft_target_s": 2.0}, "targets": targets, "pools": [pool]}

    gateway = bound(serve_apps.gateway({"config": config})).init_args
    replica = bound(serve_apps.pool({"pool": pool, "targets": targets})).init_args

    default, fast = Target(ttft_s=2.0), Target(ttft_s=0.5, tpot_s=0.05)
    assert (ClassTargets(interactive=fast, standard=default, batch=default), 0.95) in gateway
    own = Target(ttft_s=0.5, tpot_s=0.02)
    assert gateway[1][0].targets == ClassTargets(interactive=own, standard=default, batch=default)
    assert replica[-1] == ClassTargets(interactive=own)


def test_the_hand_reaches_gateways_and_every_pool() -> None:
    deployment = bound(serve_apps.serve_agent({"config": CONFIG}))

    assert deployment.init_args == (("gateway", "pool-a"),)
    assert deployment.ray_actor_options["resources"] == {"serve_agent": 1}


@pytest.mark.parametrize(
    ("build", "args", "sentence"),
    [
        (
            "gateway",
            {"config": {**CONFIG, "gatway": {}}},
            "args of the application gateway: config.gatway is not a known setting (did you mean gateway?).",
        ),
        (
            "gateway",
            {"config": CONFIG, "replicas": 0},
            "args of the application gateway: replicas must be at least 1, not 0.",
        ),
        ("gateway", {}, "args of the application gateway: config is required and missing."),
        (
            "gateway",
            {"config": {**CONFIG, "redis": {"url": "redis://:word@host"}}},
            "redis.url in the args of the application gateway would stand in the open",
        ),
        (
            "pool",
            {"pool": {**POOL, "replicas": -1}},
            "args of a pool's application: pools['a'].replicas must be at least 1, not -1.",
        ),
        ("serve_agent", {"config": {"pools": []}}, "args of the application serve-agent: pools is empty"),
    ],
)
def test_a_mistake_is_a_sentence_that_says_where(build: str, args: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        getattr(serve_apps, build)(args)

    assert sentence in raised.value.message
    assert "word" not in raised.value.message


@pytest.mark.parametrize(
    ("wanted", "expected"), [({}, 2), ({"pool-a": 5}, 5), ({"pool-a": 50}, 8), ({"pool-a": 0}, 1), ({"pool-b": 5}, 2)]
)
def test_a_scaled_pool_goes_on_with_what_it_had(wanted: dict[str, int], expected: int) -> None:
    pool = PoolConfig(name="a", replicas=2, autoscale=AutoscaleConfig(max_replicas=8))

    assert serve_apps.first_replicas(pool, wanted) == expected


def test_a_pool_at_zero_is_deployed_with_one_replica_since_serve_deploys_none_without() -> None:
    pool = PoolConfig(name="a", replicas=2, autoscale=AutoscaleConfig(min_replicas=0, max_replicas=8))

    assert serve_apps.first_replicas(pool, {"pool-a": 0}) == 1


def test_a_pool_that_is_not_scaled_has_what_its_values_say() -> None:
    assert serve_apps.first_replicas(PoolConfig(name="a", replicas=2), {"pool-a": 5}) == 2
