"""One rank's part of a model, over its part of the KV cache: what rank 0 and the others build and compute with."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.base.unused_pages import release_unused
from penstock.text.source import ModelSource
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.device import CPU, check_cache_fits
from penstock.workers.compute.lora import AdapterRows, LoraAdapter, load_lora
from penstock.workers.compute.measured import gpu_timing
from penstock.workers.compute.memory import Trial, adapter_bytes, make_meter, measure, plan_left
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.fused import make_cache
from penstock.workers.compute.models.gpu_weights import load_on_gpu
from penstock.workers.compute.models.llama import KvCache, Llama, Matrix
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.models.replay import Recorded, Replay, sizes
from penstock.workers.compute.parallel.cut import cut_adapter, take_own
from penstock.workers.compute.parallel.group import Group, connect
from penstock.workers.compute.parallel.shares import largest_config, make_shares
from penstock.workers.compute.readers.device_reader import DeviceReader
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.compute.weights import Take, place_on_host, read_weights
from penstock.workers.config import EngineConfig


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What all ranks know before any weight is read."""

    source: ModelSource
    model: ModelConfig
    """The whole model."""
    engine: EngineConfig
    is_on_gpu: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    draft_block_bytes: int
    """What a draft model keeps on rank 0 beside each KV block."""
    num_blocks: int
    """0: as many as find room on every rank."""
    max_model_len: int
    """Tokens of the longest sequence, at most."""
    threads: int
    """CPU threads of a rank."""
    meeting: Path = Path()
    """Path in a private folder, for `group.connect`; set when ranks are started."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.engine.tensor_parallel_size

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank) if self.is_on_gpu else torch.device("cpu")


class Part:
    """A rank's model and cache. One thread at a time; adapters are read from another."""

    def __init__(self, plan: PartPlan, rank: int, weights: Mapping[str, Matrix]) -> None:
        """weights: as `load_part` returns them. Returns when all ranks have come here."""
        self._plan = plan
        self._shares = make_shares(plan.model, plan.size)
        self._share = self._shares[rank]
        self.device = plan.device_of(rank)
        backend = connect(plan.meeting, rank, plan.size, self.device, plan.engine.stall_s)
        self.group = Group(backend, self._shares, rank)
        config = self._share.config_of(plan.model)
        self.model = Llama(config, weights, plan.max_model_len, plan.threads, exact=False, peers=self.group)
        found = (plan.num_blocks, plan.max_model_len) if plan.num_blocks else self._size_cache(config)
        num_blocks, self.max_model_len = found
        self.cache = make_cache(self.model, num_blocks, plan.engine.block_size, plan.kv_dtype)
        self._replay = (
            Replay(self.model, self.cache, Recorded(sizes(plan.engine.max_num_seqs)), self.max_model_len)
            if plan.is_on_gpu
            else None
        )

    def _size_cache(self, config: ModelConfig) -> tuple[int, int]:
        """KV blocks that find room on every rank, and tokens of the longest sequence. All ranks measure side by side,
        the same steps. Raises ConfigError. config: of this rank's part."""
        plan = self._plan
        own_share = plan.engine.memory_share / (1 if plan.is_on_gpu else plan.size)
        engine = msgspec.structs.replace(plan.engine, memory_share=own_share)
        meter = make_meter(self.device)
        recorded = Recorded(sizes(engine.max_num_seqs)) if plan.is_on_gpu else None
        adapters = adapter_bytes(config, engine, plan.dtype)
        needs = measure(self._make_trial, recorded, meter, engine, plan.max_model_len, adapters)
        meter.used()  # gives back what the trial took
        left = self.group.least(needs.room(own_share), self.device)
        largest = largest_config(plan.model, plan.size)
        return plan_left(largest, engine, plan.kv_dtype, plan.draft_block_bytes, needs, left)

    def _make_trial(self, recorded: Recorded | None) -> Trial:
        plan, engine = self._plan, self._plan.engine
        cache = make_cache(self.model, engine.max_num_seqs, engine.block_size, plan.kv_dtype)
        steps = (
            GpuStepModel(Replay(self.model, cache, recorded, plan.max_model_len))
            if recorded is not None
            else HostStepModel(self.model, cache)
        )
        sampler = Sampler(plan.model.vocab_size, plan.model.eos_token_ids)
        block_bytes = KvCache.block_bytes(self.model.config, engine.block_size, plan.kv_dtype)
        return Trial(
            TorchRunner(steps, sampler, plan.max_model_len, NgramDrafter()),
            engine.max_num_seqs * block_bytes if plan.is_on_gpu else 0,
        )

    @property
    def tables(self) -> BlockTables | None:
        """The rank's block tables, where they stay on its device."""
        return None if self._replay is None else self._replay.tables

    def compute(self, batch: Batch, adapter_rows: list[AdapterRows], *, is_greedy: bool, is_scored: bool) -> Tensor:
        """Logits of the batch's rows, float32 [R, vocab_size], or with is_greedy `models.llama.largest` of them, on the
        rank's device; all ranks get the same. is_scored: rows of prompts are among them."""
        replay = self._replay
        if replay is not None and not adapter_rows and not is_scored and replay.covers(batch):
            return replay.greedy_on_device(batch) if is_greedy else replay.on_device(batch)
        step = step_of(batch, adapter_rows)
        if self.device.type == "cuda":
            return self.model.on_device(step, self.cache, is_greedy=is_greedy)
        return (self.model.compute_largest if is_greedy else self.model.compute)(step, self.cache)

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> LoraAdapter:
        """The rank's part of an adapter. Raises InvalidRequest for one that does not fit the whole model, OSError."""
        whole = load_lora(digest, folder, self._plan.model, max_rank, self._plan.dtype)
        with torch.cuda.device(self.device) if self._plan.is_on_gpu else nullcontext():
            # another thread, which has not been told of the rank's device
            return cut_adapter(whole, self._plan.model, self._share, self.device)

    def close(self) -> None:
        """Give up the recordings. They hold operations of the group, whose end waits for theirs on a GPU."""
        self._replay = None


def load_part(plan: PartPlan, rank: int) -> Mapping[str, Matrix]:
    """The rank's weights, on its device; reads no others. Sets the process's torch threads. Raises ConfigError."""
    torch.set_num_threads(plan.threads)
    device = plan.device_of(rank)
    take = take_own(make_shares(plan.model, plan.size)[rank], plan.model)
    if plan.is_on_gpu:
        torch.cuda.set_device(device)
        weights = load_on_gpu(
            plan.source, plan.model, plan.engine.lm_head, plan.dtype, device, gpu_timing(device), take
        )
    else:
        weights = _load_on_host(plan, take)
    if isinstance(plan.engine.kv_memory_bytes, int):
        check_cache_fits(plan.engine.kv_memory_bytes, device)
    release_unused()  # of what reading left
    return weights


def _load_on_host(plan: PartPlan, take: Take) -> Mapping[str, Matrix]:
    # as for a GPU, and not mapped: pages of a mapped file would count as the rank's memory until all is read
    with DeviceReader(CPU, plan.threads) as reader:
        own = read_weights(plan.source, plan.model, plan.dtype, head=plan.engine.lm_head, reader=reader, take=take)
        return place_on_host(own, plan.source, plan.dtype)


def with_rows(batch: Batch, rows: Tensor) -> Batch:
    """The batch with other rows whose logits are wanted."""
    return replace(batch, rows=rows)
