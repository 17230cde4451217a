// Products of bfloat16 pairs by AVX512-BF16, weights dequantized once for all rows.
//
// Every row has its own chain of sums, the same however many rows go with it.

#include "linear/linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {

#define BF16_INLINE PENSTOCK_AVX512_BF16 inline __attribute__((always_inline))

PENSTOCK_AVX512_BF16 void prepare_dense_bf16(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    uint16_t* dense = static_cast<uint16_t*>(inputs.dense);
    for (int64_t row = row_begin; row < row_end; row++)
        for (int64_t i = 0; i < inputs.k_padded; i += 16) {
            const __mmask16 mask = i < inputs.k ? mask_of(inputs.k - i) : 0;
            const __m256bh half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + row * stride + i));
            __m256i bits;
            memcpy(&bits, &half, sizeof bits);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dense + row * inputs.k_padded + i), bits);
        }
    // whole tiles of rows
    if (row_end == inputs.m && inputs.level >= AMX)
        memset(dense + static_cast<int64_t>(inputs.m) * inputs.k_padded, 0, (rounded_up(inputs.m, 16) - inputs.m) * inputs.k_padded * 2);
}

namespace {

// ---- weights as pairs of bfloat16

BF16_INLINE __m512i interleaved(__m512 even, __m512 odd) {
    const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
    __m512i bits;
    memcpy(&bits, &both, sizeof bits);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, bits);
}

// Byte `shift` / 8 of each lane, of which `mask` counts.
BF16_INLINE __m512 weight_of(__m512i x, int shift, int mask, const Scales& head) {
    const __m512i q = _mm512_and_si512(_mm512_srli_epi32(x, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), head.scale, head.offset);
}

template <int32_t KIND>
BF16_INLINE void dequantize_block(const uint8_t* block, const Scales& head, uint8_t* to) {
#pragma GCC unroll 8
    for (int j = 0; j < (KIND == INT4 ? 4 : 8); j++) {
        const __m512i x = _mm512_load_si512(block + 64 * j);
        constexpr int MASK = KIND == INT4 ? 15 : 255, PARTS = KIND == INT4 ? 2 : 1;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; pair++) {
                const int shift = 16 * pair + 4 * part;
                _mm512_store_si512(to, interleaved(weight_of(x, shift, MASK, head), weight_of(x, shift + 8, MASK, head)));
                to += PAIR_BYTES;
            }
        }
    }
}

template <int32_t KIND>
PENSTOCK_AVX512_BF16 void dequantize(const Matrix& matrix, int64_t panel, int64_t begin, int64_t end, uint8_t* to) {
    const int64_t blocks_per_group = matrix.group / BLOCK_K;
    const __m512 unit = _mm512_set1_ps(matrix.unit);
    Scales head = {};
    for (int64_t block = begin / BLOCK_K; block < end / BLOCK_K; block++, to += BLOCK_K / 2 * PAIR_BYTES) {
        const int64_t group = block / blocks_per_group, in_group = block - group * blocks_per_group;
        const uint8_t* data = panel_of(matrix, panel) + group * group_bytes(matrix);
        if (in_group == 0 || block == begin / BLOCK_K) {
            head = load_head<KIND>(matrix, data);
            head.scale = _mm512_mul_ps(head.scale, unit), head.offset = _mm512_mul_ps(head.offset, unit);
        }
        dequantize_block<KIND>(data + HEAD_BYTES + in_group * block_bytes(KIND), head, to);
    }
}

// ---- products of bfloat16

BF16_INLINE __m512bh as_bf16(__m512i x) {
    __m512bh result;
    memcpy(&result, &x, sizeof result);
    return result;
}

BF16_INLINE __m512bh two(const uint16_t* x) { return as_bf16(_mm512_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(x))); }

constexpr int MOST_ROWS = 12;  // side by side

