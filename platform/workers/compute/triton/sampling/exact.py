"""Noise, weights and scaled scores of a GPU's rows: the very numbers of `penstock.workers.compute.noise` and
`penstock.workers.compute.truncation`, bit for bit. Functions for kernels to call; no kernel.

Noise and weights are integers of 64 bits and float64 additions, multiplications and divisions, none of which may be
fused: whatever calls these functions is launched with enable_fp_fusion=False. Scores are float32 logits relative to the
best and divided by the temperature, as the host has them.
"""

import triton
import triton.language as tl

from penstock.workers.compute.triton.sampling.sampling_inputs import EVERY_KEY
from penstock.workers.compute.truncation import FRACTION_BITS, LEAST_SCORE

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
_EVERY_KEY = tl.constexpr(EVERY_KEY)


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
def gumbel(stream, ids):
    """`noise.gumbel`; stream: uint64, where the position's begins."""
    z = ids.to(tl.uint64) * _GAMMA + stream
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -_logarithm(-_logarithm(uniform))


@triton.jit
def weigh(x):
    """`truncation.weigh`, float64 to int64."""
    x = tl.minimum(tl.maximum(x, _LEAST_SCORE), 0.0)  # above 0 is no number of a row that is chosen from
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
def scaled_scores(logits, changed, sources, tops, temperatures, row, ids, vocab_size):
    """float32: a row's logits, from where they are, relative to the best and by the temperature; -inf behind the
    vocabulary. row: int64."""
    source = tl.load(sources + row).to(tl.int64)
    is_real = ids < vocab_size
    own = tl.load(changed + source * vocab_size + ids, mask=is_real & (source >= 0), other=float("-inf"))
    raw = tl.load(logits + row * vocab_size + ids, mask=is_real & (source < 0), other=float("-inf"))
    score = tl.where(source < 0, raw, own) - tl.load(tops + row)
    wanted = tl.load(temperatures + row)
    return tl.div_rn(score, tl.zeros_like(score) + tl.where(wanted > 0, wanted, 1.0))


@triton.jit
def key_of(scaled):
    """int32 that grows as the score, which is at most 0, falls; equal ones of equal scores."""
    return scaled.to(tl.int32, bitcast=True) & _EVERY_KEY
