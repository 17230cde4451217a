"""The torch runner: computes the engine's steps with a real model. It owns weights, KV cache and sampler; blocks and sequences are the engine's."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from penstock.text.source import ModelSource
from penstock.wire.errors import ConfigError
from penstock.workers.batch import Batch, build_batch
from penstock.workers.config import EngineConfig
from penstock.workers.models.config import ModelConfig, read_config
from penstock.workers.models.llama import KvCache, Llama
from penstock.workers.sampling import Sampler
from penstock.workers.sequence import Sampled, Sequence, Step
from penstock.workers.weights import load_weights

USEFUL_CONTEXT_TOKENS = 128
"""A KV cache that holds less, where more was asked for, is refused."""

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of /proc/cpuinfo, on x86 and Arm: the CPU multiplies bfloat16."""

_log = logging.getLogger("penstock.runner")


class TorchRunner:
    """Satisfies `penstock.workers.engine.Runner`. One thread at a time."""

    def __init__(self, model: Llama, cache: KvCache, sampler: Sampler, max_model_len: int) -> None:
        """max_model_len: tokens, not more than the model's RoPE tables and the cache hold."""
        self.num_blocks = cache.num_blocks
        self.max_model_len = max_model_len
        self.eos_token_ids = model.config.eos_token_ids
        self._model = model
        self._cache = cache
        self._sampler = sampler

    def run(self, step: Step) -> list[Sampled | None]:
        """Compute the chunks' KV and choose a token for each that samples; None for the others."""
        batch, logits = self.forward(step)
        return self.choose(step, batch, logits)

    def forward(self, step: Step) -> tuple[Batch, Tensor]:
        """The batch, and float32 [R, vocab_size] logits of its sampled rows."""
        with torch.inference_mode():
            batch = build_batch(step, self._cache.block_size)
            return batch, self._model.logits(batch.token_ids, batch.positions, self._cache, batch.attention, batch.rows)

    def choose(self, step: Step, batch: Batch, logits: Tensor) -> list[Sampled | None]:
        choices: list[Sampled | None] = [None] * len(step.chunks)
        if batch.sampled:
            chunks = [step.chunks[index] for index in batch.sampled]
            with torch.inference_mode():
                sampled = self._sampler.sample(logits, [chunk.seq for chunk in chunks], [chunk.end for chunk in chunks])
            for index, choice in zip(batch.sampled, sampled, strict=True):
                choices[index] = choice
        return choices

    def forget(self, seq: Sequence) -> None:
        self._sampler.forget(seq)

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN, so that a read of what their owner did not write shows. For tests."""
        with torch.inference_mode():
            self._cache.poison(torch.tensor(list(blocks), dtype=torch.int64))


def load_runner(source: ModelSource, config: EngineConfig, *, poison: bool = False) -> TorchRunner:
    """Read a checkpoint and make its runner; sets the process's torch threads. Raises ConfigError with a sentence.

    poison: the KV cache starts as NaN.
    """
    model_config = read_config(source)
    dtype = compute_dtype(config.dtype)
    num_blocks, max_model_len = plan_kv(model_config, config, dtype)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = Llama(model_config, load_weights(source, model_config, dtype), max_model_len, threads, config.exact)
    runner = TorchRunner(
        model,
        KvCache(model_config, num_blocks, config.block_size, dtype),
        Sampler(model_config.vocab_size, model_config.eos_token_ids),
        max_model_len,
    )
    if poison:
        runner.poison(range(num_blocks))
    return runner


def plan_kv(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Blocks of the KV cache, and the longest sequence in tokens. Raises ConfigError when the memory holds no useful context."""
    block_bytes = KvCache.block_bytes(model, config.block_size, dtype)
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


def compute_dtype(name: str) -> torch.dtype:
    """auto: bfloat16 where the CPU has instructions for it, else float32."""
    if name == "auto":
        name = "bfloat16" if has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8")) else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo says that the CPU multiplies bfloat16."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return any(not _BF16_FLAGS.isdisjoint(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features"))