// R rows of x with `count` pairs of columns, an even number; adds to out unless it is the first chunk. IS_STORED: the pairs lie in the matrix itself, and
// come from memory.
template <int R, bool IS_STORED>
PENSTOCK_AVX512_BF16 __attribute__((noinline)) void multiply_pair_rows(const uint8_t* pairs, int64_t count, const uint16_t* x, int64_t x_stride, float* out,
                                                                  int64_t out_stride, __mmask16 mask, bool is_first, bool is_read_once) {
    __m512 even[R], odd[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < count; pair += 2) {
        const __m512bh first = as_bf16(_mm512_load_si512(pairs + pair * PAIR_BYTES)), second = as_bf16(_mm512_load_si512(pairs + (pair + 1) * PAIR_BYTES));
        if (IS_STORED) {
            fetch(pairs + pair * PAIR_BYTES + AHEAD, is_read_once);
            fetch(pairs + (pair + 1) * PAIR_BYTES + AHEAD, is_read_once);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            even[r] = _mm512_dpbf16_ps(even[r], first, two(x + r * x_stride + 2 * pair));
            odd[r] = _mm512_dpbf16_ps(odd[r], second, two(x + r * x_stride + 2 * pair + 2));
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        __m512 sum = _mm512_add_ps(even[r], odd[r]);
        if (!is_first) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out + r * out_stride));
        _mm512_mask_storeu_ps(out + r * out_stride, mask, sum);
    }
}

using PairRows = void (*)(const uint8_t*, int64_t, const uint16_t*, int64_t, float*, int64_t, __mmask16, bool, bool);

struct Step {
    int rows;
    PairRows function;
};
template <bool IS_STORED>
constexpr Step STEPS[MOST_ROWS] = {{12, multiply_pair_rows<12, IS_STORED>}, {11, multiply_pair_rows<11, IS_STORED>}, {10, multiply_pair_rows<10, IS_STORED>},
                                  {9, multiply_pair_rows<9, IS_STORED>},   {8, multiply_pair_rows<8, IS_STORED>},   {7, multiply_pair_rows<7, IS_STORED>},
                                  {6, multiply_pair_rows<6, IS_STORED>},   {5, multiply_pair_rows<5, IS_STORED>},   {4, multiply_pair_rows<4, IS_STORED>},
                                  {3, multiply_pair_rows<3, IS_STORED>},   {2, multiply_pair_rows<2, IS_STORED>},   {1, multiply_pair_rows<1, IS_STORED>}};

}  // namespace

const uint8_t* pairs_of(const Matrix& matrix, int64_t panel, int64_t begin, uint8_t* buffer) {
    const int64_t end = smaller(padded_k(matrix), begin + CHUNK_K);
    switch (matrix.kind) {
        case INT4: dequantize<INT4>(matrix, panel, begin, end, buffer); return buffer;
        case INT8: dequantize<INT8>(matrix, panel, begin, end, buffer); return buffer;
        default: return panel_of(matrix, panel) + begin / 2 * PAIR_BYTES;
    }
}

void multiply_dense_bf16(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    alignas(64) uint8_t buffer[CHUNK_BYTES];
    const bool is_read_once = inputs.m <= MOST_ROWS && !inputs.is_reused;
    for (int64_t panel = begin; panel < end; panel++) {
        const int lanes = lanes_of(matrix, panel);
        const __mmask16 mask = static_cast<__mmask16>((1u << lanes) - 1);
        for (int64_t start = 0; start < inputs.k_padded; start += CHUNK_K) {
            const uint8_t* pairs = pairs_of(matrix, panel, start, buffer);
            const int64_t count = smaller(CHUNK_K, inputs.k_padded - start) / 2;
            const uint16_t* x = static_cast<const uint16_t*>(inputs.dense) + start;
            int64_t row = 0;
            for (const Step& step : matrix.kind == BF16 ? STEPS<true> : STEPS<false>)
                for (; row + step.rows <= inputs.m; row += step.rows)
                    step.function(pairs, count, x + row * inputs.k_padded, inputs.k_padded, out + row * out_stride + panel * TILE_N, out_stride, mask, start == 0,
                                  is_read_once);
        }
    }
}

}  // namespace penstock
#endif
