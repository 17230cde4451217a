"""How a checkpoint and an engine's settings become a runner, in three steps: a plan by the headers, the weights, and
what computes with them. What can be refused is refused before weights are read."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from penstock.base.cores import available_cores
from penstock.base.errors import ConfigError
from penstock.base.unused_pages import release_unused
from penstock.perf.planning.fits import GB
from penstock.text.source import ModelSource
from penstock.workers.compute.device import CPU, check_cache_fits, check_cache_type, check_gpu_count, find_device
from penstock.workers.compute.device_choice import DeviceChoice
from penstock.workers.compute.footprint import most_here
from penstock.workers.compute.grammar.compiler import GrammarCompiler, TokenTexts
from penstock.workers.compute.grammar.masks import MaskThreads
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.memory import (
    TOO_SMALL,
    Trial,
    adapter_bytes,
    longest_wanted,
    make_meter,
    measure,
    plan_kv,
    plan_left,
)
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.fused import (
    FusedLlama,
    Weights,
    is_fused,
    load_for,
    make_cache,
    make_model,
    packed_adapter_bits,
)
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.replay import Recorded, Replay, recorded_steps
from penstock.workers.compute.parallel.part import PartPlan
from penstock.workers.compute.parallel.ranks import end_process
from penstock.workers.compute.parallel.shares import largest_config
from penstock.workers.compute.parallel.steps import start_parallel
from penstock.workers.compute.planned import check_fits, least_of
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.compute.speculation.head import HeadDrafter
from penstock.workers.compute.speculation.head_file import DraftHead
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.speculation.plan import DraftPlan, plan_draft, plan_head
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel, StepModel
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.compute.triton.compilations import keep_on_disk
from penstock.workers.compute.warm_up import warm_up
from penstock.workers.config import EngineConfig

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo, on x86 and Arm, any of which means that the CPU multiplies bfloat16."""

_log = logging.getLogger("penstock.runner")


