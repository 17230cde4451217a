// What AVX2's paths share. Half a panel, 8 outputs, is a vector.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "linear/packed.hpp"

#define PENSTOCK_AVX2 __attribute__((target("avx2,fma,f16c")))
#define PENSTOCK_AVX2_INLINE PENSTOCK_AVX2 inline __attribute__((always_inline))

namespace penstock {

// Of half a group's outputs, in the matrix's unit; offset for q as it is stored.
struct HalfScales {
    __m256 scale, offset;
};

PENSTOCK_AVX2_INLINE HalfScales load_half_head(const Matrix& matrix, const uint8_t* group, int half) {
    HalfScales head;
    if (matrix.kind == INT8) {
        head.scale = _mm256_load_ps(reinterpret_cast<const float*>(group) + 8 * half);
        head.offset = _mm256_mul_ps(head.scale, _mm256_set1_ps(-INT8_ZERO));
        return head;
    }
    head.scale = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(group + 16 * half)));
    head.offset = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(group + 32 + 16 * half)));
    if (matrix.has_zero) head.offset = _mm256_mul_ps(head.offset, _mm256_sub_ps(_mm256_setzero_ps(), head.scale));
    return head;
}

// Those outputs of half a panel that exist, of a row of outputs.
PENSTOCK_AVX2_INLINE void store_half(const Matrix& matrix, int64_t panel, int half, float* out_row, __m256 values) {
    float* to = out_row + panel * TILE_N + 8 * half;
    const int64_t lanes = smaller(8, lanes_of(matrix, panel) - 8 * half);
    if (lanes == 8) {
        _mm256_storeu_ps(to, values);
        return;
    }
    alignas(32) float result[8];
    _mm256_store_ps(result, values);
    if (lanes > 0) memcpy(to, result, sizeof(float) * static_cast<size_t>(lanes));
}

}  // namespace penstock
#endif
