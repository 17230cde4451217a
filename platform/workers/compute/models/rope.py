"""Rotary position embedding (Su et al. 2021): the frequencies of a model, and their cosines and sines by position."""

import math

import torch
from torch import Tensor

from penstock.workers.compute.model_config import Llama3Scaling, ModelConfig


def rope_tables(inverse: Tensor, max_model_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, float32 [max_model_len, 1, head_dim]; the sine's first half is negative, so
    `operators.rotate` need not negate."""
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def inverse_frequencies(config: ModelConfig, factors: Tensor | None) -> Tensor:
    """float32 [head_dim / 2]. factors: divisors out of the checkpoint."""
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    if factors is not None:
        return inverse / factors
    return inverse if config.rope_scaling is None else _scale_as_llama3(inverse, config.rope_scaling)


def _scale_as_llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's stretch (`apply_scaling` in Meta's llama_models): long waves by `factor`, short ones not at all,
    between them a blend."""
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / inverse
    share = (context / waves - low) / (high - low)
    blended = (1 - share) * inverse / scaling.factor + share * inverse
    stretched = torch.where(waves > context / low, inverse / scaling.factor, inverse)
    is_between = (waves <= context / low) & (waves >= context / high)
    return torch.where(is_between, blended, stretched)
