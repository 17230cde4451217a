"""Counter-based Gumbel noise: G(seed, position, token), the same on every machine, in any order, for any subset of
tokens.

The bits are SplitMix64's (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): a generator
whose n-th output is mix(start + n * GAMMA), hence random access. A sequence's seed and a position start a stream; the
token id is n. The upper 52 bits become a uniform u strictly between 0 and 1 without rounding, and G = -log(-log(u))
(Gumbel-max trick: argmax(log p + G) is a draw from p).

Invariant: the noise of a token depends on (seed, position, token) alone. Logarithms of math libraries differ in the
last bit from machine to machine; `_log` uses only IEEE additions, multiplications and divisions, which do not.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_UNIFORM_BITS = 52  # one bit below float64's precision: (k + 0.5) * 2**-52 is exact, and neither 0 nor 1

_LN2 = math.log(2.0)  # correctly rounded: 0x1.62e42fefa39efp-1
_SERIES = [1.0 / n for n in range(21, 0, -2)]  # atanh(s) = s + s**3/3 + ...; |s| < 0.172, so the 11 terms reach 1e-17
_MANTISSA, _ONE, _SQRT2 = (1 << 52) - 1, 1023 << 52, math.sqrt(2.0)

_NEAR = 1e-9
"""Far above the error of any math library's logarithm, far below the distance of unequal scores that matter."""


def gumbel(seed: int, position: int, token_ids: Ids) -> Floats:
    """G(seed, position, token) for each token id. 0 <= seed < 2**64, position and ids >= 0."""
    return _noise(stream_start(seed, position), token_ids)


def noisy_argmax(scores: Floats, stream: int, token_ids: Ids) -> int:
    """The token id for which score + G is largest; the lowest such id. `token_ids` ascending, scores finite or -inf.
    stream: of a position, by `stream_start`.

    The library's fast logarithm finds the near-best, of which the exact noise picks the best: the same answer at a
    third of the price.
    """
    approximate = scores - np.log(-np.log(_uniform(stream, token_ids)))
    near = np.flatnonzero(approximate >= approximate.max() - _NEAR)
    if len(near) == 1:
        return int(token_ids[near[0]])
    best = int(np.argmax(scores[near] + _noise(stream, token_ids[near])))
    return int(token_ids[near[best]])


def _noise(stream: int, token_ids: Ids) -> Floats:
    return -_log(-_log(_uniform(stream, token_ids)))


def _uniform(stream: int, token_ids: Ids) -> Floats:
    counters = token_ids.astype(np.uint64)
    counters *= np.uint64(_GAMMA)
    counters += np.uint64(stream)
    uniform = (_mix(counters) >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-_UNIFORM_BITS
    return uniform


def stream_start(seed: int, position: int) -> int:
    """Start of the stream of a position: the position-th output of the generator started by the mixed seed."""
    return stream_behind(mix_seed(seed), position)


def mix_seed(seed: int) -> int:
    """What the streams of a sequence have in common: `stream_behind` gives those of its positions."""
    return _mix_int((seed + _GAMMA) & _MASK)


def stream_behind(mixed_seed: int, position: int) -> int:
    return _mix_int((mixed_seed + (position + 1) * _GAMMA) & _MASK)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, a bijection of 64-bit integers."""
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def logarithm(x: float) -> float:
    """The logarithm that noise is made of, of one positive, normal number: the same operations as `_log`."""
    mantissa, exponent = math.frexp(x)
    mantissa, exponent = 2.0 * mantissa, exponent - 1
    if mantissa > _SQRT2:
        mantissa, exponent = 0.5 * mantissa, exponent + 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = _SERIES[0]
    for coefficient in _SERIES[1:]:
        series = series * square + coefficient
    return exponent * _LN2 + 2.0 * s * series


def _log(x: Floats) -> Floats:
    """Natural logarithm of positive, normal numbers, within 3 units in the last place, bit-identical everywhere."""
    bits = x.view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE).view(np.float64)
    is_upper = mantissa > _SQRT2
    mantissa = np.where(is_upper, 0.5 * mantissa, mantissa)
    exponent = exponent + is_upper
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = series * square + coefficient
    return exponent.astype(np.float64) * _LN2 + 2.0 * s * series
