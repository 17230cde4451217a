// Products by AVX-512: VNNI's dot products of bytes, whose unsigned side are the weights as they are stored, and BF16's of bfloat16 pairs.
//
// A panel meets several rows at once: a vector of weights is unpacked once and multiplied by as many broadcast activations. Every row has
// its own chain of sums, the same however many rows go with it.

#include "linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

#define INLINE PENSTOCK_AVX512 inline __attribute__((always_inline))

constexpr int64_t AHEAD = 4096;  // bytes of a panel that are asked for before they are needed

INLINE __mmask16 mask_of(int64_t count) { return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1); }

// ---- activations

INLINE __m512i magnitude_bits(__mmask16 mask, const float* x) {
    return _mm512_and_si512(_mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x)), _mm512_set1_epi32(0x7FFFFFFF));
}

// 16 activations in 8 bits. No more than 127: `inverse` is 127 over the largest of the group.
INLINE void store_rounded(int8_t* q, __m512i rounded) { _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtsepi32_epi8(rounded)); }

// Of up to 4 groups, from the bits of their largest magnitudes: scales, NaN where something was not a number, and what rounds to steps of them.
INLINE void find_scales(__m128i largest, __m128& scale, __m128& inverse) {
    const __m128 most = _mm_castsi128_ps(largest), steps = _mm_set1_ps(127.0f);
    const __mmask8 is_number = _mm_cmplt_epi32_mask(largest, _mm_set1_epi32(0x7F800000));
    scale = _mm_mask_blend_ps(is_number, _mm_set1_ps(__builtin_nanf("")), _mm_div_ps(most, steps));
    inverse = _mm_maskz_div_ps(_mm_mask_cmpgt_epi32_mask(is_number, largest, _mm_setzero_si128()), steps, most);
}

INLINE void round_group(const Inputs& inputs, const float* x, int64_t row, int64_t group) {
    const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
    __m512i most = _mm512_setzero_si512();  // as bits: NaN is above all numbers
    for (int64_t i = begin; i < end; i += 16) most = _mm512_max_epu32(most, magnitude_bits(mask_of(end - i), x + i));
    __m128 scale, inverse;
    find_scales(_mm_cvtsi32_si128(static_cast<int32_t>(_mm512_reduce_max_epu32(most))), scale, inverse);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < smaller(inputs.k_padded, begin + inputs.group); i += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(i < end ? mask_of(end - i) : 0, x + i);
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_broadcastss_ps(inverse)));
        sum = _mm512_add_epi32(sum, rounded);
        store_rounded(inputs.q + row * inputs.k_padded + i, rounded);
    }
    const int64_t place = row * inputs.num_groups + group;
    inputs.scale[place] = _mm_cvtss_f32(scale);
    inputs.sum[place] = _mm_cvtss_f32(scale) * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

INLINE __m128i largest_of_four(__m512i x) {
    const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Four whole groups of 32 columns at once: their maxima and sums are brought together instead of one after the other.
INLINE void round_four_groups(const Inputs& inputs, const float* x, int64_t row, int64_t group) {
    const int64_t begin = group * 32, place = row * inputs.num_groups + group;
    __m128i most[4], sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const float* part = x + begin + 32 * i;
        most[i] = largest_of_four(_mm512_max_epu32(magnitude_bits(0xFFFF, part), magnitude_bits(0xFFFF, part + 16)));
    }
    const __m128i first = _mm_max_epu32(_mm_unpacklo_epi32(most[0], most[1]), _mm_unpackhi_epi32(most[0], most[1]));
    const __m128i second = _mm_max_epu32(_mm_unpacklo_epi32(most[2], most[3]), _mm_unpackhi_epi32(most[2], most[3]));
    __m128 scale, inverse;
    find_scales(_mm_max_epu32(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second)), scale, inverse);
    alignas(16) float inverses[4];
    _mm_store_ps(inverses, inverse);
    int8_t* q = inputs.q + row * inputs.k_padded + begin;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 factor = _mm512_set1_ps(inverses[i]);
        const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + begin + 32 * i), factor));
        const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + begin + 32 * i + 16), factor));
        store_rounded(q + 32 * i, low);
        store_rounded(q + 32 * i + 16, high);
        const __m512i both = _mm512_add_epi32(low, high);
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
    const __m128i sum = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]));
    _mm_storeu_ps(inputs.scale + place, scale);
    _mm_storeu_ps(inputs.sum + place, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum)));
}

