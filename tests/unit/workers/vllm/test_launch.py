import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.workers.compute.footprint import usable_here
from penstock.workers.config import AdapterSlots, EngineConfig, SpeculationConfig, VllmConfig
from penstock.workers.vllm.child import BRIDGE, make_environment
from penstock.workers.vllm.launch import can_adapt, find_python, make_engine_args, make_launch


def config(**vllm: object) -> EngineConfig:
    return EngineConfig(runner="vllm", vllm=VllmConfig(**vllm))  # type: ignore[arg-type]


def test_the_pools_interpreter_wins_over_the_machines() -> None:
    assert find_python(config(python=sys.executable), "/no/such") == sys.executable
    assert find_python(config(), sys.executable) == sys.executable


@pytest.mark.parametrize(
    ("default", "expected"), [(None, "PENSTOCK_VLLM_PYTHON"), ("/no/such/python", "/no/such/python")]
)
def test_without_an_interpreter_the_sentence_says_how_to_name_one(default: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_python(config(), default)


def test_settings_become_arguments_and_given_arguments_win() -> None:
    args = make_engine_args(
        "/model",
        EngineConfig(
            runner="vllm", max_num_seqs=8, max_model_len=512, vllm=VllmConfig(args={"dtype": "float16", "seed": 3})
        ),
    )

    assert args["model"] == "/model"
    assert (args["max_num_seqs"], args["max_model_len"], args["kv_cache_memory_bytes"]) == (8, 512, 512 * 2**20)
    assert (args["dtype"], args["seed"]) == ("float16", 3)
    assert make_engine_args("/model", config())["max_model_len"] == -1
    assert args["kv_events_config"] == {"enable_kv_cache_events": True, "publisher": "null"}


def test_a_model_in_parts_is_computed_by_processes_of_vllms_own() -> None:
    whole, divided = (make_engine_args("/model", EngineConfig(runner="vllm", tensor_parallel_size=n)) for n in (1, 2))

    assert (whole["tensor_parallel_size"], whole.get("distributed_executor_backend")) == (1, None)
    assert (divided["tensor_parallel_size"], divided["distributed_executor_backend"]) == (2, "mp")


def test_the_processes_of_a_model_in_parts_divide_the_threads_of_a_cpu() -> None:
    def threads_of(**engine: object) -> str:
        settings = EngineConfig(runner="vllm", threads=8, **engine)  # type: ignore[arg-type]
        return make_launch(resolve("demo"), "/model", settings, sys.executable, {}).environment["OMP_NUM_THREADS"]

    assert [threads_of(tensor_parallel_size=size) for size in (1, 2, 16)] == ["8", "4", "1"]
    assert threads_of(tensor_parallel_size=2, device="cuda") == "8"


@pytest.mark.parametrize(("max_rank", "expected"), [(1, 8), (8, 8), (32, 32), (33, 64), (512, 512)])
def test_adapters_have_as_many_places_in_vllm_as_slots_and_the_next_rank_that_it_knows(
    max_rank: int, expected: int
) -> None:
    engine = EngineConfig(runner="vllm", device="cuda", adapters=AdapterSlots(slots=3, max_rank=max_rank))
    args = make_engine_args("/model", engine, has_adapters=True)

    assert (args["enable_lora"], args["max_loras"], args["max_cpu_loras"]) == (True, 3, 3)
    assert args["max_lora_rank"] == expected
    assert "enable_lora" not in make_engine_args("/model", engine)


def test_on_cpus_the_last_place_stays_empty() -> None:
    """vLLM's kernels for CPUs would apply what lies there to rows without an adapter."""
    args = make_engine_args("/model", EngineConfig(runner="vllm", adapters=AdapterSlots(slots=3)), has_adapters=True)

    assert (args["max_loras"], args["max_cpu_loras"]) == (4, 4)


def test_a_rank_that_vllm_does_not_know_is_refused_with_a_sentence() -> None:
    engine = EngineConfig(runner="vllm", adapters=AdapterSlots(max_rank=513))

    with pytest.raises(ConfigError, match=r"engine\.adapters\.max_rank: 513 is more than vLLM serves, which is 512"):
        make_engine_args("/model", engine, has_adapters=True)


def test_adapters_are_served_where_gateways_can_check_them() -> None:
    source = resolve("demo")
    unknown = SimpleNamespace(format="safetensors", config={"architectures": ["NoSuchModel"]}, read_json=lambda _: None)

    assert can_adapt(source, EngineConfig(runner="vllm"))
    assert not can_adapt(source, EngineConfig(runner="vllm", adapters=AdapterSlots(slots=0)))
    assert not can_adapt(cast(ModelSource, unknown), EngineConfig(runner="vllm"))


def test_the_child_gets_the_bridge_and_its_threads() -> None:
    inherited = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    launch = make_launch(
        resolve("demo"), "/model", EngineConfig(runner="vllm", threads=3), "/venv/bin/python", inherited
    )

    assert launch.command == ["/venv/bin/python", "-I", str(BRIDGE)]
    assert Path(launch.command[-1]).is_file()
    assert (
        launch.environment["PATH"],
        launch.environment["OMP_NUM_THREADS"],
        launch.environment["VLLM_LOGGING_LEVEL"],
    ) == ("/bin", "3", "DEBUG")
    assert launch.eos_token_ids == {2}


SECRETS = (
    *(
        "PENSTOCK_CLUSTER_SECRET",
        "PENSTOCK_REPLICA_SECRETS",
        "PENSTOCK_REDIS_URL",
        "PENSTOCK_REDIS_URL_REPLICA",
        "RAY_AUTH_TOKEN",
        "OPENAI_API_KEY",
        "MISTRAL_KEY",
        "UPSTREAM",
        "VLLM_API_KEY",
        "VLLM_PROVIDER_TOKEN",
    ),
    *("OTEL_EXPORTER_OTLP_HEADERS", "HTTPS_PROXY", "HF_TOKEN", "HF_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"),
)
"""Variables with secrets of the platform, of providers (whose keys have names of the operator's choice), of a trace
exporter, of a proxy and of hubs."""
NEEDED = (
    "PATH",
    "HOME",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "KMP_BLOCKTIME",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "VLLM_TARGET_DEVICE",
)


def test_the_child_inherits_what_it_needs_and_no_secret() -> None:
    inherited = {name: f"value of {name}" for name in (*SECRETS, *NEEDED, "PYTHONPATH", "LDAP_PASSWORD")}

    found = make_environment(inherited, threads=2)

    assert {name for name in inherited if found.get(name) == inherited[name]} == set(NEEDED)
    assert [secret for secret in (*SECRETS, "LDAP_PASSWORD") if secret in found] == []
    assert "PYTHONPATH" not in found, "it is meant for our own Python"


def test_a_gpu_is_asked_of_ray_as_for_our_own_engine() -> None:
    assert (EngineConfig(runner="vllm").num_gpus, EngineConfig(runner="vllm", device="cuda").num_gpus) == (0, 1)
    assert EngineConfig(runner="vllm", device="cuda", tensor_parallel_size=4).num_gpus == 4


def test_what_vllm_can_not_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="exact"):
        EngineConfig(runner="vllm", exact=True)
    with pytest.raises(ConfigError, match=r"engine\.lm_head: int8 is for our own engine"):
        EngineConfig(runner="vllm", lm_head="int8")
    with pytest.raises(ConfigError, match="speculation"):
        EngineConfig(runner="vllm", speculation=SpeculationConfig(method="ngram"))
    with pytest.raises(ConfigError, match="start_timeout_s"):
        VllmConfig(start_timeout_s=0)


def test_a_gpus_memory_is_shared_out_as_for_our_own_engine() -> None:
    args = make_engine_args("/model", EngineConfig(runner="vllm", device="cuda", memory_share=0.8))

    assert args["gpu_memory_utilization"] == 0.8
    assert "kv_cache_memory_bytes" not in args


def test_on_a_cpu_the_room_for_keys_and_values_is_planned() -> None:
    settings = EngineConfig(runner="vllm", kv_memory_bytes="auto", memory_share=0.5)

    launch = make_launch(resolve("demo"), "/model", settings, sys.executable, {})

    found = launch.args["kv_cache_memory_bytes"]
    assert isinstance(found, int)
    assert 0 < found < 0.5 * usable_here()
    assert "gpu_memory_utilization" not in launch.args


def test_room_that_is_too_small_is_refused_with_the_sum() -> None:
    settings = EngineConfig(runner="vllm", kv_memory_bytes="auto", memory_share=0.001)

    with pytest.raises(ConfigError, match=r"auto finds no room: weights 0\.21 GB"):
        make_launch(resolve("demo"), "/model", settings, sys.executable, {})


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_arguments_for_which_nobody_reserved_gpus_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.vllm.args.{name} can't be set"):
        VllmConfig(args={name: 2})