class _Plan(NamedTuple):
    """What a runner will be, known before any weight is read."""

    source: ModelSource
    model: ModelConfig
    draft: DraftPlan | None
    """The draft model, where one is wanted."""
    head: DraftHead | None
    """The draft head, where one is wanted."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    draft_block_bytes: int
    """What the draft model keeps beside each KV block."""
    num_blocks: int
    """0: not known yet."""
    max_model_len: int
    """Tokens of the longest sequence, at most."""
    threads: int


class _Weights(NamedTuple):
    target: Weights
    """Weights of the model; empty where it is in parts, which are loaded where they compute."""
    draft: Weights
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
    if config.max_batched_tokens == "auto":
        raise ConfigError("engine.max_batched_tokens: auto is to be settled first (compute.token_budget)")
    release_unused()  # of what importing left, before the weights come
    plan = _plan(source, config)
    if plan.device.type == "cuda":
        keep_on_disk()
    torch.set_num_threads(plan.threads)
    weights = _load(plan, config)
    if not plan.num_blocks and config.tensor_parallel_size == 1:
        plan = _size_cache(plan, weights, config)
    runner = _make_runner(plan, weights, config, on_loss)
    if plan.device.type == "cuda":
        _warm_up(runner, config, plan.model)
    release_unused()  # of what loading left
    if poison:
        runner.poison(range(runner.num_blocks))
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
    head = plan_head(
        source,
        model,
        config,
        is_fused=is_whole and is_fused(model, config, device),
        has_kernels=not is_whole or load_kernels() is not None,
    )
    kv_dtype = cache_dtype(config.kv_dtype, dtype)
    check_cache_type(kv_dtype, device)
    _refuse_oversized(source, model, config, device, dtype)
    draft_bytes = 0 if draft is None else KvCache.block_bytes(draft.config, config.block_size, kv_dtype)
    if head is not None:
        draft_bytes = KvCache.block_bytes(replace(model, num_layers=1), config.block_size, kv_dtype)
    largest = largest_config(model, config.tensor_parallel_size)
    # auto: known when the weights are there
    num_blocks, max_model_len = (
        (0, longest_wanted(largest, config))
        if config.kv_memory_bytes == "auto"
        else plan_kv(largest, config, kv_dtype, draft_bytes)
    )
    threads = config.threads or available_cores()
    return _Plan(source, model, draft, head, device, dtype, kv_dtype, draft_bytes, num_blocks, max_model_len, threads)


def _refuse_oversized(
    source: ModelSource, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises ConfigError for a model that the device's memory can't hold, whose weights would be read in vain.

    A cache of a given size is taken on a CPU as its blocks are written, perhaps never all of it: what others hold at
    the moment is told, not refused.
    """
    least = least_of(source, model, config, is_float32=dtype == torch.float32)
    total = make_meter(device).total()
    if device.type == "cuda":
        check_fits(least, total, config, "the GPU")
        return
    parts = config.tensor_parallel_size  # all of them are in one memory
    if config.kv_memory_bytes == "auto":
        check_fits(least, total // parts, config, "this machine")
        return
    check_fits(least, most_here() // parts, config, "this machine")
    if least.num_bytes > total // parts:
        _log.warning("Memory may become short: %s; available now are %.2f GB.", least.describe(), total / parts / GB)


def _load(plan: _Plan, config: EngineConfig) -> _Weights:
    target: Weights = {}
    if config.tensor_parallel_size == 1:
        target = load_for(plan.source, plan.model, config, plan.dtype, plan.device)
        if isinstance(config.kv_memory_bytes, int):
            check_cache_fits(config.kv_memory_bytes, plan.device)
    draft = plan.draft
    if draft is None:
        return _Weights(target, {})
    if draft.is_target:
        return _Weights(target, target)
    dtype: Literal["float32", "bfloat16"] = "float32" if plan.dtype == torch.float32 else "bfloat16"
    engine = config if config.tensor_parallel_size == 1 else msgspec.structs.replace(config, dtype=dtype)
    return _Weights(target, load_for(draft.source, draft.whole, engine, plan.dtype, plan.device))


def _make_runner(plan: _Plan, weights: _Weights, config: EngineConfig, on_loss: Callable[[str], None]) -> TorchRunner:
    vocab_size = plan.model.vocab_size
    masks = MaskThreads(plan.model.eos_token_ids, vocab_size, plan.threads)
    sampler = _make_sampler(plan.model, masks)
    compiler = GrammarCompiler(partial(_load_tokenizer, plan.source), vocab_size)
    if config.tensor_parallel_size == 1:
        drafter = _make_drafter(plan, weights.draft, config, sampler)
        recorded = recorded_steps(config) if plan.device.type == "cuda" else None
        try:
            steps = _make_steps(plan, weights.target, config, recorded)
        except torch.OutOfMemoryError as error:
            raise ConfigError(TOO_SMALL) from error
        host_bytes = config.adapters.host_bytes
        head = None if plan.head is None else _make_head_drafter(plan.head, steps, plan, config, sampler)
        return TorchRunner(
            steps, sampler, plan.max_model_len, drafter if head is None else PredictionDrafter(head), compiler, masks,
            observer=head, host_adapter_bytes=host_bytes,
        )  # fmt: skip
    parts = start_parallel(_plan_parts(plan, config), on_loss)
    try:
        plan = plan._replace(num_blocks=parts.cache.num_blocks, max_model_len=parts.max_model_len)
        drafter = _make_drafter(plan, weights.draft, config, sampler)
    except BaseException:
        parts.close()
        raise
    return TorchRunner(parts, sampler, plan.max_model_len, drafter, compiler, masks, parts)


def _make_sampler(model: ModelConfig, masks: MaskThreads | None = None) -> Sampler:
    kernels = load_kernels()
    return Sampler(model.vocab_size, model.eos_token_ids, None if kernels is None else kernels.chooser(), masks)


def _size_cache(plan: _Plan, weights: _Weights, config: EngineConfig) -> _Plan:
    """The plan, with as many KV blocks as find room. Raises ConfigError where nothing useful does."""
    meter = make_meter(plan.device)
    recorded = recorded_steps(config) if plan.device.type == "cuda" else None
    adapters = adapter_bytes(plan.model, config, plan.dtype, packed_adapter_bits(weights.target))
    if plan.device.type == "cpu" and config.adapters.slots:
        adapters += config.adapters.host_bytes  # of those that have left their slots, in the same memory
    try:
        needs = measure(
            partial(_make_trial, plan, weights, config), recorded, meter, config, plan.max_model_len, adapters
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(TOO_SMALL) from error
    meter.used()  # gives back what the trial took
    left = needs.room(config.memory_share)
    num_blocks, max_model_len = plan_left(plan.model, config, plan.kv_dtype, plan.draft_block_bytes, needs, left)
    return plan._replace(num_blocks=num_blocks, max_model_len=max_model_len)


def _make_trial(plan: _Plan, weights: _Weights, config: EngineConfig, recorded: Recorded | None) -> Trial:
    small = plan._replace(num_blocks=config.max_num_seqs)
    steps = _make_steps(small, weights.target, config, recorded)
    sampler = _make_sampler(plan.model)
    if plan.head is None:
        # look-up stands for any other drafter, requests' own predictions too: places for drafts are what counts
        runner = TorchRunner(steps, sampler, plan.max_model_len, NgramDrafter())
    else:
        head = _make_head_drafter(plan.head, steps, small, config, sampler)
        runner = TorchRunner(steps, sampler, plan.max_model_len, head, observer=head)
    block_bytes = KvCache.block_bytes(plan.model, config.block_size, plan.kv_dtype)
    # on a CPU memory is taken as blocks are
    return Trial(runner, small.num_blocks * block_bytes if plan.device.type == "cuda" else 0)


def _warm_up(runner: TorchRunner, config: EngineConfig, model: ModelConfig) -> None:
    try:
        warm_up(runner, config, model)
    except torch.OutOfMemoryError as error:
        runner.close()
        raise ConfigError(TOO_SMALL) from error


def _plan_parts(plan: _Plan, config: EngineConfig) -> PartPlan:
    return PartPlan(
        plan.source,
        plan.model,
        config,
        plan.device.type == "cuda",
        plan.dtype,
        plan.kv_dtype,
        plan.draft_block_bytes,
        plan.num_blocks,
        plan.max_model_len,
        max(1, plan.threads // config.tensor_parallel_size),
    )


def _load_tokenizer(source: ModelSource) -> TokenTexts:
    from penstock.text.tokenizer import load_tokenizer  # noqa: PLC0415 (few replicas need it)

    return load_tokenizer(source)


def _make_drafter(plan: _Plan, weights: Weights, config: EngineConfig, sampler: Sampler) -> Drafter:
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


def _make_head_drafter(
    head: DraftHead, steps: StepModel, plan: _Plan, config: EngineConfig, sampler: Sampler
) -> HeadDrafter:
    library = load_kernels()
    if library is None or not isinstance(steps.model, FusedLlama):
        raise ConfigError(
            "engine.speculation.method: head needs the CPU kernels, which don't take this pool's matrices; the log "
            "says why"
        )
    return HeadDrafter(
        head, steps.model, plan.num_blocks, config.block_size, plan.kv_dtype, sampler, library, plan.threads
    )


def _make_steps(plan: _Plan, weights: Weights, config: EngineConfig, recorded: Recorded | None) -> StepModel:
    """recorded: None on a CPU, where nothing is."""
    model = make_model(plan.model, weights, plan.max_model_len, plan.threads, config)
    cache = make_cache(model, plan.num_blocks, config.block_size, plan.kv_dtype)
    if recorded is None:
        return HostStepModel(model, cache)
    assert isinstance(model, Llama)
    return GpuStepModel(Replay(model, cache, recorded, plan.max_model_len))


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
