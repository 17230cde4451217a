"""How many KV blocks a replica has. With a size given, as many as it holds; with `kv_memory_bytes: auto` what is left
of a share of the memory, when everything else has been measured: weights, the largest steps, recorded steps.

What is measured is the runner itself over a small cache, before the one that serves is made. The arithmetic (`Needs`,
`plan_kv`) is pure; meters (`GpuMeter`, `HostMeter`) read what driver, allocator and kernel say.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from penstock.base.errors import ConfigError
from penstock.base.unused_pages import release_unused
from penstock.workers.compute.footprint import (
    forget_peak,
    peak_bytes,
    resident_bytes,
    usable_here,
)
from penstock.workers.compute.lora import bytes_of_rank
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.models.replay import Recorded
from penstock.workers.compute.warm_up import Warmed, largest_steps, run_step
from penstock.workers.config import EngineConfig

USEFUL_CONTEXT_TOKENS = 128
"""A KV cache that holds less, where the configuration wants more, is refused."""
GIB = 2**30
TOO_SMALL = (
    "the GPU has no memory left for the largest steps beside weights, KV cache and recorded steps: lower "
    "engine.kv_memory_bytes (or engine.memory_share), or engine.max_batched_tokens and engine.max_num_seqs"
)

_log = logging.getLogger("penstock.runner")


class Needs(NamedTuple):
    """Memory of one device, in bytes."""

    total: int
    """All of a GPU's; on a CPU all that replicas may take."""
    taken: int
    """What is there before the first step: weights, libraries, on a GPU other processes too."""
    steps: int
    """What the largest steps take for as long as they last: activations, logits, sampling."""
    recordings: int
    """Recorded steps, all of them."""
    adapters: int
    """Adapters of the highest rank in all slots."""

    def room(self, share: float) -> int:
        """What a share of the memory, 0 to 1, leaves for the KV cache."""
        return max(0, int(share * self.total) - self.taken - self.steps - self.recordings - self.adapters)

    def describe(self, share: float, kv_bytes: int, num_tokens: int) -> str:
        """The sentence for the log."""
        return (
            f"Of {self.total / GIB:.2f} GiB, engine.memory_share {share:g} gives {share * self.total / GIB:.2f}: "
            f"weights and what else was there {self.taken / GIB:.2f}, the largest steps {self.steps / GIB:.2f}, "
            f"recorded steps {self.recordings / GIB:.2f}, adapters {self.adapters / GIB:.2f}, "
            f"KV cache {kv_bytes / GIB:.2f} GiB, which is {num_tokens} tokens."
        )


class Meter(Protocol):
    """Reads one device's memory, in bytes."""

    def total(self) -> int: ...
    def used(self) -> int: ...

    def peak(self, run: Callable[[], None]) -> int:
        """The most that `run` takes beyond what is used."""


class Trial(NamedTuple):
    """A runner over a small KV cache."""

    runner: Warmed
    cache_bytes: int
    """What that cache takes at once."""


def measure(
    make_trial: Callable[[Recorded | None], Trial],
    recorded: Recorded | None,
    meter: Meter,
    config: EngineConfig,
    max_model_len: int,
    adapter_bytes: int,
) -> Needs:
    """Measure what is to be known before the KV cache is made. make_trial: of these recordings. recorded: those
    that will serve; None where nothing is recorded. max_model_len: tokens of a sequence."""
    num_sizes = 0 if recorded is None else recorded.num_sizes
    if recorded is not None and num_sizes > 1:
        make_trial(recorded.pick(0, -1))  # what is loaded once, for all recordings, is no recording's
    taken = meter.used()
    trial = make_trial(None if recorded is None else recorded.pick(-1))
    alone = both = max(0, meter.used() - taken - trial.cache_bytes)
    if recorded is not None and num_sizes > 1:
        del trial
        trial = make_trial(recorded.pick(0, -1))
        both = max(0, meter.used() - taken - trial.cache_bytes)
    steps = meter.peak(lambda: _run_largest(trial.runner, config, max_model_len))
    return Needs(meter.total(), taken, steps, recordings_bytes(alone, both, num_sizes), adapter_bytes)


