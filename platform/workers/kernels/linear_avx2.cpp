// Products by AVX2: of bytes by way of sums of 16 bits, of dequantized weights in float32. Half a panel, 8 outputs, is a vector.

#include "packed.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace penstock {
namespace {

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2_TARGET inline __attribute__((always_inline))

INLINE __m256i four(const int8_t* q) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }
// Sums of 16 bits, of high and of low bytes, in 32 bits.
INLINE __m256i joined(__m256i high, __m256i low) {
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(LOW_STEPS)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

struct Scales {
    __m256 scale, offset;
};

// Of half a panel, in the matrix's unit; offset for q as it is stored.
INLINE Scales load_head(const Matrix& matrix, const uint8_t* group, int half) {
    Scales head;
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

// A block of 32 columns with R rows; each of dot[r] is a half of the panel's outputs. Sums of 8 products of 4 and 8 bits fit 16 bits.
template <int R>
INLINE void dot_int4(const uint8_t* block, const int8_t* q, int64_t q_stride, int half, __m256i (&dot)[R]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i upper[R], lower[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) upper[r] = lower[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * half));
        const __m256i left = _mm256_and_si256(weights, mask), right = _mm256_and_si256(_mm256_srli_epi16(weights, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * q_stride + 16 * j;
            const __m256i high = _mm256_add_epi16(_mm256_maddubs_epi16(left, four(x)), _mm256_maddubs_epi16(right, four(x + 8)));
            const __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(left, four(x + 4)), _mm256_maddubs_epi16(right, four(x + 12)));
            upper[r] = _mm256_add_epi16(upper[r], high);
            lower[r] = _mm256_add_epi16(lower[r], low);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) dot[r] = _mm256_add_epi32(dot[r], joined(upper[r], lower[r]));
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
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * q_stride + 8 * j;
            const __m256i high = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(x), weights));
            const __m256i low = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(x + 4), weights));
            dot[r] = _mm256_add_epi32(dot[r], joined(high, low));
        }
    }
}

// Those outputs of half a panel that exist, of a row of outputs.
INLINE void store_lanes(const Matrix& matrix, int64_t panel, int half, float* out_row, __m256 values) {
    alignas(32) float result[8];
    _mm256_store_ps(result, values);
    const int64_t lanes = smaller(8, lanes_of(matrix, panel) - 8 * half);
    if (lanes > 0) memcpy(out_row + panel * TILE_N + 8 * half, result, sizeof(float) * lanes);
}

// R rows from `row` on with half a panel.
template <int R>
AVX2_TARGET void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int half, int64_t row, float* out, int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int8_t* q = inputs.q + 2 * row * inputs.k_padded;
    __m256 total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
    for (int64_t group = 0; group < inputs.num_groups; group++) {
        Scales head = load_head(matrix, data, half);
        if (matrix.kind == INT8) head.offset = _mm256_setzero_ps();  // `dot_int8` takes q without its zero
        data += HEAD_BYTES;
        const int64_t place = row * inputs.num_groups + group;
        for (int64_t left = num_blocks(matrix, group); left > 0;) {
            __m256i dot[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) dot[r] = _mm256_setzero_si256();
            const int64_t blocks = smaller(left, MOST_BLOCKS);
            for (int64_t block = 0; block < blocks; block++, q += 2 * BLOCK_K, data += block_bytes(matrix.kind)) {
                if (matrix.kind == INT4)
                    dot_int4<R>(data, q, 2 * inputs.k_padded, half, dot);
                else
                    dot_int8<R>(data, q, 2 * inputs.k_padded, half, dot);
            }
            left -= blocks;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256 steps = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r]), _mm256_set1_ps(inputs.step[place + r * inputs.num_groups]));
                total[r] = _mm256_fmadd_ps(steps, head.scale, total[r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) total[r] = _mm256_fmadd_ps(_mm256_set1_ps(inputs.sum[place + r * inputs.num_groups]), head.offset, total[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store_lanes(matrix, panel, half, out + (row + r) * out_stride, _mm256_mul_ps(total[r], _mm256_set1_ps(matrix.unit)));
}

}  // namespace

void multiply_rounded_avx2(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        for (int half = 0; half < 2; half++) {
            int64_t row = 0;
            if (matrix.kind == INT4)  // of bytes, four rows are too many for 16 registers
                for (; row + 4 <= inputs.m; row += 4) multiply_rows<4>(matrix, inputs, panel, half, row, out, out_stride);
            for (; row + 2 <= inputs.m; row += 2) multiply_rows<2>(matrix, inputs, panel, half, row, out, out_stride);
            for (; row < inputs.m; row++) multiply_rows<1>(matrix, inputs, panel, half, row, out, out_stride);
        }
    }
}

