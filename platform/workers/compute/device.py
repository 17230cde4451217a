"""The device that a replica computes on, and what of a model lies there. What a step is made of stays on the host."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.triton.products.float8_matrix import Float8Matrix, has_sizes
from penstock.workers.compute.triton.products.grouped import is_covered
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.matrices import GpuMatrix

CPU = torch.device("cpu")
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs convert float8."""
MOST_PINNED_BYTES = 2**24
"""Pinned memory is kept for further results: not for logits that a step brings now and then."""


def find_device(name: str, has_gpu: bool) -> torch.device:
    """The device that `engine.device` names. has_gpu: torch can use one. Raises ConfigError."""
    if name == "cuda" and not has_gpu:
        raise ConfigError(
            "engine.device: cuda needs a GPU that torch can use, and here torch finds none; set engine.device: cpu, or "
            "install torch for CUDA"
        )
    return torch.device(name)


def check_gpu_count(wanted: int, found: int) -> None:
    """Raises ConfigError where torch sees fewer GPUs than a replica shares its model among."""
    if wanted > found:
        raise ConfigError(
            f"engine.tensor_parallel_size: {wanted} takes {wanted} GPUs for each replica, and here torch sees {found}"
        )


def place_weights(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor | Float8Tensor]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | GpuMatrix]:
    """Parameters from the host or the GPU, each packed there as it is read; those in groups or sizes that the kernels
    don't cover are dequantized in `dtype`, that of the activations."""
    return {name: _place_weight(weight, dtype, device) for name, weight in weights}


def _place_weight(
    weight: Tensor | QuantizedTensor | Float8Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor | GpuMatrix:
    if isinstance(weight, Tensor):
        return weight.to(device)
    if isinstance(weight, Float8Tensor):
        return Float8Matrix(weight, device) if has_sizes(weight.q.shape) else weight.dequantize_in(dtype).to(device)
    return GroupedMatrix(weight, dtype, device) if is_covered(weight) else weight.dequantize_in(dtype).to(device)


def check_cache_type(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where the device does not read keys and values of this type."""
    if device.type == "cuda" and dtype == torch.float8_e4m3fn:
        check_float8(torch.cuda.get_device_capability(device))


def check_float8(capability: tuple[int, int]) -> None:
    if capability < FLOAT8_CAPABILITY:
        raise ConfigError(
            "engine.kv_dtype: fp8 needs a GPU of compute capability 8.9 or more, "
            f"and this one has {capability[0]}.{capability[1]}; set engine.kv_dtype: auto"
        )


def check_cache_fits(wanted_bytes: int, device: torch.device) -> None:
    """Raises ConfigError where the KV cache does not fit beside the weights that are on the device already. The host's
    memory is checked before replicas start."""
    if device.type == "cuda":
        check_room(wanted_bytes, torch.cuda.mem_get_info(device)[0])


def check_room(wanted_bytes: int, free_bytes: int) -> None:
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"the KV cache takes {wanted_bytes / 2**30:.1f} GiB (engine.kv_memory_bytes), "
            f"more than the {free_bytes / 2**30:.1f} GiB that are free on the GPU beside the weights"
        )


def bring(result: Tensor) -> Callable[[], Tensor]:
    """Begin to bring a step's result, which is not written to before the next step, to pinned memory of the host. What
    is returned waits for all of the step, also where the result is empty, and then gives the result: whoever takes the
    time of that call takes that of the device's work. Results above MOST_PINNED_BYTES are brought by that call."""
    if not result.is_cuda:
        return partial(Tensor.cpu, result.clone())  # the next step may write over it
    if result.nbytes > MOST_PINNED_BYTES:
        return partial(Tensor.cpu, result)
    pinned = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    pinned.copy_(result, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(result.device))
    return partial(_wait, done, pinned)


def _wait(done: torch.cuda.Event, result: Tensor) -> Tensor:
    done.synchronize()
    return result


def fetch(result: Tensor) -> Tensor:
    """`bring`, and wait."""
    return bring(result)()
