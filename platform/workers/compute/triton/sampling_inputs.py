"""What a GPU needs to know to choose tokens as `penstock.workers.compute.sampling` does. Tensors, no kernels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.noise import stream_start
from penstock.workers.compute.truncation import MOST_TOKENS, least_of_min_p

MOST_KEPT = 256
"""Largest top_k of which a GPU chooses; above it the host does, which sorts all tokens."""
MIN_TEMPERATURE = 1e-5
"""Dividing by less leaves the range of float32, and would choose the same token."""
_SIGN = 1 << 63


class SamplingInputs(NamedTuple):
    """What a GPU is given to choose the tokens of R rows."""

    streams: Tensor
    """int64 [R]: where the noise of the position begins, the bits of a uint64."""
    temperatures: Tensor
    """float32 [R]; 0: the largest logit, without noise."""
    least_scaled: Tensor
    """float32 [R]: least logit that min_p leaves, relative to the best and divided by the temperature."""
    top_k: Tensor
    """int64 [R]; 0: all."""
    most_kept: int
    """The largest top_k."""
    top_p: Tensor
    """float64 [N] of the rows with a top_p below 1."""
    nucleus_rows: Tensor
    """int64 [N]: which rows these are, ascending."""

    def on(self, device: torch.device) -> "SamplingInputs":
        streams, temperatures, least_scaled, top_k, most_kept, top_p, nucleus_rows = self
        return SamplingInputs(
            streams.to(device), temperatures.to(device), least_scaled.to(device), top_k.to(device), most_kept,
            top_p.to(device), nucleus_rows.to(device),
        )  # fmt: skip


def can_sample(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the GPU chooses by these parameters."""
    return params.temperature == 0 or (
        (params.top_k <= MOST_KEPT or params.top_k >= vocab_size) and (params.top_p >= 1 or vocab_size < MOST_TOKENS)
    )


def make_sampling_inputs(params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int) -> SamplingInputs:
    """The inputs of as many rows as there are `params`. positions: where the chosen tokens will stand."""
    streams = [_to_signed(stream_start(own.seed, position)) for own, position in zip(params, positions, strict=True)]
    nuclei = [row for row, own in enumerate(params) if own.top_p < 1 and own.temperature > 0]
    kept = [own.top_k if 0 < own.top_k < vocab_size and own.temperature > 0 else 0 for own in params]
    return SamplingInputs(
        torch.tensor(streams, dtype=torch.int64),
        torch.tensor(
            [max(own.temperature, MIN_TEMPERATURE) if own.temperature > 0 else 0.0 for own in params],
            dtype=torch.float32,
        ),
        torch.tensor(
            [least_of_min_p(own.min_p) if own.temperature > 0 else -math.inf for own in params], dtype=torch.float32
        ),
        torch.tensor(kept, dtype=torch.int64),
        max(kept, default=0),
        torch.tensor([params[row].top_p for row in nuclei], dtype=torch.float64),
        torch.tensor(nuclei, dtype=torch.int64),
    )


def _to_signed(bits: int) -> int:
    return (bits ^ _SIGN) - _SIGN