namespace {

// ---- dequantized weights

constexpr int64_t COLUMNS = 256;  // dequantized at a time: 8 KiB for half a panel

// A block of 32 columns of half a panel, float32 [column][8].
AVX2_TARGET void dequantize_block(const Matrix& matrix, const uint8_t* block, const Scales& head, int half, float* to) {
    for (int64_t j = 0; j < block_bytes(matrix.kind) / 64; j++) {
        const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * half));
        if (matrix.kind == BF16) {
            _mm256_store_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)));
            _mm256_store_ps(to + 8, _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000)))));
            to += 16;
            continue;
        }
        const __m256i mask = _mm256_set1_epi32(matrix.kind == INT4 ? 15 : 255);
        for (int part = 0; part < (matrix.kind == INT4 ? 2 : 1); part++)
            for (int b = 0; b < 4; b++, to += 8) {
                const __m256i q = _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(8 * b + 4 * part)), mask);
                _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), head.scale, head.offset));
            }
    }
}

AVX2_TARGET void dequantize(const Matrix& matrix, int64_t panel, int half, int64_t begin, int64_t end, float* to) {
    const uint8_t* data = panel_of(matrix, panel);
    const __m256 unit = _mm256_set1_ps(matrix.unit);
    Scales head = {};
    for (int64_t column = begin; column < end; column += BLOCK_K, to += BLOCK_K * 8) {
        const uint8_t* block = data + column / BLOCK_K * block_bytes(BF16);
        if (matrix.kind != BF16) {
            const int64_t group = column / matrix.group;
            const uint8_t* start = data + group * group_bytes(matrix);
            head = load_head(matrix, start, half);
            head.scale = _mm256_mul_ps(head.scale, unit), head.offset = _mm256_mul_ps(head.offset, unit);
            block = start + HEAD_BYTES + (column - group * matrix.group) / BLOCK_K * block_bytes(matrix.kind);
        }
        dequantize_block(matrix, block, head, half, to);
    }
}

// R rows of x with `count` columns, an even number: their products are added to `sums`, even and odd columns apart.
template <int R>
INLINE void add_products(const float* weights, int64_t count, const float* x, int64_t x_stride, __m256 (&sums)[R]) {
    __m256 even[R], odd[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm256_setzero_ps();
    for (int64_t column = 0; column < count; column += 2) {
        const __m256 first = _mm256_load_ps(weights + column * 8), second = _mm256_load_ps(weights + column * 8 + 8);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            even[r] = _mm256_fmadd_ps(first, _mm256_set1_ps(x[r * x_stride + column]), even[r]);
            odd[r] = _mm256_fmadd_ps(second, _mm256_set1_ps(x[r * x_stride + column + 1]), odd[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r] = _mm256_add_ps(sums[r], _mm256_add_ps(even[r], odd[r]));
}

// Rows from `row` on: R at a time with the columns from `start` on of half a panel, whose earlier columns are in `out` already.
template <int R>
AVX2_TARGET void multiply_dense_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int half, int64_t row, int64_t start, const float* weights,
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
    for (int r = 0; r < R; r++) store_lanes(matrix, panel, half, out + (row + r) * out_stride, sums[r]);
}

}  // namespace

void multiply_dense_avx2(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    alignas(64) float weights[COLUMNS * 8];
    for (int64_t panel = begin; panel < end; panel++)
        for (int half = 0; half < 2; half++)
            for (int64_t start = 0; start < inputs.k_padded; start += COLUMNS) {
                dequantize(matrix, panel, half, start, smaller(inputs.k_padded, start + COLUMNS), weights);
                int64_t row = 0;
                for (; row + 4 <= inputs.m; row += 4) multiply_dense_rows<4>(matrix, inputs, panel, half, row, start, weights, out, out_stride);
                for (; row < inputs.m; row++) multiply_dense_rows<1>(matrix, inputs, panel, half, row, start, weights, out, out_stride);
            }
}

}  // namespace penstock
#endif
