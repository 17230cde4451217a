// Vectors of floats as wide as the build's CPU has them, by the compilers' vector extensions; and rows of numbers in the formats they are stored in.
// Needs nothing of C++'s run-time library, not even its headers.

#pragma once

#include <stdint.h>
#include <string.h>

#include "base/numbers.hpp"

namespace penstock {

#if defined(__AVX512F__)
constexpr int W = 16;  // float lanes of a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef float UnalignedVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
inline Vec splat(float x) { return Vec{} + x; }

// 0 .. W - 1 as template arguments, by the compilers' own builtins
template <typename T, T... I>
struct Integers {};
template <int N>
struct Counting {
#if defined(__clang__)
    using Type = __make_integer_seq<Integers, int, N>;
#else
    using Type = Integers<int, __integer_pack(N)...>;
#endif
};
using Lanes = Counting<W>::Type;

template <int... I>
inline IVec make_lanes(Integers<int, I...>) {
    return IVec{I...};
}

// 2**x, relative error below 2e-7, for -126 <= x <= 127. Cody-Waite: 2**x = 2**n * 2**f, |f| <= 1/2, series of exp(f ln 2).
inline Vec exp2_between(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to the nearest integer
    const Vec shifted = x + magic;
    const Vec f = x - (shifted - magic);
    Vec p = splat(1.5403530393381608e-4f);
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910071e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    IVec bits, power;
    memcpy(&power, &shifted, sizeof power);
    memcpy(&bits, &p, sizeof bits);
    bits += power << 23;  // the low 9 bits of `shifted` are n modulo 512, the others are shifted out
    Vec result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// The same for x <= 0; at least 2**-126.
inline Vec exp2_nonpositive(Vec x) { return exp2_between(x < splat(-126.0f) ? splat(-126.0f) : x); }

inline float largest(Vec x) {
    float best = x[0];
    for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Lanes in quarters, quarters in pairs: a fixed order, in which no addition waits for more than log2 W others.
inline float total(Vec x) {
    typedef float Quad __attribute__((vector_size(16)));
    constexpr int QUADS = W / 4;
    Quad quads[QUADS];
    memcpy(quads, &x, sizeof x);
    for (int n = QUADS / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) quads[i] += quads[i + n];
    return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

// ---- formats

// SCALED_INT8: with a float scale for so many of them, in an array of its own. TILED: in an order of its own (attention.hpp).
enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, SCALED_INT8 = 2, TILED_BFLOAT16 = 3, TILED_INT8 = 4 };

// Floats and bfloat16; offset and count are elements.
inline void read(float* to, const void* from, DType dtype, int64_t offset, int64_t count) {
    if (dtype == FLOAT32) {
        memcpy(to, static_cast<const float*>(from) + offset, sizeof(float) * count);
    } else {
        const uint16_t* half = static_cast<const uint16_t*>(from) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(half[i]);
    }
}

inline void write(void* to, DType dtype, int64_t offset, const float* from, int64_t count) {
    if (dtype == FLOAT32) {
        memcpy(static_cast<float*>(to) + offset, from, sizeof(float) * count);
    } else {
        uint16_t* half = static_cast<uint16_t*>(to) + offset;
        for (int64_t i = 0; i < count; i++) half[i] = to_bf16(from[i]);
    }
}

}  // namespace penstock
