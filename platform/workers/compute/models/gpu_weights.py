"""A model's weights on a GPU: read straight to it, packed there, and kernels chosen for what is packed.

Memory that reading and choosing took is given back, so that what is free afterwards is free for the KV cache.
"""

import logging
from collections.abc import Mapping

import torch

from penstock.text.source import ModelSource
from penstock.workers.compute.device import place_weights
from penstock.workers.compute.measured import Timing, use_quickest
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import Matrix
from penstock.workers.compute.quantization_config import FloatQuantized
from penstock.workers.compute.readers.device_reader import DeviceReader
from penstock.workers.compute.triton.products.float8_matrix import can_multiply
from penstock.workers.compute.weights import TABLES, Head, Take, read_weights, read_with_float8, take_all

_log = logging.getLogger("penstock.runner")


def load_on_gpu(
    source: ModelSource,
    config: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    timing: Timing,
    take: Take = take_all,
) -> Mapping[str, Matrix]:
    """The weights by name, dense or packed, or the parts of them that `take` wants. Raises ConfigError."""
    begun_s = timing.now()
    is_float8 = config.quantization == FloatQuantized(rounds_activations=True) and dtype == torch.bfloat16
    with DeviceReader(device) as reader:
        found = (
            read_with_float8(source, config, dtype, head, reader, take)
            if is_float8 and can_multiply(device)
            else read_weights(source, config, dtype, head=head, reader=reader, take=take)
        )
        weights: dict[str, Matrix] = {**place_weights(found, dtype, device)}
        num_bytes = reader.num_bytes
    read_s = timing.now()
    with torch.inference_mode():
        weights.update(use_quickest(weights, TABLES, timing))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    seconds = {"read_s": round(read_s - begun_s, 3), "chosen_s": round(timing.now() - read_s, 3)}
    _log.info("weights are on the GPU", extra={"read_bytes": num_bytes, **seconds})
    return weights
