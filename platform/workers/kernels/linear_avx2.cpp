// Products of bytes by AVX2; dense ones are the portable path's, which the compiler vectorizes.

#include "packed.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace penstock {
namespace {

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2_TARGET inline __attribute__((always_inline))

INLINE __m256i four(const int8_t* q) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }
INLINE __m256i widened(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }

// A block of 32 columns with R rows; each of dot[r] is a half of the panel's outputs. Sums of 8 products of 4 and 8 bits fit 16 bits.
template <int R>
INLINE void dot_int4(const uint8_t* block, const int8_t* q, int64_t q_stride, int half, __m256i (&dot)[R]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * half));
        const __m256i low = _mm256_and_si256(weights, mask), high = _mm256_and_si256(_mm256_srli_epi16(weights, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i sum = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(low, four(q + r * q_stride + 8 * j)));
            sums[r] = _mm256_add_epi16(sum, _mm256_maddubs_epi16(high, four(q + r * q_stride + 8 * j + 4)));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) dot[r] = _mm256_add_epi32(dot[r], widened(sums[r]));
}

// Signed bytes: the weight's sign goes to the activation, so that sums of 2 products fit 16 bits.
template <int R>
INLINE void dot_int8(const uint8_t* block, const int8_t* q, int64_t q_stride, int half, __m256i (&dot)[R]) {
    const __m256i zero = _mm256_set1_epi8(static_cast<char>(INT8_ZERO));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i weights = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * half)), zero);
        const __m256i size = _mm256_abs_epi8(weights);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) dot[r] = _mm256_add_epi32(dot[r], widened(_mm256_maddubs_epi16(size, _mm256_sign_epi8(four(q + r * q_stride + 4 * j), weights))));
    }
}

// R rows from `row` on with half a panel.
template <int R>
AVX2_TARGET void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int half, int64_t row, float* out, int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int8_t* q = inputs.q + row * inputs.k_padded;
    __m256 total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
    for (int64_t group = 0; group < inputs.num_groups; group++) {
        Head head;
        read_head(matrix, data, head);
        data += HEAD_BYTES;
        const __m256 scale = _mm256_load_ps(head.scale + 8 * half);
        const __m256 offset = matrix.kind == INT4 ? _mm256_load_ps(head.offset + 8 * half) : _mm256_setzero_ps();
        __m256i dot[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) dot[r] = _mm256_setzero_si256();
        for (int64_t left = num_blocks(matrix, group); left > 0; left--, q += BLOCK_K, data += block_bytes(matrix.kind)) {
            if (matrix.kind == INT4)
                dot_int4<R>(data, q, inputs.k_padded, half, dot);
            else
                dot_int8<R>(data, q, inputs.k_padded, half, dot);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int64_t place = (row + r) * inputs.num_groups + group;
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r]), _mm256_set1_ps(inputs.scale[place]));
            total[r] = _mm256_fmadd_ps(scaled, scale, total[r]);
            total[r] = _mm256_fmadd_ps(_mm256_set1_ps(inputs.sum[place]), offset, total[r]);
        }
    }
    alignas(32) float result[8];
    const int64_t lanes = smaller(8, lanes_of(matrix, panel) - 8 * half);
    for (int r = 0; r < R; r++) {
        _mm256_store_ps(result, total[r]);
        if (lanes > 0) memcpy(out + (row + r) * out_stride + panel * TILE_N + 8 * half, result, sizeof(float) * lanes);
    }
}

void multiply_rounded(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        for (int half = 0; half < 2; half++) {
            int64_t row = 0;
            for (; row + 4 <= inputs.m; row += 4) multiply_rows<4>(matrix, inputs, panel, half, row, out, out_stride);
            for (; row < inputs.m; row++) multiply_rows<1>(matrix, inputs, panel, half, row, out, out_stride);
        }
    }
}

}  // namespace

const Path avx2_path = {portable_path.prepare_rounded, portable_path.prepare_dense, multiply_rounded, portable_path.multiply_dense};

}  // namespace penstock
#endif
