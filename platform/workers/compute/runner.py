"""The torch runner: computes the engine's steps with a real model. It owns weights, KV cache and sampler; blocks and
sequences are the engine's."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.cores import available_cores
from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.batch import Batch, build_batch
from penstock.workers.compute.device import CPU, check_cache_fits, check_cache_type, fetched, find_device
from penstock.workers.compute.footprint import release_unused
from penstock.workers.compute.lora import LoraAdapter, load_lora, shares_of
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.fused import FusedLlama, Model, is_fused, load_for, make_cache, make_model
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.models.replay import Replay, sizes
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.speculation.plan import plan_draft
from penstock.workers.compute.triton.sampling_inputs import SamplingInputs
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Sampled, Sequence, Step

USEFUL_CONTEXT_TOKENS = 128
"""A KV cache that holds less, where more was asked for, is refused."""

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of /proc/cpuinfo, on x86 and Arm: the CPU multiplies bfloat16."""

_log = logging.getLogger("penstock.runner")


class _Best(NamedTuple):
    """What a device chooses for the rows of a batch."""

    batch: Batch
    fetch: Callable[[], Iterable[Tensor]]
    """Waits for it: token ids, and the rows' largest logits."""


class TorchRunner:
    """Satisfies `penstock.workers.engine.engine.Runner`. One thread at a time."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        sampler: Sampler,
        max_model_len: int,
        drafter: Drafter | None = None,
        replay: Replay | None = None,
    ) -> None:
        """max_model_len: tokens, not more than the model's RoPE tables and the cache hold. replay: of the model's
        decode steps, on a GPU."""
        self.num_blocks = cache.num_blocks
        self.max_model_len = max_model_len
        self.eos_token_ids = model.config.eos_token_ids
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._drafter = drafter
        self._replay = replay

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps whose tokens are chosen on the GPU are under way when `launch` returns."""
        return self._replay is not None

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        """Compute the chunks' KV and choose tokens for those that sample: one, and one more for each accepted token of
        a draft. What is returned ends the step: with what was chosen where the logits are, which then don't leave it,
        or with a choice on the host."""
        self.draft(step)
        found = self._best_fused(step) if isinstance(self._model, FusedLlama) else self._best_on_gpu(step)
        if found is None:
            return partial(self.choose, step, *self.forward(step))
        return partial(self._take_best, step, found)

    def draft(self, step: Step) -> None:
        """Set the drafts of the chunks that have places for them."""
        if self._drafter is None:
            return
        chunks = [chunk for chunk in step.chunks if chunk.max_drafts]
        for chunk, draft in zip(chunks, self._drafter.propose(chunks) if chunks else (), strict=True):
            chunk.draft = draft

    def forward(self, step: Step) -> tuple[Batch, Tensor]:
        """The batch, and float32 [R, vocab_size] logits of its sampled rows."""
        with torch.inference_mode():
            batch = build_batch(step, self._cache.block_size)
            shares = shares_of(step.chunks)
            if self._replay is not None and not shares and self._replay.covers(batch):
                return batch, self._replay.logits(batch)
            return batch, self._model.logits(
                batch.token_ids, batch.positions, self._cache, batch.attention, batch.rows, shares
            )

    def choose(self, step: Step, batch: Batch, logits: Tensor) -> list[list[Sampled]]:
        choices: list[list[Sampled]] = [[] for _ in step.chunks]
        chunks = [step.chunks[index] for index in batch.sampled]
        seqs = [chunk.seq for chunk in chunks]
        with torch.inference_mode():
            if len(batch.rows) > len(chunks):
                sampled = self._sampler.verify(logits, seqs, [chunk.draft or [] for chunk in chunks])
            else:
                sampled = (
                    [[choice] for choice in self._sampler.sample(logits, seqs, [chunk.end for chunk in chunks])]
                    if chunks
                    else []
                )
        for index, found in zip(batch.sampled, sampled, strict=True):
            choices[index] = found
        return choices

    def _take_best(self, step: Step, found: _Best) -> list[list[Sampled]]:
        batch = found.batch
        with torch.inference_mode():
            best, scores = found.fetch()
        choices: list[list[Sampled]] = [[] for _ in step.chunks]
        chosen = self._sampler.greedy_tokens(
            best.long().tolist(), scores.tolist(), [step.chunks[index].draft or [] for index in batch.sampled]
        )
        for index, sampled in zip(batch.sampled, chosen, strict=True):
            choices[index] = sampled
        return choices

    def _best_fused(self, step: Step) -> _Best | None:
        """In the fused kernels greedily, without adapters."""
        assert isinstance(self._model, FusedLlama)
        if any(chunk.seq.lora is not None for chunk in step.chunks) or not self._sampler.takes_best(
            [c.seq for c in step.chunks if c.is_sampled]
        ):
            return None
        with torch.inference_mode():
            batch = build_batch(step, self._cache.block_size)
            best = self._model.best(batch.token_ids, batch.positions, self._cache, batch.attention, batch.rows)
            return _Best(batch, lambda: best)

    def _best_on_gpu(self, step: Step) -> _Best | None:
        """On a GPU greedily, or drawn where nothing is drafted and `Sampler.draws` covers all rows."""
        model, replay = self._model, self._replay
        if replay is None or not isinstance(model, Llama):
            return None
        chunks = [chunk for chunk in step.chunks if chunk.is_sampled]
        seqs = [chunk.seq for chunk in chunks]
        is_greedy = self._sampler.takes_best(seqs)
        draws = (
            None
            if is_greedy or any(chunk.draft for chunk in chunks)
            else self._sampler.draws(seqs, [chunk.end for chunk in chunks])
        )
        if draws is None and not is_greedy:
            return None
        with torch.inference_mode():
            batch, shares = build_batch(step, self._cache.block_size), shares_of(step.chunks)
            is_replayed = not shares and replay.covers(batch)
            if is_replayed and is_greedy:
                return _Best(batch, replay.best_on_device(batch).cpu)
            if is_replayed:
                logits = replay.on_device(batch)
            else:
                logits = model.on_device(
                    batch.token_ids, batch.positions, self._cache, batch.attention, batch.rows, shares
                )
            return _Best(batch, partial(fetched, largest(logits) if draws is None else _drawn(logits, draws)))

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> LoraAdapter:
        """From another thread than the one that runs steps. Raises InvalidRequest for one that does not fit the model,
        OSError."""
        return load_lora(digest, folder, self._model.config, max_rank, self._model.dtype, self._model.device)

    def forget(self, seq: Sequence) -> None:
        self._sampler.forget(seq)
        if self._drafter is not None:
            self._drafter.forget(seq)

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN, so that a read of what their owner did not write shows. For tests."""
        with torch.inference_mode():
            self._cache.poison(torch.tensor(list(blocks), dtype=torch.int64))


def _drawn(logits: Tensor, draws: SamplingInputs) -> Tensor:
    from penstock.workers.compute.triton.sample import choose  # Triton is there only where torch is made for a GPU

    return choose(logits, draws.on(logits.device))


def load_runner(source: ModelSource, config: EngineConfig, *, poison: bool = False) -> TorchRunner:
    """Read a checkpoint and make its runner; sets the process's torch threads. Raises ConfigError with a sentence.

    poison: the KV cache starts as NaN.
    """
    release_unused()  # of what importing left, before the weights come
    model_config = read_config(source)
    device = find_device(config.device, torch.cuda.is_available())
    dtype = compute_dtype(config.dtype, device, is_fused=is_fused(model_config, config, device))
    draft = plan_draft(source, model_config, config)
    kv_dtype = cache_dtype(config.kv_dtype, dtype)
    check_cache_type(kv_dtype, device)
    draft_bytes = 0 if draft is None else KvCache.block_bytes(draft.config, config.block_size, kv_dtype)
    num_blocks, max_model_len = plan_kv(model_config, config, kv_dtype, draft_bytes)
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    weights = load_for(source, model_config, config, dtype, device, threads)
    check_cache_fits(config.kv_memory_bytes, device)
    sampler = Sampler(model_config.vocab_size, model_config.eos_token_ids)
    drafter: Drafter | None = NgramDrafter() if config.speculation.method == "ngram" else None
    if draft is not None:
        draft_weights = (
            weights if draft.is_target else load_for(draft.source, draft.whole, config, dtype, device, threads)
        )
        draft_model = make_model(draft.config, draft_weights, max_model_len, threads, config)
        draft_cache = make_cache(draft_model, num_blocks, config.block_size, kv_dtype)
        drafter = DraftModel(draft_model, draft_cache, sampler, draft.config.max_full_context)
    model = make_model(model_config, weights, max_model_len, threads, config)
    cache = make_cache(model, num_blocks, config.block_size, kv_dtype)
    replay = (
        Replay(model, cache, sizes(config.max_num_seqs), max_model_len)
        if isinstance(model, Llama) and device.type == "cuda"
        else None
    )
    runner = TorchRunner(model, cache, sampler, max_model_len, drafter, replay)
    release_unused()  # of what loading left
    if poison:
        runner.poison(range(num_blocks))
    return runner


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
    if held < min(wanted, USEFUL_CONTEXT_TOKENS):
        raise ConfigError(
            f"engine.kv_memory_bytes ({config.kv_memory_bytes}) holds {num_blocks} KV blocks of {block_bytes} bytes, which is {held} tokens; "
            f"a context of {min(wanted, USEFUL_CONTEXT_TOKENS)} needs {-(-min(wanted, USEFUL_CONTEXT_TOKENS) // config.block_size) * block_bytes} bytes"
        )
    max_model_len = min(wanted, held)
    asked = config.max_model_len or model.max_position_embeddings
    if max_model_len < asked:
        _log.warning("max_model_len is %d, not %d: %s", max_model_len, asked, _limit(model, held, max_model_len))
    return num_blocks, max_model_len


def _limit(model: ModelConfig, held: int, max_model_len: int) -> str:
    if max_model_len == held:
        return "the KV cache holds no more"
    if max_model_len == model.sliding_window:
        return "the model attends in a sliding window, which is only supported up to its size"
    return "the checkpoint was made for no more"


def compute_dtype(name: str, device: torch.device = CPU, *, is_fused: bool = False) -> torch.dtype:
    """auto: bfloat16 where the device has instructions for it, or our kernels serve, which compute in float32 with what
    is kept in it; else float32."""
    if name == "auto":
        is_native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if device.type == "cuda"
            else is_fused or has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        )
        name = "bfloat16" if is_native else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values. auto: that of the computation."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo says that the CPU multiplies bfloat16."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(
        not _BF16_FLAGS.isdisjoint(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features")
    )
