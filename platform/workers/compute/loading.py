"""How a checkpoint and an engine's settings become a runner, in three steps: a plan by the headers, the weights, and
what computes with them. What can be refused is refused before weights are read."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from penstock.base.cores import available_cores
from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.device import CPU, check_cache_fits, check_cache_type, check_gpu_count, find_device
from penstock.workers.compute.device_choice import DeviceChoice
from penstock.workers.compute.footprint import release_unused
from penstock.workers.compute.grammar.compiler import GrammarCompiler, TokenTexts
from penstock.workers.compute.grammar.masks import MaskThreads
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.fused import is_fused, load_for, make_cache, make_model
from penstock.workers.compute.models.llama import KvCache, Llama, Matrix
from penstock.workers.compute.models.replay import Replay, sizes
from penstock.workers.compute.parallel.part import PartPlan
from penstock.workers.compute.parallel.ranks import end_process
from penstock.workers.compute.parallel.shares import largest_config
from penstock.workers.compute.parallel.steps import start_parallel
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.speculation.plan import DraftPlan, plan_draft
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel, StepModel
from penstock.workers.compute.triton.block_tables import BlockTables
from penstock.workers.config import EngineConfig

USEFUL_CONTEXT_TOKENS = 128
"""A KV cache that holds less, where the configuration wants more, is refused."""

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo, on x86 and Arm, any of which means that the CPU multiplies bfloat16."""

_log = logging.getLogger("penstock.runner")


class _Plan(NamedTuple):
    """What a runner will be, known before any weight is read."""

    source: ModelSource
    model: ModelConfig
    draft: DraftPlan | None
    """The draft model, where one is wanted."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_blocks: int
    max_model_len: int
    """Tokens of the longest sequence."""
    threads: int


class _Weights(NamedTuple):
    target: Mapping[str, Matrix]
    """Weights of the model; empty where it is in parts, which are loaded where they compute."""
    draft: Mapping[str, Matrix]
    """Weights of the draft model, which may be the target's own; empty where there is none."""


def load_runner(
    source: ModelSource,
    config: EngineConfig,
    *,
    poison: bool = False,
    on_loss: Callable[[str], None] = end_process,
) -> TorchRunner:
    """Read a checkpoint and make its runner; sets the process's torch threads. Raises ConfigError with a sentence.

    poison: the KV cache starts as NaN. on_loss: called in another thread, with a sentence, when a process is lost that
    has a part of the model.
    """
    release_unused()  # of what importing left, before the weights come
    plan = _plan(source, config)
    torch.set_num_threads(plan.threads)
    weights = _load(plan, config)
    runner = _make_runner(plan, weights, config, on_loss)
    release_unused()  # of what loading left
    if poison:
        runner.poison(range(plan.num_blocks))
    return runner


def _plan(source: ModelSource, config: EngineConfig) -> _Plan:
    model = read_config(source)
    device = find_device(config.device, torch.cuda.is_available())
    check_gpu_count(config.num_gpus, torch.cuda.device_count())
    is_whole = config.tensor_parallel_size == 1
    dtype = compute_dtype(config.dtype, device, is_fused=is_whole and is_fused(model, config, device))
    draft = plan_draft(source, model, config)
    if draft is not None and draft.is_target and not is_whole:
        raise ConfigError(
            "engine.speculation.model is the pool's own, which engine.tensor_parallel_size: "
            f"{config.tensor_parallel_size} divides; name another model, or method: ngram"
        )
    kv_dtype = cache_dtype(config.kv_dtype, dtype)
    check_cache_type(kv_dtype, device)
    draft_bytes = 0 if draft is None else KvCache.block_bytes(draft.config, config.block_size, kv_dtype)
    num_blocks, max_model_len = plan_kv(
        largest_config(model, config.tensor_parallel_size), config, kv_dtype, draft_bytes
    )
    threads = config.threads or available_cores()
    return _Plan(source, model, draft, device, dtype, kv_dtype, num_blocks, max_model_len, threads)


def _load(plan: _Plan, config: EngineConfig) -> _Weights:
    target: Mapping[str, Matrix] = {}
    if config.tensor_parallel_size == 1:
        target = load_for(plan.source, plan.model, config, plan.dtype, plan.device, plan.threads)
        check_cache_fits(config.kv_memory_bytes, plan.device)
    draft = plan.draft
    if draft is None:
        return _Weights(target, {})
    if draft.is_target:
        return _Weights(target, target)
    dtype: Literal["float32", "bfloat16"] = "float32" if plan.dtype == torch.float32 else "bfloat16"
    engine = config if config.tensor_parallel_size == 1 else msgspec.structs.replace(config, dtype=dtype)
    return _Weights(target, load_for(draft.source, draft.whole, engine, plan.dtype, plan.device, plan.threads))


