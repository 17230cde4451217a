from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from penstock.autoscale.config import AutoscaleConfig
from penstock.base.config import parse
from penstock.base.errors import ConfigError
from penstock.cli.autoscale import scaled_pools
from penstock.cli.config import (
    GPU_START_S,
    PlatformConfig,
    PoolConfig,
    check_gpus,
    check_memory,
    divide_machine,
    load_platform,
    place_folders,
    start_timeout_s,
)
from penstock.router.config import ProviderConfig
from penstock.wire.targets import ClassTargets, Target
from penstock.workers.config import EngineConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "penstock.yaml"
CHOSEN = {
    "pools.name",
    "pools.served_names",
    "pools.replicas",
    *(f"pools.engine.speculation.{name}" for name in ("method", "head", "max_draft_tokens")),
}
"""Fields of the example that differ from their defaults, and say so with a star."""


def platform(text: str) -> PlatformConfig:
    return parse(text, PlatformConfig, name="a.yaml")


def provider(changes: str) -> str:
    """A platform with a provider that is fine but for `changes`."""
    fine = "{name: p, base_url: 'http://x/v1', model: m, served_names: [demo]}"
    return (
        f"{{pools: [{{name: a}}], providers: "
        f"[{msgspec.json.encode(yaml.safe_load(fine) | yaml.safe_load(changes)).decode()}]}}"
    )


