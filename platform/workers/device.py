"""The device that a replica computes on, and what of a model lies there. Sampling, and what a step is made of, stay on the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.wire.errors import ConfigError
from penstock.workers.quant.int4 import Matrix

CPU = torch.device("cpu")


def find_device(name: str, has_gpu: bool) -> torch.device:
    """Of `engine.device`. has_gpu: torch can use one. Raises ConfigError."""
    if name == "cuda" and not has_gpu:
        raise ConfigError("engine.device: cuda needs a GPU that torch can use, and here torch finds none; set engine.device: cpu, or install torch for CUDA")
    return torch.device(name)


def placed(weights: Mapping[str, Matrix], device: torch.device) -> dict[str, Matrix]:
    """Weights from the host on a device. Raises ConfigError where they can't be."""
    return {name: _placed(weight, device) for name, weight in weights.items()}


def _placed(weight: Matrix, device: torch.device) -> Matrix:
    if isinstance(weight, Tensor):
        return weight.to(device)
    if device.type != "cpu":
        raise ConfigError(
            "this checkpoint is quantized to int4, which is computed on the cpu only; set engine.device: cpu, or name the checkpoint it was made of"
        )
    return weight


def check_cache_fits(wanted_bytes: int, device: torch.device) -> None:
    """Whether the KV cache fits beside the weights that are on the device already. Raises ConfigError. The host is checked before replicas start."""
    if device.type == "cuda":
        check_room(wanted_bytes, torch.cuda.mem_get_info(device)[0])


def check_room(wanted_bytes: int, free_bytes: int) -> None:
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"the KV cache takes {wanted_bytes / 2**30:.1f} GiB (engine.kv_memory_bytes), "
            f"more than the {free_bytes / 2**30:.1f} GiB that are free on the GPU beside the weights"
        )


def fetched(result: Tensor) -> Tensor:
    """A step's result on the host, when all of the step is done: whoever times it times the device's work, and a step without a result too."""
    on_host = result.cpu()
    torch.cuda.synchronize(result.device)
    return on_host