def _make_runner(plan: _Plan, weights: _Weights, config: EngineConfig, on_loss: Callable[[str], None]) -> TorchRunner:
    kernels = load_kernels()
    vocab_size, eos = plan.model.vocab_size, plan.model.eos_token_ids
    masks = MaskThreads(eos, vocab_size, plan.threads)
    sampler = Sampler(vocab_size, eos, None if kernels is None else kernels.chooser(), masks)
    drafter = _make_drafter(plan, weights.draft, config, sampler)
    compiler = GrammarCompiler(partial(_load_tokenizer, plan.source), vocab_size)
    if config.tensor_parallel_size == 1:
        steps = _make_steps(plan, weights.target, config)
        return TorchRunner(steps, sampler, plan.max_model_len, drafter, compiler, masks)
    parts = start_parallel(_plan_parts(plan, config), on_loss)
    return TorchRunner(parts, sampler, plan.max_model_len, drafter, compiler, masks, parts)


def _plan_parts(plan: _Plan, config: EngineConfig) -> PartPlan:
    return PartPlan(
        plan.source,
        plan.model,
        config,
        plan.device.type == "cuda",
        plan.dtype,
        plan.kv_dtype,
        plan.num_blocks,
        plan.max_model_len,
        max(1, plan.threads // config.tensor_parallel_size),
    )


def _load_tokenizer(source: ModelSource) -> TokenTexts:
    from penstock.text.tokenizer import load_tokenizer  # noqa: PLC0415 (few replicas need it)

    return load_tokenizer(source)


def _make_drafter(plan: _Plan, weights: Mapping[str, Matrix], config: EngineConfig, sampler: Sampler) -> Drafter:
    if plan.draft is None:
        return PredictionDrafter(NgramDrafter() if config.speculation.method == "ngram" else None)
    model = make_model(plan.draft.config, weights, plan.max_model_len, plan.threads, config)
    cache = make_cache(model, plan.num_blocks, config.block_size, plan.kv_dtype)
    context = plan.draft.config.max_full_context
    if plan.device.type != "cuda":
        return PredictionDrafter(DraftModel(model, cache, sampler, context))
    tables = BlockTables(config.max_num_seqs, -(-plan.max_model_len // config.block_size), plan.device)
    drafter = DraftModel(model, cache, sampler, context, on_device=DeviceChoice(sampler), tables=tables)
    return PredictionDrafter(drafter)


def _make_steps(plan: _Plan, weights: Mapping[str, Matrix], config: EngineConfig) -> StepModel:
    if plan.device.type == "cuda":
        model = Llama(plan.model, weights, plan.max_model_len, plan.threads, config.exact)
        cache = make_cache(model, plan.num_blocks, config.block_size, plan.kv_dtype)
        return GpuStepModel(Replay(model, cache, sizes(config.max_num_seqs), plan.max_model_len))
    on_host = make_model(plan.model, weights, plan.max_model_len, plan.threads, config)
    return HostStepModel(on_host, make_cache(on_host, plan.num_blocks, config.block_size, plan.kv_dtype))


def plan_kv(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, draft_block_bytes: int = 0
) -> tuple[int, int]:
    """Blocks of the KV cache, and the longest sequence in tokens. Raises ConfigError when the memory holds no useful
    context.

    draft_block_bytes: what a draft model keeps for each block beside.
    """
    block_bytes = KvCache.block_bytes(model, config.block_size, dtype) + draft_block_bytes
    num_blocks = config.kv_memory_bytes // block_bytes
    held = num_blocks * config.block_size
    wanted = min(config.max_model_len or model.max_full_context, model.max_full_context)
    least = min(wanted, USEFUL_CONTEXT_TOKENS)
    if held < least:
        raise ConfigError(
            f"engine.kv_memory_bytes ({config.kv_memory_bytes}) holds {num_blocks} KV blocks of {block_bytes} bytes, "
            f"which is {held} tokens; a context of {least} needs {-(-least // config.block_size) * block_bytes} bytes"
        )
    max_model_len = min(wanted, held)
    requested = config.max_model_len or model.max_position_embeddings
    if max_model_len < requested:
        _log.warning("max_model_len is %d, not %d: %s", max_model_len, requested, _limit(model, held, max_model_len))
    return num_blocks, max_model_len


def _limit(model: ModelConfig, held: int, max_model_len: int) -> str:
    if max_model_len == held:
        return "the KV cache holds no more"
    if max_model_len == model.sliding_window:
        return "the model attends in a sliding window, which is only supported up to its size"
    return "the checkpoint was made for no more"


def compute_dtype(name: str, device: torch.device = CPU, *, is_fused: bool = False) -> torch.dtype:
    """The type that `engine.dtype` names. auto: bfloat16 where the device has instructions for it, or where our kernels
    serve, which keep numbers in it and compute in float32; else float32."""
    if name == "auto":
        is_native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if device.type == "cuda"
            else is_fused or has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        )
        name = "bfloat16" if is_native else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of keys and values. auto: that of the computation."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the CPU multiplies bfloat16, by the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(
        not _BF16_FLAGS.isdisjoint(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features")
    )
