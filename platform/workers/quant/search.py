"""Activation-aware weight quantization (Lin et al., arXiv 2306.00978): which channels to scale before rounding, and how far to clip. Pure.

All errors are those of a layer's output over calibration inputs, sum of |x (W' - W)^T|^2, computed by the inputs' Gram matrix x^T x, so what is
searched costs the same however much text it was made from.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.quant.int4 import Groups, quantize

ALPHAS = 20
"""Exponents tried between 0 (no scaling) and 1 (by the activations' full magnitude)."""
SAMPLED_ROWS = 512
"""Rows of a matrix by which exponents are compared: what a channel is worth differs little from row to row."""
SHRINKS = tuple(1 - step / 20 for step in range(10))
"""Shares of a group's range that are tried."""


def scales_for(weight: Tensor, magnitude: Tensor, gram: Tensor, group_size: int) -> Tensor:
    """Float32 [K] by which the columns of weight [N, K] are multiplied (and its inputs divided) so that rounding hurts least.

    magnitude: [K], mean of the inputs' absolute values. gram: [K, K] of the inputs.
    """
    weight = weight[:: max(1, len(weight) // SAMPLED_ROWS)]
    best, least = torch.ones_like(magnitude), _error(weight, quantize(weight, group_size).dequantized(), gram)
    for step in range(1, ALPHAS):
        scales = magnitude.clamp(min=1e-4) ** (step / ALPHAS)
        scales /= (scales.max() * scales.min()).sqrt()
        error = _error(weight, quantize(weight * scales, group_size).dequantized() / scales, gram)
        if error < least:
            best, least = scales, error
    return best


def clipped(weight: Tensor, gram: Tensor, group_size: int) -> Groups:
    """The matrix in 4 bits, each row's group clipped to the share of its range that hurts the output least."""
    rows, columns = weight.shape
    padding = -columns % group_size
    grouped = functional.pad(weight, (0, padding)).view(rows, -1, group_size)
    blocks = _diagonal_blocks(functional.pad(gram, (0, padding, 0, padding)), group_size)
    best = torch.full(grouped.shape[:2], torch.inf)
    share = torch.ones(grouped.shape[:2])
    for shrink in SHRINKS:
        low, high = grouped.amin(-1, keepdim=True) * shrink, grouped.amax(-1, keepdim=True) * shrink
        rounded = quantize(torch.maximum(torch.minimum(grouped, high), low).view(rows, -1), group_size).dequantized().view(grouped.shape)
        delta = (rounded - grouped).transpose(0, 1)
        error = ((delta @ blocks) * delta).sum(-1).t()
        is_better = error < best
        best, share = torch.where(is_better, error, best), torch.where(is_better, shrink, share)
    low, high = grouped.amin(-1, keepdim=True) * share[..., None], grouped.amax(-1, keepdim=True) * share[..., None]
    return quantize(torch.maximum(torch.minimum(grouped, high), low).view(rows, -1)[:, :columns], group_size)


def _error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    delta = rounded - weight
    return float(((delta @ gram) * delta).sum())


def _diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """[G, size, size]."""
    count = gram.shape[0] // size
    return torch.stack([gram[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