PENSTOCK_AVX512 void prepare_rounded(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    for (int64_t row = row_begin; row < row_end; row++) {
        int64_t group = 0;
        if (inputs.group == 32)
            for (; (group + 4) * 32 <= inputs.k; group += 4) round_four_groups(inputs, x + row * stride, row, group);
        for (; group < inputs.num_groups; group++) round_group(inputs, x + row * stride, row, group);
    }
}

PENSTOCK_AVX512 void prepare_dense(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
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

// ---- weights

struct Scales {
    __m512 scale, offset;
};

template <int32_t KIND>
INLINE Scales load_head(const Matrix& matrix, const uint8_t* group) {
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

INLINE __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE __m512i high_nibbles(__m512i x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE __m512i four(const int8_t* q) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }

// ---- products of bytes

// A block of 32 columns with R rows.
template <int32_t KIND, int R>
INLINE void dot_block(const uint8_t* block, const int8_t* q, int64_t q_stride, __m512i (&dot)[R]) {
#pragma GCC unroll 8
    for (int j = 0; j < (KIND == INT4 ? 4 : 8); j++) {
        const __m512i weights = _mm512_load_si512(block + 64 * j);
        if (KIND == INT4) {
            const __m512i low = low_nibbles(weights), high = high_nibbles(weights);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                dot[r] = _mm512_dpbusd_epi32(dot[r], low, four(q + r * q_stride + 8 * j));
                dot[r] = _mm512_dpbusd_epi32(dot[r], high, four(q + r * q_stride + 8 * j + 4));
            }
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) dot[r] = _mm512_dpbusd_epi32(dot[r], weights, four(q + r * q_stride + 4 * j));
        }
    }
}

// R rows from `row` on with one panel.
template <int32_t KIND, int R>
PENSTOCK_AVX512 __attribute__((noinline)) void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int64_t row, float* out,
                                                             int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int64_t groups = inputs.num_groups;
    const int8_t* q = inputs.q + row * inputs.k_padded;
    const float *scale = inputs.scale + row * groups, *sum = inputs.sum + row * groups;
    __m512 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, scale++, sum++) {
        const Scales head = load_head<KIND>(matrix, data);
        data += HEAD_BYTES;
        __m512i dot[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dot[r] = _mm512_setzero_si512();
        for (int64_t left = num_blocks(matrix, group); left > 0; left--, q += BLOCK_K, data += block_bytes(KIND)) {
            for (int64_t line = 0; line < block_bytes(KIND); line += 64) _mm_prefetch(reinterpret_cast<const char*>(data + AHEAD + line), _MM_HINT_T0);
            dot_block<KIND, R>(data, q, inputs.k_padded, dot);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_set1_ps(scale[r * groups]));
            total[r] = _mm512_fmadd_ps(scaled, head.scale, total[r]);
            total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum[r * groups]), head.offset, total[r]);
        }
    }
    const __mmask16 mask = mask_of(lanes_of(matrix, panel));
    const __m512 unit = _mm512_set1_ps(matrix.unit);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) _mm512_mask_storeu_ps(out + (row + r) * out_stride + panel * TILE_N, mask, _mm512_mul_ps(total[r], unit));
}

template <int32_t KIND>
void multiply_rounded_kind(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t row = 0;
        for (; row + 8 <= inputs.m; row += 8) multiply_rows<KIND, 8>(matrix, inputs, panel, row, out, out_stride);
        if (inputs.m - row >= 4) multiply_rows<KIND, 4>(matrix, inputs, panel, row, out, out_stride), row += 4;
        if (inputs.m - row >= 2) multiply_rows<KIND, 2>(matrix, inputs, panel, row, out, out_stride), row += 2;
        if (inputs.m - row >= 1) multiply_rows<KIND, 1>(matrix, inputs, panel, row, out, out_stride);
    }
}

