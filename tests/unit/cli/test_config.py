from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from penstock.base.config import parse
from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig, PoolConfig, check_memory, divide_threads, load_platform
from penstock.workers.config import EngineConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "penstock.yaml"
CHOSEN = {"pools.name", "pools.served_names", "pools.replicas"}
"""Fields of the example that differ from their defaults, and say so with a star."""


def platform(text: str) -> PlatformConfig:
    return parse(text, PlatformConfig, name="a.yaml")


def fields(data: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted path; of a list of mappings, the first."""
    if isinstance(data, list | tuple) and data and isinstance(data[0], dict):
        return fields(data[0], path)
    if not isinstance(data, dict):
        return {path: data}
    return {name: value for key, child in data.items() for name, value in fields(child, f"{path}.{key}".lstrip(".")).items()}


def test_the_example_documents_every_field_with_its_default() -> None:
    written = fields(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    defaults = fields(msgspec.to_builtins(PlatformConfig(pools=(PoolConfig(name="any"),))))

    assert written.keys() == defaults.keys()
    assert {name for name in written if written[name] != defaults[name]} == CHOSEN


def test_every_field_of_the_example_is_explained_unless_its_name_says_all() -> None:
    plain = {"port:", "replicas:", "vocab_size:", "max_model_len:"}
    bare = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if ":" in line and "#" not in line and not line.rstrip().endswith(":")]

    assert {line.split()[0] for line in bare} <= plain


def test_the_example_starts_two_replicas() -> None:
    assert load_platform(EXAMPLE).num_replicas == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "pools is empty: at least one pool of replicas is needed"),
        ("pools: [{name: a}, {name: a}]", "2 pools are named 'a': names must differ"),
        ("pools: [{name: a, replicas: 0}]", "pools['a'].replicas must be at least 1, not 0"),
        ("pools: [{name: 'a/b'}]", "a pool's name is letters, digits and dashes between them, not 'a/b'"),
        ("pools: [{name: a, served_names: [x, x]}]", "pools['a'].served_names holds 'x' 2 times"),
        ("pools: [{name: a}, {name: b, model: other, served_names: [demo]}]", "pools that share a name must share the model"),
        ("pools: [{name: a}, {name: b, engine: {block_size: 32}}]", "share the served name 'demo' but not engine.block_size (16 and 32)"),
        ("pools: [{name: a, engine: {runner: timed, device: cuda}}]", "engine.device: cuda is not available yet"),
        ("pools: [{name: a, engine: {runner: timed, exact: true}}]", "can't be combined with exact: true"),
        ("{redis: {url: 'http://x'}, pools: [{name: a}]}", "redis.url must begin with redis://, rediss:// or unix://, not 'http://x'"),
        ("{gateway: {port: 70000}, pools: [{name: a}]}", "gateway.port must lie in 1..65535, not 70000"),
        ("{gatway: {}, pools: [{name: a}]}", "gatway is not a known setting (did you mean gateway?)"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        platform(text)

    assert expected in caught.value.message
    assert caught.value.message.startswith("a.yaml: ")
    assert "\n" not in caught.value.message


def test_a_pool_without_served_names_answers_to_its_model() -> None:
    assert platform("pools: [{name: a, model: org/model}]").pools[0].names == ("org/model",)


def test_threads_are_divided_among_replicas_that_compute() -> None:
    config = platform("pools: [{name: a, replicas: 2}, {name: b, model: m, engine: {threads: 3}}, {name: t, model: n, replicas: 9, engine: {runner: timed}}]")

    divided = divide_threads(config, cores=8)

    assert [pool.engine.threads for pool in divided.pools] == [2, 3, 2]


def test_every_replica_gets_a_thread_however_few_cores_there_are() -> None:
    assert divide_threads(platform("pools: [{name: a, replicas: 5}]"), cores=2).pools[0].engine.threads == 1


def test_caches_larger_than_the_machine_are_refused() -> None:
    config = PlatformConfig(pools=(PoolConfig(name="a", replicas=3, engine=EngineConfig(kv_memory_bytes=2**30)),))

    check_memory(config, 3 * 2**30)
    with pytest.raises(ConfigError, match=r"take 3\.0 GiB .* more than the 2\.0 GiB"):
        check_memory(config, 2 * 2**30)
