// Products by AVX2 in float32, with weights of bfloat16 and dequantized ones.

#include "linear/linear_avx2.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

constexpr int64_t COLUMNS = 256;  // dequantized at a time: 8 KiB for half a panel
constexpr int64_t AHEAD = 8192;   // bytes of a panel that are prefetched before they are needed

// A block of 32 columns of half a panel, float32 [column][8].
PENSTOCK_AVX2 void dequantize_block(const Matrix& matrix, const uint8_t* block, const HalfScales& head, int half, float* to) {
    for (int64_t j = 0; j < block_bytes(matrix.kind) / 64; j++) {
        const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * half));
        const __m256i mask = _mm256_set1_epi32(matrix.kind == INT4 ? 15 : 255);
        for (int part = 0; part < (matrix.kind == INT4 ? 2 : 1); part++)
            for (int b = 0; b < 4; b++, to += 8) {
                const __m256i q = _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(8 * b + 4 * part)), mask);
                _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), head.scale, head.offset));
            }
    }
}

PENSTOCK_AVX2 void dequantize(const Matrix& matrix, int64_t panel, int half, int64_t begin, int64_t end, float* to) {
    const uint8_t* data = panel_of(matrix, panel);
    const __m256 unit = _mm256_set1_ps(matrix.unit);
    for (int64_t column = begin; column < end; column += BLOCK_K, to += BLOCK_K * 8) {
        const int64_t group = column / matrix.group;
        const uint8_t *start = data + group * group_bytes(matrix), *block = start + HEAD_BYTES + (column - group * matrix.group) / BLOCK_K * block_bytes(matrix.kind);
        HalfScales head = load_half_head(matrix, start, half);
        head.scale = _mm256_mul_ps(head.scale, unit), head.offset = _mm256_mul_ps(head.offset, unit);
        if (half == 0)
            for (int64_t line = 0; line < block_bytes(matrix.kind); line += 64) _mm_prefetch(reinterpret_cast<const char*>(block + AHEAD + line), _MM_HINT_T0);
        dequantize_block(matrix, block, head, half, to);
    }
}

// R rows of x with `count` columns, an even number: their products are added to `sums`, even and odd columns apart.
template <int R>
PENSTOCK_AVX2_INLINE void add_products(const float* weights, int64_t count, const float* x, int64_t x_stride, __m256 (&sums)[R]) {
    __m256 even[R], odd[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm256_setzero_ps();
    for (int64_t column = 0; column < count; column += 2) {
        const __m256 first = _mm256_load_ps(weights + column * 8), second = _mm256_load_ps(weights + column * 8 + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            even[r] = _mm256_fmadd_ps(first, _mm256_set1_ps(x[r * x_stride + column]), even[r]);
            odd[r] = _mm256_fmadd_ps(second, _mm256_set1_ps(x[r * x_stride + column + 1]), odd[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sums[r] = _mm256_add_ps(sums[r], _mm256_add_ps(even[r], odd[r]));
}

// Rows from `row` on: R at a time with the columns from `start` on of half a panel, whose earlier columns are in `out` already.
template <int R>
PENSTOCK_AVX2 void multiply_dense_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int half, int64_t row, int64_t start, const float* weights,
                                     float* out, int64_t out_stride) {
    const int64_t lanes = smaller(8, lanes_of(matrix, panel) - 8 * half), count = smaller(COLUMNS, inputs.k_padded - start);
    if (lanes <= 0) return;
    __m256 sums[R];
    for (int r = 0; r < R; r++) {
        alignas(32) float before[8] = {};
        if (start > 0) memcpy(before, out + (row + r) * out_stride + panel * TILE_N + 8 * half, sizeof(float) * lanes);
        sums[r] = _mm256_load_ps(before);
    }
    add_products<R>(weights, count, static_cast<const float*>(inputs.dense) + row * inputs.k_padded + start, inputs.k_padded, sums);
    for (int r = 0; r < R; r++) store_half(matrix, panel, half, out + (row + r) * out_stride, sums[r]);
}

// R rows from `row` on with a panel of bfloat16, which is read where it lies: the same sums in the same order as with `add_products`.
template <int R>
PENSTOCK_AVX2 void multiply_bf16_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int64_t row, float* out, int64_t out_stride) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000));
    const uint8_t* data = panel_of(matrix, panel);
    const float* x = static_cast<const float*>(inputs.dense) + row * inputs.k_padded;
    __m256 sums[2][R];
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) sums[half][r] = _mm256_setzero_ps();
    for (int64_t start = 0; start < inputs.k_padded; start += COLUMNS) {
        const int64_t end = smaller(start + COLUMNS, inputs.k_padded);
        __m256 even[2][R], odd[2][R];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) even[half][r] = odd[half][r] = _mm256_setzero_ps();
        for (int64_t column = start; column < end; column += 2, data += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(data + AHEAD), _MM_HINT_T0);
            __m256 first[2], second[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(data + 32 * half));
                first[half] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), second[half] = _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
            }
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
                const __m256 left = _mm256_set1_ps(x[r * inputs.k_padded + column]), right = _mm256_set1_ps(x[r * inputs.k_padded + column + 1]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    even[half][r] = _mm256_fmadd_ps(first[half], left, even[half][r]);
                    odd[half][r] = _mm256_fmadd_ps(second[half], right, odd[half][r]);
                }
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) sums[half][r] = _mm256_add_ps(sums[half][r], _mm256_add_ps(even[half][r], odd[half][r]));
    }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) store_half(matrix, panel, half, out + (row + r) * out_stride, sums[half][r]);
}

// Two rows side by side: with three, their sums and the weights need more registers than there are.
void multiply_bf16(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t row = 0;
        for (; row + 2 <= inputs.m; row += 2) multiply_bf16_rows<2>(matrix, inputs, panel, row, out, out_stride);
        if (row < inputs.m) multiply_bf16_rows<1>(matrix, inputs, panel, row, out, out_stride);
    }
}

}  // namespace

void multiply_dense_avx2(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    if (matrix.kind == BF16) return multiply_bf16(matrix, inputs, out, out_stride, begin, end);
    alignas(64) float weights[COLUMNS * 8];
    for (int64_t panel = begin; panel < end; panel++)
        for (int half = 0; half < 2; half++)
            for (int64_t start = 0; start < inputs.k_padded; start += COLUMNS) {
                dequantize(matrix, panel, half, start, smaller(inputs.k_padded, start + COLUMNS), weights);
                int64_t row = 0;
                // six go side by side at most: each has two sums in registers
                for (; row + 6 < inputs.m; row += 4) multiply_dense_rows<4>(matrix, inputs, panel, half, row, start, weights, out, out_stride);
                with_rest(inputs.m - row, [&](auto rest) {
                    if constexpr (rest <= 6) multiply_dense_rows<rest>(matrix, inputs, panel, half, row, start, weights, out, out_stride);
                });
            }
}

}  // namespace penstock
#endif