void multiply_rounded(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    (matrix.kind == INT4 ? multiply_rounded_kind<INT4> : multiply_rounded_kind<INT8>)(matrix, inputs, out, out_stride, begin, end);
}

// ---- weights as pairs of bfloat16

INLINE __m512i interleaved(__m512 even, __m512 odd) {
    const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
    __m512i bits;
    memcpy(&bits, &both, sizeof bits);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, bits);
}

// Byte `shift` / 8 of each lane, of which `mask` counts.
INLINE __m512 weight_of(__m512i x, int shift, int mask, const Scales& head) {
    const __m512i q = _mm512_and_si512(_mm512_srli_epi32(x, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), head.scale, head.offset);
}

template <int32_t KIND>
INLINE void dequantize_block(const uint8_t* block, const Scales& head, uint8_t* to) {
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
PENSTOCK_AVX512 void dequantize(const Matrix& matrix, int64_t panel, int64_t begin, int64_t end, uint8_t* to) {
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

INLINE __m512bh as_bf16(__m512i x) {
    __m512bh result;
    memcpy(&result, &x, sizeof result);
    return result;
}

INLINE __m512bh two(const uint16_t* x) { return as_bf16(_mm512_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(x))); }

// R rows of x with `count` pairs of columns, an even number; adds to out unless it is the first chunk.
template <int R>
PENSTOCK_AVX512 __attribute__((noinline)) void multiply_pair_rows(const uint8_t* pairs, int64_t count, const uint16_t* x, int64_t x_stride, float* out,
                                                                  int64_t out_stride, __mmask16 mask, bool is_first) {
    __m512 even[R], odd[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < count; pair += 2) {
        const __m512bh first = as_bf16(_mm512_load_si512(pairs + pair * PAIR_BYTES)), second = as_bf16(_mm512_load_si512(pairs + (pair + 1) * PAIR_BYTES));
        if (R <= 4) {
            _mm_prefetch(reinterpret_cast<const char*>(pairs + pair * PAIR_BYTES + AHEAD), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(pairs + (pair + 1) * PAIR_BYTES + AHEAD), _MM_HINT_T0);
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

using PairRows = void (*)(const uint8_t*, int64_t, const uint16_t*, int64_t, float*, int64_t, __mmask16, bool);

struct Step {
    int rows;
    PairRows function;
};
constexpr Step STEPS[] = {{12, multiply_pair_rows<12>}, {8, multiply_pair_rows<8>}, {4, multiply_pair_rows<4>}, {2, multiply_pair_rows<2>}, {1, multiply_pair_rows<1>}};

}  // namespace

const uint8_t* pairs_of(const Matrix& matrix, int64_t panel, int64_t begin, uint8_t* buffer) {
    const int64_t end = smaller(padded_k(matrix), begin + CHUNK_K);
    switch (matrix.kind) {
        case INT4: dequantize<INT4>(matrix, panel, begin, end, buffer); return buffer;
        case INT8: dequantize<INT8>(matrix, panel, begin, end, buffer); return buffer;
        default: return panel_of(matrix, panel) + begin / 2 * PAIR_BYTES;
    }
}

void multiply_pairs(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    alignas(64) uint8_t buffer[CHUNK_BYTES];
    for (int64_t panel = begin; panel < end; panel++) {
        const int lanes = lanes_of(matrix, panel);
        const __mmask16 mask = static_cast<__mmask16>((1u << lanes) - 1);
        for (int64_t start = 0; start < inputs.k_padded; start += CHUNK_K) {
            const uint8_t* pairs = pairs_of(matrix, panel, start, buffer);
            const int64_t count = smaller(CHUNK_K, inputs.k_padded - start) / 2;
            const uint16_t* x = static_cast<const uint16_t*>(inputs.dense) + start;
            int64_t row = 0;
            for (const Step& step : STEPS)
                for (; row + step.rows <= inputs.m; row += step.rows)
                    step.function(pairs, count, x + row * inputs.k_padded, inputs.k_padded, out + row * out_stride + panel * TILE_N, out_stride, mask, start == 0);
        }
    }
}

const Path avx512_path = {prepare_rounded, prepare_dense, multiply_rounded, multiply_pairs};

}  // namespace penstock
#endif
