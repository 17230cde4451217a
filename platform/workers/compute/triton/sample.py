"""Choosing tokens on a GPU: the best of log p + noise in each row, with the very noise of
`penstock.workers.compute.noise`, bit for bit.

So a seed gives the token that the host would choose from the same logits. The noise is integers of 64 bits and float64
additions, multiplications and divisions, none of which may be fused; scores are float32 logits relative to the best and
by the temperature, then float64, as the host has them. A program takes a tile of a row; of equal scores the lowest id
wins, in a tile and among tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.sampling_inputs import SamplingInputs

TILE_TOKENS = 1024
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_MANTISSA = tl.constexpr((1 << 52) - 1)
_ONE = tl.constexpr(1023 << 52)
_SQRT2 = tl.constexpr(2.0**0.5)
_LN2 = tl.constexpr(0.6931471805599453)
_TERMS = tl.constexpr(11)


@triton.jit
def _logarithm(x):
    """`noise._log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE).to(tl.float64, bitcast=True)
    is_upper = mantissa > _SQRT2
    mantissa = tl.where(is_upper, 0.5 * mantissa, mantissa)
    exponent += is_upper.to(tl.int64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    one = tl.full(s.shape, 1.0, tl.float64)
    series = one / (2.0 * _TERMS - 1.0)
    for index in tl.static_range(1, _TERMS):
        series = series * square + one / (2.0 * (_TERMS - index) - 1.0)
    return exponent.to(tl.float64) * _LN2 + 2.0 * s * series


@triton.jit
def _noise(stream, ids):
    """`noise.gumbel`; stream: uint64, where the position's begins."""
    z = ids.to(tl.uint64) * _GAMMA + stream
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -_logarithm(-_logarithm(uniform))


@triton.jit
def _best_of_tile(
    logits, tops, least, streams, temperatures, least_scaled, scores, chosen, vocab_size, num_tiles, lanes: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * lanes + tl.arange(0, lanes)
    is_real = ids < vocab_size
    raw = tl.load(logits + row * vocab_size + ids, mask=is_real, other=float("-inf"))
    wanted = tl.load(temperatures + row)
    temperature = tl.where(wanted > 0, wanted, 1.0)
    top = tl.load(tops + row)
    scaled = tl.div_rn(raw - top, tl.zeros_like(raw) + temperature)
    floor = tl.div_rn(tl.load(least + row) - top, temperature)
    noise = _noise(tl.load(streams + row).to(tl.uint64, bitcast=True), ids)
    score = scaled.to(tl.float64) + tl.where(wanted > 0, noise, 0.0)
    is_kept = is_real & (scaled >= floor) & (scaled.to(tl.float64) >= tl.load(least_scaled + row))
    score = tl.where(is_kept, score, float("-inf"))
    most = tl.max(score, 0)
    tl.store(scores + row * num_tiles + tile, most)
    tl.store(chosen + row * num_tiles + tile, tl.min(tl.where(is_kept & (score == most), ids, vocab_size), 0))


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """float64 [2, R]: the ids that the host would draw from logits [R, vocab_size], and the largest logit of each row,
    which is no number where there is nothing to draw from. Waits for nothing."""
    num_rows, vocab_size = logits.shape
    best = logits.amax(dim=1)
    tops = best.where(best.isfinite(), 0.0)
    least = torch.full_like(best, -torch.inf)
    if inputs.most_kept:
        kept = logits.topk(min(inputs.most_kept, vocab_size), dim=1).values
        places = inputs.top_k.clamp(1, kept.shape[1])[:, None] - 1
        least = torch.where(inputs.top_k > 0, kept.gather(1, places)[:, 0], least)
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(num_rows, num_tiles)](
        logits, tops, least, inputs.streams, inputs.temperatures, inputs.least_scaled, scores, chosen, vocab_size,
        num_tiles, lanes=TILE_TOKENS, enable_fp_fusion=False,
    )  # fmt: skip
    ids = chosen.gather(1, scores.max(dim=1).indices[:, None])[:, 0]
    return torch.stack((ids.double(), best.double()))
