"""A pool's settings as vLLM needs them: its interpreter, its arguments, its environment."""

import os
import shutil
from collections.abc import Mapping

from penstock.base.cores import available_cores
from penstock.base.environment import VLLM_PYTHON
from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.model_config import read_eos_token_ids
from penstock.workers.config import EngineConfig
from penstock.workers.vllm.child import bridge_command, make_environment
from penstock.workers.vllm.engine import Launch

MAX_LOGPROBS = 20
"""Most log probabilities of a place; our API allows as many."""
AUTO_MAX_MODEL_LEN = -1
"""Value with which vLLM takes the checkpoint's length, as far as the KV cache holds it."""


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


def make_launch(
    source: ModelSource, folder: str, config: EngineConfig, python: str, inherited: Mapping[str, str]
) -> Launch:
    """How to start vLLM for a pool. folder: the checkpoint as vLLM reads it. Raises ConfigError."""
    threads = config.threads or available_cores()
    return Launch(
        bridge_command(python),
        make_environment(inherited, threads),
        make_engine_args(folder, config),
        read_eos_token_ids(source),
    )


def make_engine_args(folder: str, config: EngineConfig) -> dict[str, object]:
    """Arguments of vLLM's EngineArgs, by name."""
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling defaults are the gateway's affair
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_batched_tokens,
        "max_model_len": config.max_model_len or AUTO_MAX_MODEL_LEN,
        **_kv_memory(config),
        "max_logprobs": MAX_LOGPROBS,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "tensor_parallel_size": config.tensor_parallel_size,
        **config.vllm.args,
    }


def _kv_memory(config: EngineConfig) -> dict[str, object]:
    if config.kv_memory_bytes == "auto":
        return {"gpu_memory_utilization": config.memory_share}
    return {"kv_cache_memory_bytes": config.kv_memory_bytes}
