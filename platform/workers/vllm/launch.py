"""A pool's settings as vLLM needs them: its interpreter, its arguments, its environment."""

import os
import shutil
from collections.abc import Mapping

import msgspec

from penstock.base.cores import available_cores
from penstock.base.environment import VLLM_PYTHON
from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.footprint import usable_here
from penstock.workers.compute.model_config import read_config, read_eos_token_ids
from penstock.workers.compute.planned import left_for_kv
from penstock.workers.config import EngineConfig
from penstock.workers.vllm.child import bridge_command, make_environment
from penstock.workers.vllm.engine import Launch

MAX_LOGPROBS = 20
"""Most log probabilities of a place; our API allows as many."""
AUTO_MAX_MODEL_LEN = -1
"""Value with which vLLM takes the checkpoint's length, as far as the KV cache holds it."""
MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Highest ranks that vLLM can be set to."""


def find_python(config: EngineConfig, default: str | None) -> str:
    """The interpreter with vLLM. default: where the pool names none. Raises ConfigError when there is none."""
    named = config.vllm.python or default
    if named is None:
        raise ConfigError(
            f"runner: vllm needs engine.vllm.python or {VLLM_PYTHON}, "
            "the interpreter of an environment that has vLLM (docs/vllm.md)"
        )
    found = shutil.which(os.path.expanduser(named))
    if found is None:
        raise ConfigError(
            f"{named} (engine.vllm.python or {VLLM_PYTHON}) is not a program; "
            "it must be the interpreter of an environment that has vLLM"
        )
    return found


def can_adapt(source: ModelSource, config: EngineConfig) -> bool:
    """Whether a pool can serve adapters: it has slots, and gateways can check what tenants bring against the
    checkpoint, which only those that our own engine knows allow."""
    if not config.adapters.slots:
        return False
    try:
        read_config(source)
    except ConfigError:
        return False
    return True


def make_launch(
    source: ModelSource,
    folder: str,
    config: EngineConfig,
    python: str,
    inherited: Mapping[str, str],
    *,
    has_adapters: bool = False,
) -> Launch:
    """How to start vLLM for a pool. folder: the checkpoint as vLLM reads it. Raises ConfigError."""
    # vLLM takes these threads in each of its processes
    processes = config.tensor_parallel_size if config.device == "cpu" else 1
    threads = max(1, (config.threads or available_cores()) // processes)
    if config.kv_memory_bytes == "auto" and config.device == "cpu":
        left = left_for_kv(source, read_config(source), config, usable_here())
        config = msgspec.structs.replace(config, kv_memory_bytes=left)
    return Launch(
        bridge_command(python),
        make_environment(inherited, threads),
        make_engine_args(folder, config, has_adapters=has_adapters),
        read_eos_token_ids(source),
    )


def make_engine_args(folder: str, config: EngineConfig, *, has_adapters: bool = False) -> dict[str, object]:
    """Arguments of vLLM's EngineArgs, by name. Raises ConfigError for a rank that vLLM does not serve."""
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling defaults are the gateway's affair
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.token_budget,
        "max_model_len": config.max_model_len or AUTO_MAX_MODEL_LEN,
        **_kv_memory(config),
        "max_logprobs": MAX_LOGPROBS,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},  # the bridge takes them
        **_parallel_args(config.tensor_parallel_size),
        **(_adapter_args(config) if has_adapters else {}),
        **config.vllm.args,
    }


def _kv_memory(config: EngineConfig) -> dict[str, object]:
    if config.kv_memory_bytes == "auto":
        return {"gpu_memory_utilization": config.memory_share}
    return {"kv_cache_memory_bytes": config.kv_memory_bytes}


def _parallel_args(size: int) -> dict[str, object]:
    """Arguments for a model in parts. mp: processes of vLLM's own on the replica's GPUs, not actors of a Ray that its
    environment may have."""
    args: dict[str, object] = {"tensor_parallel_size": size}
    return args if size == 1 else {**args, "distributed_executor_backend": "mp"}


def _adapter_args(config: EngineConfig) -> dict[str, object]:
    """Arguments for adapters. As many as slots are in memory and may be in one step, so vLLM never has to choose which
    to give up.

    On CPUs there is a place more, the last, which stays empty: to a row without an adapter, which has the index -1,
    vLLM's kernels for CPUs (vllm/lora/ops/torch_ops) apply what lies in the last place.
    """
    slots, wanted = config.adapters.slots, config.adapters.max_rank
    rank = next((rank for rank in MAX_LORA_RANKS if rank >= wanted), None)
    if rank is None:
        raise ConfigError(
            f"engine.adapters.max_rank: {wanted} is more than vLLM serves, which is {MAX_LORA_RANKS[-1]}; "
            "engine.adapters.slots: 0 serves no adapters"
        )
    places = slots + 1 if config.device == "cpu" else slots
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}
