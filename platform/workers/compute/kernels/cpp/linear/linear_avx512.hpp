// What the paths from AVX-512 on share: heads of groups, and weights as pairs of bfloat16.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "linear/packed.hpp"

#define PENSTOCK_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define PENSTOCK_AVX512_BF16 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")))
#define PENSTOCK_INLINE PENSTOCK_AVX512 inline __attribute__((always_inline))

namespace penstock {

constexpr int64_t AHEAD = 4096;     // bytes of a panel that are prefetched before they are needed
constexpr int64_t PAIR_BYTES = 64;  // 16 outputs, 2 columns
constexpr int64_t CHUNK_BYTES = CHUNK_K / 2 * PAIR_BYTES;

PENSTOCK_INLINE __mmask16 mask_of(int64_t count) { return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1); }

// Asks for a line of a panel. One that is read once goes past the caches behind the first: what else lies in them, the program of the step to come among it,
// stays. On a Zen 4 a step of one sequence with 4-bit weights took 6 to 8 % less.
PENSTOCK_INLINE void fetch(const uint8_t* line, bool is_read_once) {
    if (is_read_once)
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_NTA);
    else
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
}

// Of a group's 16 outputs, in the matrix's unit; offset for q as it is stored.
struct Scales {
    __m512 scale, offset;
};

template <int32_t KIND>
PENSTOCK_INLINE Scales load_head(const Matrix& matrix, const uint8_t* group) {
    Scales head;
    if (KIND == INT8) {
        head.scale = _mm512_load_ps(reinterpret_cast<const float*>(group));
        head.offset = _mm512_mul_ps(head.scale, _mm512_set1_ps(-INT8_ZERO));
        return head;
    }
    head.scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(group)));
    head.offset = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(group + 32)));
    if (matrix.has_zero) head.offset = _mm512_mul_ps(head.offset, _mm512_sub_ps(_mm512_setzero_ps(), head.scale));
    return head;
}

// Columns [begin, begin + CHUNK_K) of a panel, as far as there are any, [pair][16][2] of bfloat16: in `buffer`, or where they lie.
const uint8_t* pairs_of(const Matrix& matrix, int64_t panel, int64_t begin, uint8_t* buffer);

}  // namespace penstock
#endif
