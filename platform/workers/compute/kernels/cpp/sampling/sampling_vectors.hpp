// Vectors, exponentials and noise of sampling_row.hpp, for a file that has defined PENSTOCK_LANES, doubles of a vector, and PENSTOCK_LEVEL, a namespace.

#pragma once

#include <stdint.h>
#include <string.h>

namespace penstock {
namespace PENSTOCK_LEVEL {

constexpr int N = PENSTOCK_LANES;
typedef float F __attribute__((vector_size(N * 4)));
typedef float UnalignedF __attribute__((vector_size(N * 4), aligned(4), may_alias));
typedef int32_t I32 __attribute__((vector_size(N * 4)));
typedef int32_t UnalignedI32 __attribute__((vector_size(N * 4), aligned(4), may_alias));
typedef double D __attribute__((vector_size(N * 8)));
typedef int64_t I64 __attribute__((vector_size(N * 8)));
typedef int64_t UnalignedI64 __attribute__((vector_size(N * 8), aligned(8), may_alias));
typedef uint64_t U64 __attribute__((vector_size(N * 8)));

#define PENSTOCK_ALWAYS inline __attribute__((always_inline))

PENSTOCK_ALWAYS F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
PENSTOCK_ALWAYS void store(float* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
PENSTOCK_ALWAYS D widen(F x) { return __builtin_convertvector(x, D); }

template <typename To, typename From>
PENSTOCK_ALWAYS To bit_cast(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    memcpy(&to, &from, sizeof to);
    return to;
}

template <typename Mask>
PENSTOCK_ALWAYS bool is_any(Mask mask) {
    int64_t found = 0;
    for (int i = 0; i < N; i++) found |= mask[i];
    return found != 0;
}

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// ---- truncation.weigh: exponentials as whole numbers

constexpr int FRACTION_BITS = 44;
constexpr double LEAST = -64.0, ROUNDER = 6755399441055744.0, WHOLE = 4503599627370496.0;  // 1.5 * 2**52 and 2**52: adding them rounds to an integer
constexpr double SERIES[] = {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0};

PENSTOCK_ALWAYS I64 weigh(D x) {
    x = x > D{} + LEAST ? x : D{} + LEAST;
    const D shifted = x * LOG2_E + ROUNDER;
    const D rest = x - (shifted - ROUNDER) * LN_2;
    D series = D{} + SERIES[0];
    for (int i = 1; i < 11; i++) series = series * rest + SERIES[i];
    // times 2**(n + FRACTION_BITS), n being the last bits of `shifted`
    const U64 bits = bit_cast<U64>(series) + ((bit_cast<U64>(shifted) + FRACTION_BITS) << 52);
    return bit_cast<I64>(bit_cast<D>(bits) + WHOLE) - bit_cast<I64>(D{} + WHOLE);
}

// ---- noise.gumbel

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

constexpr int LAST_SHIFT = 31;

// `mix` but for its last step, which leaves the upper LAST_SHIFT bits as they are.
template <typename Bits>
PENSTOCK_ALWAYS Bits begin_mix(Bits z) {
    z = (z ^ (z >> 30)) * MIX_1;
    return (z ^ (z >> 27)) * MIX_2;
}

template <typename Bits>
PENSTOCK_ALWAYS Bits end_mix(Bits z) {
    return z ^ (z >> LAST_SHIFT);
}

template <typename Bits>
PENSTOCK_ALWAYS Bits mix(Bits z) {
    return end_mix(begin_mix(z));
}

inline double logarithm(double x) {
    const int64_t bits = bit_cast<int64_t>(x);
    int64_t exponent = (bits >> 52) - 1023;
    double mantissa = bit_cast<double>((bits & ((1LL << 52) - 1)) | 1023LL << 52);
    if (mantissa > 1.4142135623730951) mantissa = 0.5 * mantissa, exponent++;
    const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
    double series = 1.0 / 21;
    for (int n = 19; n > 0; n -= 2) series = series * square + 1.0 / n;
    return static_cast<double>(exponent) * LN_2 + 2.0 * s * series;
}

inline double gumbel(uint64_t bits) {
    const double uniform = (static_cast<double>(static_cast<int64_t>(bits >> 12)) + 0.5) * 2.220446049250313e-16;
    return -logarithm(-logarithm(uniform));
}

// log2 of 1 - uniform, or less by 0.09 at the most. -log(uniform) is more than 1 - uniform: so noise in units of ln 2 is below minus this.
template <typename Doubles, typename Bits>
PENSTOCK_ALWAYS Doubles least_log2(Bits bits) {
    const Bits one_to_two = (~bits >> 12) | 1023ULL << 52;
    const Doubles left = bit_cast<Doubles>(one_to_two) - 1.0;
    // the upper half of its bits, read as a number, is a logarithm made of chords
    const Bits upper = (bit_cast<Bits>(left) >> 32) | 0x4330000000000000;
    return (bit_cast<Doubles>(upper) - WHOLE) * 0x1p-20 - 1023.0;
}

}  // namespace PENSTOCK_LEVEL
}  // namespace penstock