def _run_largest(runner: Warmed, config: EngineConfig, max_model_len: int) -> None:
    for chunks in largest_steps(config, max_model_len):
        run_step(runner, chunks, config.block_size)


def recordings_bytes(largest: int, two: int, count: int) -> int:
    """What recordings of `count` sizes of each kind take, by what the largest of each kind take alone and with the
    smallest beside them: the others find room for their tensors in the same memory, and have what the driver keeps of
    each."""
    return largest + max(0, count - 1) * max(0, two - largest)


def adapter_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype, packed_bits: int | None = None) -> int:
    """Bytes of adapters of the highest rank, for every linear layer, in all slots. packed_bits: of an element in the
    form of the CPU's kernels; None: they are tensors."""
    of_each = bytes_of_rank(model, config.adapters.max_rank, dtype, packed_bits)
    return config.adapters.slots * of_each


class GpuMeter:
    """A GPU's memory, as its driver and torch's allocator have it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def peak(self, run: Callable[[], None]) -> int:
        used = self.used()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        return peak + max(0, self.used() - used)  # kernels that were loaded stay


class HostMeter:
    """The process's resident memory, and what its container or machine leaves it."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def total(self) -> int:
        return usable_here(self._proc, self._cgroup)

    def used(self) -> int:
        gc.collect()
        release_unused()
        return resident_bytes(_read(self._proc / "self/status"))

    def peak(self, run: Callable[[], None]) -> int:
        before = self.used()
        forget_peak()
        run()
        return max(0, peak_bytes(_read(self._proc / "self/status")) - before)


def make_meter(device: torch.device) -> Meter:
    return GpuMeter(device) if device.type == "cuda" else HostMeter()


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""


def plan_kv(
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    draft_block_bytes: int = 0,
    kv_bytes: int | None = None,
) -> tuple[int, int]:
    """Blocks of the KV cache, and the longest sequence in tokens. Raises ConfigError when the memory holds no useful
    context.

    draft_block_bytes: what a draft model keeps for each block beside. kv_bytes: where the configuration gives no size.
    """
    size = config.kv_memory_bytes if kv_bytes is None else kv_bytes
    assert isinstance(size, int)
    block_bytes = KvCache.block_bytes(model, config.block_size, dtype) + draft_block_bytes
    num_blocks = size // block_bytes
    held = num_blocks * config.block_size
    wanted = longest_wanted(model, config)
    least = min(wanted, USEFUL_CONTEXT_TOKENS)
    if held < least:
        found = size if kv_bytes is None else f"auto: {size}"
        raise ConfigError(
            f"engine.kv_memory_bytes ({found}) holds {num_blocks} KV blocks of {block_bytes} bytes, "
            f"which is {held} tokens; a context of {least} needs {-(-least // config.block_size) * block_bytes} bytes"
        )
    max_model_len = min(wanted, held)
    requested = config.max_model_len or model.max_position_embeddings
    if max_model_len < requested:
        _log.warning("max_model_len is %d, not %d: %s", max_model_len, requested, _limit(model, held, max_model_len))
    return num_blocks, max_model_len


def longest_wanted(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of the longest sequence, if the KV cache holds it."""
    return min(config.max_model_len or model.max_full_context, model.max_full_context)


def _limit(model: ModelConfig, held: int, max_model_len: int) -> str:
    if max_model_len == held:
        return "the KV cache holds no more"
    if max_model_len == model.sliding_window:
        return "the model attends in a sliding window, which is only supported up to its size"
    return "the checkpoint was made for no more"


def plan_left(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, draft_block_bytes: int, needs: Needs, kv_bytes: int
) -> tuple[int, int]:
    """`plan_kv` of what is left, `kv_bytes`, told in the log. Raises ConfigError, which says what went where."""
    block_bytes = KvCache.block_bytes(model, config.block_size, dtype) + draft_block_bytes
    sentence = needs.describe(config.memory_share, kv_bytes, kv_bytes // block_bytes * config.block_size)
    try:
        found = plan_kv(model, config, dtype, draft_block_bytes, kv_bytes)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. {sentence} Raise engine.memory_share, or lower engine.max_batched_tokens, engine.max_num_seqs "
            "or engine.adapters.slots"
        ) from error
    _log.info("%s", sentence)
    return found
