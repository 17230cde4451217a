"""Activation-aware weight quantization (Lin et al., arXiv 2306.00978): which channels to scale before rounding, and how
far to clip. Pure.

All errors are those of a layer's output over calibration inputs, sum of |x (W' - W)^T|^2, computed by the inputs' Gram
matrix x^T x, so what is searched costs the same however much text it was made from.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.compute.quant.quantized import QuantizedTensor, lattice, quantize

ALPHAS = 20
"""Exponents tried between 0 (no scaling) and 1 (by the activations' full magnitude)."""
SAMPLED_ROWS = 128
"""Rows of a matrix by which exponents are compared: what a channel is worth differs little from row to row."""
SHRINKS = tuple(1 - step / 20 for step in range(10))
"""Shares of a group's range that are tried."""


def find_scales(weight: Tensor, magnitude: Tensor, gram: Tensor, group_size: int) -> Tensor:
    """Float32 [K] by which the columns of weight [N, K] are multiplied (and its inputs divided) so that rounding hurts
    least.

    magnitude: [K], mean of the inputs' absolute values. gram: [K, K] of the inputs.
    """
    weight = weight[:: max(1, -(-len(weight) // SAMPLED_ROWS))]
    best, least = torch.ones_like(magnitude), _error(weight, quantize(weight, group_size).dequantize(), gram)
    for step in range(1, ALPHAS):
        scales = magnitude.clamp(min=1e-4) ** (step / ALPHAS)
        scales /= (scales.max() * scales.min()).sqrt()
        error = _error(weight, quantize(weight * scales, group_size).dequantize() / scales, gram)
        if error < least:
            best, least = scales, error
    return best


def clip_groups(weight: Tensor, gram: Tensor, group_size: int) -> QuantizedTensor:
    """The matrix in 4 bits, each row's group clipped to the share of its range that hurts the output least."""
    rows, columns = weight.shape
    padding = -columns % group_size
    grouped = functional.pad(weight, (0, padding)).view(rows, -1, group_size)
    blocks = _diagonal_blocks(functional.pad(gram, (0, padding, 0, padding)), group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    best = torch.full(low.shape, torch.inf)
    share = torch.ones(low.shape)
    for shrink in SHRINKS:
        delta = _rounding(grouped, low * shrink, high * shrink).transpose(0, 1)
        error = (delta @ blocks).mul_(delta).sum(-1).t()
        is_better = error < best
        best, share = torch.where(is_better, error, best), torch.where(is_better, shrink, share)
    limited = torch.maximum(torch.minimum(grouped, (high * share)[..., None]), (low * share)[..., None])
    return quantize(limited.view(rows, -1)[:, :columns], group_size)


def _rounding(grouped: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[N, G, group_size]: what is added to the weights when they are clipped to [low, high] and rounded."""
    scale, zero = (values[..., None] for values in lattice(low, high))
    return (grouped / scale).round_().add_(zero).clamp_(0, 15).sub_(zero).mul_(scale).sub_(grouped)


def _error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    delta = rounded - weight
    return float(((delta @ gram) * delta).sum())


def _diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """[G, size, size]."""
    count = gram.shape[0] // size
    return torch.stack([gram[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
