"""Choosing tokens on a GPU: the best of log p + noise in each row, with the very noise of
`penstock.workers.compute.noise` and the weights of `penstock.workers.compute.truncation`, bit for bit.

So a seed gives the token that the host would choose from the same logits. Noise and weights are integers of 64 bits and
float64 additions, multiplications and divisions, none of which may be fused; scores are float32 logits relative to the
best and by the temperature, then float64, as the host has them. A program takes a tile of a row; of equal scores the
lowest id wins, in a tile and among tiles. Where top_p ends is found by sorting, ROWS_AT_ONCE rows at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.sampling_inputs import SamplingInputs
from penstock.workers.compute.truncation import FRACTION_BITS, LEAST_SCORE

TILE_TOKENS = 1024
ROWS_AT_ONCE = 8
"""Rows that are sorted together: they take 40 bytes a token meanwhile."""
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_MANTISSA = tl.constexpr((1 << 52) - 1)
_ONE = tl.constexpr(1023 << 52)
_SQRT2 = tl.constexpr(2.0**0.5)
_LN2 = tl.constexpr(0.6931471805599453)
_TERMS = tl.constexpr(11)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_SCORE = tl.constexpr(LEAST_SCORE)
_FRACTION_BITS = tl.constexpr(FRACTION_BITS)
_ROUNDER = tl.constexpr(1.5 * 2.0**52)
_WHOLE = tl.constexpr(2.0**52)
_WHOLE_BITS = tl.constexpr(0x4330000000000000)
_POWERS = tl.constexpr(10)


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
def _exponential(x):
    """`truncation.weigh`, float64 to int64."""
    x = tl.maximum(x, _LEAST_SCORE)
    shifted = x * _LOG2_E + _ROUNDER
    rest = x - (shifted - _ROUNDER) * _LN2
    one = tl.full(x.shape, 1.0, tl.float64)
    factorial = one
    for index in tl.static_range(2, _POWERS + 1):
        factorial = factorial * index
    series = one / factorial
    for index in tl.static_range(0, _POWERS):
        factorial = factorial / (_POWERS - index)
        series = series * rest + one / factorial
    power = (shifted.to(tl.int64, bitcast=True) + _FRACTION_BITS) << 52
    scaled = (series.to(tl.int64, bitcast=True) + power).to(tl.float64, bitcast=True)
    return (scaled + _WHOLE).to(tl.int64, bitcast=True) - _WHOLE_BITS


@triton.jit
def _weigh_tile(logits, rows, tops, least, temperatures, scaled, weights, vocab_size, lanes: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    ids = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = ids < vocab_size
    raw = tl.load(logits + row * vocab_size + ids, mask=is_real, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    top = tl.load(tops + row)
    score = tl.div_rn(raw - top, tl.zeros_like(raw) + temperature)
    is_kept = score >= tl.div_rn(tl.load(least + row) - top, temperature)
    tl.store(scaled + place * vocab_size + ids, tl.where(score == 0, 0.0, score), mask=is_real)  # no -0, to be sorted
    weight = tl.where(is_kept, _exponential(score.to(tl.float64)), 0)
    tl.store(weights + place * vocab_size + ids, weight, mask=is_real)


@triton.jit
def _best_of_tile(
    logits, tops, least, streams, temperatures, least_scaled, last_ids, scores, chosen, vocab_size, num_tiles,
    lanes: tl.constexpr,
):  # fmt: skip
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
    cut = tl.load(least_scaled + row)
    is_kept = is_real & (scaled >= floor) & ((scaled > cut) | ((scaled == cut) & (ids <= tl.load(last_ids + row))))
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
    cuts, last_ids = inputs.least_scaled, torch.full_like(inputs.streams, vocab_size)
    for first in range(0, len(inputs.nucleus_rows), ROWS_AT_ONCE):
        rows = inputs.nucleus_rows[first : first + ROWS_AT_ONCE]
        ends, ids = _nucleus_ends(logits, rows, inputs.top_p[first : first + ROWS_AT_ONCE], tops, least, inputs)
        is_lower = ends >= cuts[rows]
        cuts = cuts.index_copy(0, rows, ends.maximum(cuts[rows]))
        last_ids[rows] = ids.where(is_lower, vocab_size)
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(num_rows, num_tiles)](
        logits, tops, least, inputs.streams, inputs.temperatures, cuts, last_ids, scores, chosen, vocab_size,
        num_tiles, lanes=TILE_TOKENS, enable_fp_fusion=False,
    )  # fmt: skip
    ids = chosen.gather(1, scores.max(dim=1).indices[:, None])[:, 0]
    return torch.stack((ids.double(), best.double()))


def _nucleus_ends(
    logits: Tensor, rows: Tensor, top_p: Tensor, tops: Tensor, least: Tensor, inputs: SamplingInputs
) -> tuple[Tensor, Tensor]:
    """The last token that top_p leaves in each of the `rows`: its scaled score, float32 [N], and its id, int64 [N]."""
    vocab_size = logits.shape[1]
    scaled = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    weights = torch.empty(len(rows), vocab_size, dtype=torch.int64, device=logits.device)
    _weigh_tile[(len(rows), triton.cdiv(vocab_size, TILE_TOKENS))](
        logits, rows, tops, least, inputs.temperatures, scaled, weights, vocab_size, lanes=TILE_TOKENS,
        enable_fp_fusion=False,
    )  # fmt: skip
    scores, ids = scaled.sort(dim=1, descending=True, stable=True)
    sums = weights.gather(1, ids).cumsum(1)
    total = sums[:, -1]
    wanted = (total.double() * top_p).ceil().long().minimum(total).clamp(min=1)
    place = (sums < wanted[:, None]).sum(1, keepdim=True).clamp(max=vocab_size - 1)
    return scores.gather(1, place)[:, 0], ids.gather(1, place)[:, 0]
