"""Perplexity of a model over text, through the engine's own layers: exp of the mean negative log likelihood of every token but a window's first."""

import math

import torch
from torch import Tensor

from penstock.workers.attention import AttentionBatch
from penstock.workers.models.fused import Model, make_cache

BLOCK_SIZE = 16


def perplexity(model: Model, dtype: torch.dtype, token_ids: Tensor, window: int) -> float:
    """dtype: of keys and values. token_ids: int64 [T]; cut into windows, each read from an empty context. A rest shorter than two tokens is left out."""
    cache = make_cache(model, -(-window // BLOCK_SIZE), BLOCK_SIZE, dtype)
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(token_ids) - 1, window):
            ids = token_ids[start : start + window]
            if len(ids) < 2:
                break
            scores = model.logits(ids, torch.arange(len(ids)), cache, _batch(len(ids)), torch.arange(len(ids) - 1))
            total -= scores.log_softmax(-1).gather(1, ids[1:, None]).double().sum().item()
            count += len(ids) - 1
    return math.exp(total / count)


def _batch(length: int) -> AttentionBatch:
    """One sequence, in blocks from the first on."""
    blocks = torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32)
    return AttentionBatch(torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), blocks[None], torch.arange(length))