def fields(data: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted path; of a list of mappings, the first."""
    if isinstance(data, list | tuple) and data and isinstance(data[0], dict):
        return fields(data[0], path)
    if not isinstance(data, dict):
        return {path: list(data) if isinstance(data, tuple) else data}
    return {
        name: value for key, child in data.items() for name, value in fields(child, f"{path}.{key}".lstrip(".")).items()
    }


def test_the_example_documents_every_field_with_its_default() -> None:
    written = fields(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    defaults = fields(msgspec.to_builtins(PlatformConfig(pools=(PoolConfig(name="any"),))))

    assert written.keys() == defaults.keys()
    assert {name for name in written if written[name] != defaults[name]} == CHOSEN


def test_every_field_of_the_example_is_explained_unless_its_name_says_all() -> None:
    plain = {"port:", "replicas:", "vocab_size:", "max_model_len:"}
    bare = [
        line.strip()
        for line in EXAMPLE.read_text(encoding="utf-8").splitlines()
        if ":" in line and "#" not in line and not line.rstrip().endswith(":")
    ]

    assert {line.split()[0] for line in bare} <= plain


def test_the_example_names_every_field_of_a_provider() -> None:
    shown = EXAMPLE.read_text(encoding="utf-8").split("providers: []")[1]
    (example,) = yaml.safe_load("\n".join(line.removeprefix("#") for line in shown.splitlines()[1:]))

    assert example.keys() == set(ProviderConfig.__struct_fields__)
    assert msgspec.convert(
        {name: example[name] for name in ("name", "base_url", "model", "served_names")}, ProviderConfig
    ) == msgspec.convert(example | {"api_key_env": None}, ProviderConfig)


def test_pools_of_different_tiers_may_serve_different_models_under_one_name() -> None:
    config = platform(
        "pools: [{name: a, tier: edge}, {name: b, model: other, served_names: [demo], engine: {block_size: 32}}]"
    )

    assert [pool.names for pool in config.pools] == [("demo",), ("demo",)]


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
        (
            "pools: [{name: a}, {name: b, model: other, served_names: [demo]}]",
            "pools of one tier that share a name must share the model",
        ),
        (
            "pools: [{name: a}, {name: b, tier: edge, tool_parser: text}]",
            "pools 'a' and 'b' serve 'demo' as 'demo', but with different tool_parser (auto and text)",
        ),
        ("pools: [{name: a, tool_parser: qwen}]", "tool_parser"),
        (
            "pools: [{name: a, tier: edge, escalation: {min_mean_logprob: -1.0}}]",
            "pools['a'].escalation is set, but no pool of another tier and no provider serves 'demo'",
        ),
        (
            "pools: [{name: a, escalation: {min_mean_logprob: -1.0}}]",
            "pools['a'].escalation is set, but the pool's tier is cloud: requests leave the edge only",
        ),
        (
            "pools: [{name: a, tier: edge, escalation: {min_mean_logprob: -1.0, to: c}}, {name: b}]",
            "pools['a'].escalation.to is 'c', which does not serve 'demo' outside the edge; these do: b",
        ),
        (
            "pools: [{name: a, tier: edge, escalation: {min_mean_logprob: -1.0}}, {name: b, tier: edge}, {name: c}]",
            "pools 'a' and 'b' serve 'demo' on the edge, but with different escalation",
        ),
        (
            "pools: [{name: a, tier: edge, escalation: {tokens: 300, min_mean_logprob: -1.0}}, {name: b}]",
            "escalation.tokens must lie in 1..256, not 300",
        ),
        (
            "pools: [{name: a}, {name: b, tier: edge, reasoning_parser: none}]",
            "pools 'a' and 'b' serve 'demo' as 'demo', but with different reasoning_parser (auto and none)",
        ),
        ("pools: [{name: a, reasoning_parser: gpt}]", "reasoning_parser"),
        (
            "pools: [{name: a}, {name: b, engine: {block_size: 32}}]",
            "share the served name 'demo' but not engine.block_size (16 and 32)",
        ),
        (
            "pools: [{name: a, engine: {runner: timed, device: cuda}}]",
            "engine.device: cuda is for a runner that computes; runner: timed sleeps",
        ),
        ("pools: [{name: a, engine: {max_batched_tokens: auto}}]", "auto is for our own engine on a GPU"),
        (
            "pools: [{name: a, engine: {max_batched_tokens: auto, runner: vllm, device: cuda}}]",
            "max_batched_tokens: auto is for our own engine on a GPU; give a number",
        ),
        ("pools: [{name: a, engine: {overlap: false, runner: vllm}}]", "engine.overlap: false is for our own engine"),
        ("pools: [{name: a, engine: {exact: true, device: cuda}}]", "can't be combined with device: cuda"),
        ("pools: [{name: a, engine: {runner: timed, exact: true}}]", "can't be combined with exact: true"),
        ("pools: [{name: a, engine: {tensor_parallel_size: 0}}]", "must be between 1 and 64, not 0"),
        ("pools: [{name: a, engine: {tensor_parallel_size: 2, runner: timed}}]", "that computes, and timed sleeps"),
        ("pools: [{name: a, engine: {tensor_parallel_size: 2, exact: true}}]", "needs the whole model in one process"),
        (
            "pools: [{name: a, engine: {tensor_parallel_size: 2, activations: int8}}]",
            "activations: int8 is for the kernels that compute a whole model",
        ),
        (
            "{redis: {url: 'http://x'}, pools: [{name: a}]}",
            "redis.url must begin with one of redis://, rediss://, unix://, redis+sentinel://, ",
        ),
        (
            "{redis: {url: 'redis://x', urls: {replica: 'http://x'}}, pools: [{name: a}]}",
            "redis.urls.replica must begin with one of redis://, rediss://, unix://",
        ),
        (
            "{redis: {urls: {replica: 'redis://x'}}, pools: [{name: a}]}",
            "redis.urls.replica is set, but not redis.url",
        ),
        (
            "{redis: {url: 'redis+sentinel://x/m', tls: {ca: /ca.crt}}, pools: [{name: a}]}",
            "redis.tls is set, but an address of Redis does not begin with rediss",
        ),
        (
            "{redis: {url: 'rediss://x', tls: {key: /tls.key}}, pools: [{name: a}]}",
            "redis.tls.certificate and redis.tls.key belong together",
        ),
        ("{gateway: {port: 70000}, pools: [{name: a}]}", "gateway.port must lie in 1..65535, not 70000"),
        ("{gateway: {max_queue_share: 0}, pools: [{name: a}]}", "gateway.max_queue_share must lie above 0 and up to 1"),
        ("{gateway: {reserved_places: 1}, pools: [{name: a}]}", "gateway.reserved_places must lie in 0..1"),
        ("{gateway: {cors_origins: [example.com]}, pools: [{name: a}]}", "gateway.cors_origins holds origins such as"),
        ("{gateway: {cors_origins: ['https://a.b/c']}, pools: [{name: a}]}", "not 'https://a.b/c'"),
        ("{gateway: {pin_cores: [-1]}, pools: [{name: a}]}", "gateway.pin_cores holds numbers of cores from 0"),
        ("{gateway: {pin_cores: [2, 2]}, pools: [{name: a}]}", "each once, not [2, 2]"),
        (
            "{targets: {interactiv: {ttft_s: 1}}, pools: [{name: a}]}",
            "targets.interactiv is not a known setting (did you mean interactive?)",
        ),
        (
            "{targets: {batch: {tpot_s: .nan}}, pools: [{name: a}]}",
            "targets.batch.tpot_s must be a number of seconds above 0, or null, not nan",
        ),
        (
            "{pools: [{name: a, targets: {standard: {ttft_s: 0}}}]}",
            "pools['a'].targets.standard.ttft_s must be a number of seconds above 0, or null, not 0",
        ),
        ("{gateway: {ttft_target_s: 0}, pools: [{name: a}]}", "gateway.ttft_target_s must be more than 0, not 0"),
        (provider("name: a"), "2 pools or providers are named 'a': names must differ"),
        (provider("served_names: [b]"), "providers['p'].served_names holds 'b', which no pool serves"),
        (provider("served_names: []"), "providers['p'].served_names is empty: the provider would never be asked"),
        (
            provider("base_url: example.com"),
            "providers['p'].base_url must begin with http:// or https://, not 'example.com'",
        ),
        (provider("max_concurrency: 0"), "providers['p'].max_concurrency must be at least 1, not 0"),
        (provider("timeout_s: 0"), "providers['p'].timeout_s must be more than 0, not 0"),
        (provider("input_price: 1"), "input_price and output_price belong together; set both or neither"),
        (provider("cached_price: 1"), "cached_price needs input_price and output_price"),
        ("pools: [{name: a, price_per_hour: -1}]", "pools['a'].price_per_hour must be a finite number, at least 0"),
        ("pools: [{name: a, price_per_hour: .inf}]", "pools['a'].price_per_hour must be a finite number, at least 0"),
        (
            provider("extra_fields: [logit_bias]"),
            "providers['p'].extra_fields may hold ignore_eos, min_p, min_tokens, repetition_penalty, top_k, not "
            "'logit_bias'",
        ),
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
    config = platform(
        "pools: [{name: a, replicas: 2}, {name: b, model: m, engine: {threads: 3}}, {name: t, model: n, replicas: 9, "
        "engine: {runner: timed}}]"
    )

    divided = divide_machine(config, cores=8)

    assert [pool.engine.threads for pool in divided.pools] == [2, 3, 2]


def test_memory_is_divided_among_replicas_where_a_cpus_is_given_out_by_share() -> None:
    config = platform(
        "pools: [{name: a, replicas: 2, engine: {kv_memory_bytes: auto}}, {name: b, model: m, replicas: 2}, "
        "{name: c, model: n, engine: {device: cuda}}]"
    )

    divided = divide_machine(config, cores=8)

    assert [pool.engine.memory_share for pool in divided.pools] == [0.9 / 4, 0.9, 0.9]
    check_memory(config, 2**30)


def test_settings_that_are_not_given_depend_on_the_device() -> None:
    cpu, gpu, given = platform(
        "pools: [{name: a}, {name: b, model: m, engine: {device: cuda}}, "
        "{name: c, model: n, engine: {device: cuda, max_num_seqs: 8, max_batched_tokens: 99, kv_memory_bytes: 5000}}]"
    ).pools

    assert (cpu.engine.kv_memory_bytes, cpu.engine.max_num_seqs, cpu.engine.max_batched_tokens) == (2**29, 64, 512)
    assert (gpu.engine.kv_memory_bytes, gpu.engine.max_num_seqs, gpu.engine.max_batched_tokens) == ("auto", 256, "auto")
    assert (given.engine.kv_memory_bytes, given.engine.max_num_seqs, given.engine.max_batched_tokens) == (5000, 8, 99)


def test_every_replica_gets_a_thread_however_few_cores_there_are() -> None:
    assert divide_machine(platform("pools: [{name: a, replicas: 5}]"), cores=2).pools[0].engine.threads == 1


def test_caches_larger_than_the_machine_are_refused() -> None:
    config = PlatformConfig(pools=(PoolConfig(name="a", replicas=3, engine=EngineConfig(kv_memory_bytes=2**30)),))

    check_memory(config, 3 * 2**30)
    with pytest.raises(ConfigError, match=r"take 3\.0 GiB .* more than the 2\.0 GiB"):
        check_memory(config, 2 * 2**30)


def test_replicas_that_would_wait_for_a_gpu_for_ever_are_refused() -> None:
    config = platform("pools: [{name: a, replicas: 2, engine: {device: cuda}}, {name: b, model: m, replicas: 9}]")

    check_gpus(config, 2.0)
    with pytest.raises(ConfigError, match=r"GPUs of its own, 2 altogether, and this machine has 1 "):
        check_gpus(config, 1.0)


def test_replicas_on_gpus_and_those_of_vllm_get_longer_to_come_up() -> None:
    on_cpu, on_gpu = platform("pools: [{name: a}]"), platform("pools: [{name: a}, {name: b, engine: {device: cuda}}]")
    of_vllm = platform("pools: [{name: a, engine: {runner: vllm, vllm: {start_timeout_s: 700}}}]")

    assert start_timeout_s(on_cpu, 180.0) == 180.0
    assert start_timeout_s(on_gpu, 180.0) == GPU_START_S
    assert start_timeout_s(of_vllm, 180.0) == 700.0


def test_a_platform_without_gpus_needs_none() -> None:
    check_gpus(platform("pools: [{name: a, replicas: 2}]"), 0.0)


def test_a_scaled_pool_is_reckoned_with_at_its_most_replicas() -> None:
    engine = EngineConfig(kv_memory_bytes=2**30)
    config = PlatformConfig(pools=(PoolConfig(name="a", autoscale=AutoscaleConfig(max_replicas=3), engine=engine),))

    assert config.num_replicas == 1
    assert divide_machine(config, cores=6).pools[0].engine.threads == 2
    with pytest.raises(ConfigError, match=r"3\.0 GiB"):
        check_memory(config, 2 * 2**30)


def test_adapters_lie_in_the_state_folder_unless_another_one_is_named(tmp_path: Path) -> None:
    default = place_folders(platform("pools: [{name: a}]"), tmp_path).adapters
    named = place_folders(
        platform("{pools: [{name: a}], adapters: {folder: shared, import_folder: bring}}"), tmp_path
    ).adapters

    certified = place_folders(
        platform("{pools: [{name: a}], adapters: {sources: {ca_file: ca.pem}}}"), tmp_path
    ).adapters.sources

    assert certified.ca_file == str(Path.cwd() / "ca.pem")
    assert (default.folder, default.import_folder) == (str(tmp_path / "adapters"), None)
    assert (named.folder, named.import_folder) == (str(Path.cwd() / "shared"), str(Path.cwd() / "bring")), (
        "processes of Ray work elsewhere"
    )


def test_texts_of_batches_lie_in_the_state_folder_unless_another_one_is_named(tmp_path: Path) -> None:
    default = place_folders(platform("pools: [{name: a}]"), tmp_path).batches
    named = place_folders(platform("{pools: [{name: a}], batches: {folder: shared, max_lines: 7}}"), tmp_path).batches

    assert default.folder == str(tmp_path / "batches")
    assert (named.folder, named.max_lines) == (str(Path.cwd() / "shared"), 7)


@pytest.mark.parametrize("text", ["max_bytes: 0", "max_per_tenant: 0", "load_timeout_s: -1"])
def test_impossible_settings_of_adapters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split(":")[0]):
        platform(f"{{pools: [{{name: a}}], adapters: {{{text}}}}}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("https: listed", r"adapters\.sources\.hosts names no host"),
        ("hosts: ['a/b']", r"not 'a/b'"),
        ("hosts: ['user@a']", r"not 'user@a'"),
        ("hosts: ['a:99999']", r"not 'a:99999'"),
        ("max_redirects: 21", "max_redirects must be 0 to 20"),
        ("timeout_s: 601", "timeout_s must be above 0 and at most 600"),
        ("stall_s: 0", "stall_s must be above 0"),
        ("s3: {endpoint: 'minio:9000'}", r"s3\.endpoint must be http"),
        ("s3: {endpoint: 'https://key:secret@minio'}", r"s3\.endpoint must be http"),
        ("s3: {region: 'EU west'}", r"s3\.region must be"),
        ("s3: {access_key_env: A, allow: [b]}", "belong together"),
        ("s3: {session_token_env: A}", "of no use without"),
        ("s3: {access_key_env: A, secret_key_env: B}", r"s3\.allow names nothing"),
        ("s3: {allow: ['/']}", r"s3\.allow holds '/'"),
        ("hub: {token_env: A}", r"hub\.allow names nothing"),
        ("hub: {endpoint: 'ftp://hub'}", r"hub\.endpoint must be http"),
    ],
)
def test_impossible_sources_of_adapters_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        platform(f"{{pools: [{{name: a}}], adapters: {{sources: {{{text}}}}}}}")


@pytest.mark.parametrize("text", ["slots: -1", "max_rank: 0"])
def test_impossible_slots_for_adapters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.adapters\.{text.split(':')[0]}"):
        platform(f"{{pools: [{{name: a, engine: {{adapters: {{{text}}}}}}}]}}")


BUDGET = "{{autoscale_budget: {{gpus: 3}}, pools: [{{name: a, {a}}}, {{name: b, {b}}}]}}"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("replicas: 1", "replicas: 1", "no scaled pool takes a GPU"),
        ("autoscale: {}", "autoscale: {}", "no scaled pool takes a GPU"),
        (
            "replicas: 2, autoscale: {gpus: 1, min_replicas: 2}",
            "replicas: 1, autoscale: {gpus: 2}",
            "autoscale.min_replicas of the scaled pools take 4 GPUs",
        ),
        ("replicas: 2, autoscale: {gpus: 1}", "autoscale: {gpus: 2}", "but replicas of the scaled pools take 4 GPUs"),
        ("autoscale: {gpus: -1}", "autoscale: {}", "autoscale.gpus can't be negative"),
    ],
)
def test_a_budget_of_gpus_that_can_not_hold_is_refused(a: str, b: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        platform(BUDGET.format(a=a, b=b))


def test_a_replica_counts_for_the_gpus_that_it_takes_unless_another_number_is_named() -> None:
    config = platform(
        BUDGET.format(a="autoscale: {}, engine: {device: cuda, tensor_parallel_size: 2}", b="autoscale: {gpus: 1}")
    )

    assert [pool.counted_gpus for pool in config.pools] == [2, 1]
    assert config.budget_gpus == 3
    check_gpus(config, 3.0)
    with pytest.raises(ConfigError, match="3 altogether"):
        check_gpus(config, 2.0)


def test_a_pools_named_targets_leave_the_gateways_out() -> None:
    config = platform(
        "{gateway: {ttft_target_s: 2.0}, targets: {interactive: {ttft_s: 0.5}}, "
        "pools: [{name: a, autoscale: {}, targets: {interactive: {tpot_s: 0.02}}}, {name: b, autoscale: {}}]}"
    )

    assert config.named_targets(config.pools[0]) == ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.02))
    assert [pool.targets for pool in scaled_pools(config)] == [
        ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.02)),
        ClassTargets(interactive=Target(ttft_s=0.5)),
    ]
