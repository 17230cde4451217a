"""Perplexity of a model over text, through the engine's own layers: exp of the mean negative log likelihood of every
token but a window's first."""

import math

import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.models.fused import Model, make_cache
from penstock.workers.compute.models.model_step import ModelStep

BLOCK_SIZE = 16


def perplexity(model: Model, dtype: torch.dtype, token_ids: Tensor, window: int, step: int | None = None) -> float:
    """dtype: of keys and values. token_ids: int64 [T]; cut into windows, each read from an empty context. A rest
    shorter than two tokens is left out.

    step: tokens computed at a time, which may choose other kernels; None: a whole window.
    """
    cache = make_cache(model, -(-window // BLOCK_SIZE), BLOCK_SIZE, dtype)
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(token_ids) - 1, window):
            ids = token_ids[start : start + window]
            if len(ids) < 2:
                break
            for first in range(0, len(ids) - 1, step or window):
                last = min(len(ids) - 1, first + (step or window))
                places, rows = torch.arange(first, last), torch.arange(last - first)
                scores = model.logits(ModelStep(ids[first:last], places, _batch(first, last), rows), cache)
                total -= scores.log_softmax(-1).gather(1, ids[first + 1 : last + 1, None]).double().sum().item()
            count += len(ids) - 1
    return math.exp(total / count)


def _batch(first: int, last: int) -> AttentionBatch:
    """Places [first, last) of one sequence, in blocks from the first on."""
    blocks = torch.arange(-(-last // BLOCK_SIZE), dtype=torch.int32)
    lengths = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
    return AttentionBatch(*lengths, blocks[None], torch.arange(first, last))
