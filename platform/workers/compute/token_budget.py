"""How many tokens a step computes at most, where `engine.max_batched_tokens` is auto: by what the GPU is measured to
multiply, the size of the model, and the memory beside its weights.

Whoever decodes waits for a step's prompts, so a step should take STEP_S at most; longer ones gain little, since
products of LEAST_AUTO_TOKENS rows are about as quick as they get. The arithmetic (`choose_tokens`) is pure.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from penstock.text.source import ModelSource
from penstock.workers.compute.device import check_gpu_count, find_device
from penstock.workers.compute.loading import compute_dtype
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.readers.directory import weight_files
from penstock.workers.config import LEAST_AUTO_TOKENS, MOST_AUTO_TOKENS, EngineConfig

STEP_S = 0.1
"""Time that a step should not exceed, seconds."""
PREFILL_SHARE = 0.5
"""Part of the speed of one large product that a step of prompts reaches, attention and all the rest included."""
ACTIVATIONS_SHARE = 1 / 16
"""Part of the memory beside the weights that activations may take."""
GRAIN = 1024
"""Budgets are multiples of this."""
PRODUCT_SIZE = 4096
"""Rows, columns and depth of the product that is measured: some milliseconds, enough for every GPU's whole width."""
REPEATS = 5

_log = logging.getLogger("penstock.runner")


class Capacity(NamedTuple):
    """What one GPU has."""

    flops: float
    """Floating-point operations a second in a large product, measured."""
    free_bytes: int
    """Memory that nobody has taken yet; the weights are still to come."""
    itemsize: int
    """Bytes of a number in an activation."""


def read_capacity(config: EngineConfig) -> Capacity:
    """The capacity of the first GPU. Raises ConfigError where there are not as many as the settings want."""
    device = find_device(config.device, torch.cuda.is_available())
    check_gpu_count(config.num_gpus, torch.cuda.device_count())
    dtype = compute_dtype(config.dtype, device)
    return Capacity(measure_flops(device, dtype), torch.cuda.mem_get_info(device)[0], dtype.itemsize)


def settle(
    source: ModelSource, config: EngineConfig, read: Callable[[EngineConfig], Capacity] = read_capacity
) -> EngineConfig:
    """The settings with the budget that was chosen, which is told in the log. Takes a second. Raises ConfigError."""
    capacity = read(config)
    found = choose_tokens(read_config(source), config, capacity, weights_bytes(source))
    _log.info(
        "engine.max_batched_tokens: auto is %d: a large product has %.0f TFLOP/s",
        found,
        capacity.flops / 1e12,
        extra={"max_batched_tokens": found},
    )
    return msgspec.structs.replace(config, max_batched_tokens=found)


def choose_tokens(model: ModelConfig, config: EngineConfig, capacity: Capacity, weights: int) -> int:
    """Tokens of a step, LEAST_AUTO_TOKENS to MOST_AUTO_TOKENS, and a row of every sequence at least. weights: bytes of
    the whole model's."""
    parts = config.tensor_parallel_size
    num_weights = sum(outputs * inputs for outputs, inputs in model.linear_shapes.values()) * model.num_layers
    by_time = STEP_S * PREFILL_SHARE * capacity.flops / (2 * num_weights / parts)
    room = max(0, capacity.free_bytes - weights // parts) * ACTIVATIONS_SHARE
    by_memory = room / token_bytes(model, parts, capacity.itemsize)
    grains = int(min(by_time, by_memory)) // GRAIN
    return max(LEAST_AUTO_TOKENS, min(MOST_AUTO_TOKENS, grains * GRAIN), config.max_num_seqs)


def token_bytes(model: ModelConfig, parts: int, itemsize: int) -> float:
    """Bytes of the activations of one token that a layer has at once: inputs, outputs of every product, and what MLP
    and residual make of them."""
    outputs = sum(size for size, _ in model.linear_shapes.values()) / parts
    return (outputs + 4 * model.hidden_size + model.intermediate_size / parts) * itemsize


def weights_bytes(source: ModelSource) -> int:
    """Size of a checkpoint's tensors, in bytes, by that of its files."""
    files = [source.path] if source.format == "gguf" else weight_files(source)
    return sum(file.stat().st_size for file in files)


def measure_flops(device: torch.device, dtype: torch.dtype, size: int = PRODUCT_SIZE) -> float:
    """Floating-point operations a second in a product of two [size, size] matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(REPEATS):
        left @ right
    _wait_for(device)
    begin_s = time.perf_counter()
    for _ in range(REPEATS):
        left @ right
    _wait_for(device)
    return REPEATS * 2 * size**3 / (time.perf_counter() - begin_s)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
