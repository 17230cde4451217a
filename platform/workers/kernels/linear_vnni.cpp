// Products of bytes by AVX-512 VNNI, whose unsigned side are the weights as they are stored.
//
// A panel meets several rows at once: a vector of weights is unpacked once and multiplied by as many broadcast activations, high bytes and low
// ones. Every row has its own chain of sums, the same however many rows go with it.

#include "linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

// ---- activations

PENSTOCK_INLINE __m512i magnitude_bits(__mmask16 mask, const float* x) {
    return _mm512_and_si512(_mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x)), _mm512_set1_epi32(0x7FFFFFFF));
}

// 16 activations, rounded to whole steps, as bytes, or as high and low bytes of four columns each; `to` is where the first column's are.
template <int TERMS>
PENSTOCK_INLINE void store_rounded(int8_t* to, __m512i steps) {
    if (TERMS == 1) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(steps));
        return;
    }
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(steps, _mm512_set1_epi32(LOW_STEPS / 2)), LOW_BITS);
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_sub_epi32(steps, _mm512_slli_epi32(high, LOW_BITS))), upper = _mm512_cvtepi32_epi8(high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(upper, low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm_unpackhi_epi32(upper, low));
}

PENSTOCK_INLINE __m512i rounded(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

// Of up to 4 groups, from the bits of their largest magnitudes: a step, NaN where something was not a number, and its inverse, 0 where all is 0.
template <int TERMS>
PENSTOCK_INLINE void find_steps(__m128i largest, __m128& step, __m128& inverse) {
    const __m128 most = _mm_castsi128_ps(largest), steps = _mm_set1_ps(TERMS == 1 ? MOST_STEPS_OF_ONE : MOST_STEPS);
    const __mmask8 is_number = _mm_cmplt_epi32_mask(largest, _mm_set1_epi32(NOT_FINITE));
    step = _mm_mask_blend_ps(is_number, _mm_set1_ps(__builtin_nanf("")), _mm_div_ps(most, steps));
    inverse = _mm_maskz_div_ps(_mm_mask_cmpge_epi32_mask(is_number, largest, _mm_set1_epi32(LEAST_ROUNDED)), steps, most);
}

template <int TERMS>
PENSTOCK_INLINE void round_group(const Inputs& inputs, const float* x, int64_t row, int64_t group) {
    const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
    __m512i most = _mm512_setzero_si512();  // as bits: NaN is above all numbers
    for (int64_t i = begin; i < end; i += 16) most = _mm512_max_epu32(most, magnitude_bits(mask_of(end - i), x + i));
    __m128 step, inverse;
    find_steps<TERMS>(_mm_cvtsi32_si128(static_cast<int32_t>(_mm512_reduce_max_epu32(most))), step, inverse);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < smaller(inputs.k_padded, begin + inputs.group); i += 16) {
        const __m512i steps = rounded(_mm512_maskz_loadu_ps(i < end ? mask_of(end - i) : 0, x + i), _mm512_broadcastss_ps(inverse));
        sum = _mm512_add_epi32(sum, steps);
        store_rounded<TERMS>(inputs.q + TERMS * (row * inputs.k_padded + i), steps);
    }
    const int64_t place = row * inputs.num_groups + group;
    inputs.step[place] = _mm_cvtss_f32(step);
    inputs.sum[place] = _mm_cvtss_f32(step) * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

PENSTOCK_INLINE __m128i largest_of_four(__m512i x) {
    const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Four whole groups of 32 columns at once: their maxima and sums are brought together instead of one after the other.
template <int TERMS>
PENSTOCK_INLINE void round_four_groups(const Inputs& inputs, const float* x, int64_t row, int64_t group) {
    const int64_t begin = group * 32, place = row * inputs.num_groups + group;
    __m128i most[4], sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const float* part = x + begin + 32 * i;
        most[i] = largest_of_four(_mm512_max_epu32(magnitude_bits(0xFFFF, part), magnitude_bits(0xFFFF, part + 16)));
    }
    const __m128i first = _mm_max_epu32(_mm_unpacklo_epi32(most[0], most[1]), _mm_unpackhi_epi32(most[0], most[1]));
    const __m128i second = _mm_max_epu32(_mm_unpacklo_epi32(most[2], most[3]), _mm_unpackhi_epi32(most[2], most[3]));
    __m128 step, inverse;
    find_steps<TERMS>(_mm_max_epu32(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second)), step, inverse);
    alignas(16) float inverses[4];
    _mm_store_ps(inverses, inverse);
    int8_t* q = inputs.q + TERMS * (row * inputs.k_padded + begin);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 factor = _mm512_set1_ps(inverses[i]);
        const __m512i left = rounded(_mm512_loadu_ps(x + begin + 32 * i), factor), right = rounded(_mm512_loadu_ps(x + begin + 32 * i + 16), factor);
        store_rounded<TERMS>(q + TERMS * 32 * i, left);
        store_rounded<TERMS>(q + TERMS * (32 * i + 16), right);
        const __m512i both = _mm512_add_epi32(left, right);
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
    const __m128i sum = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]));
    _mm_storeu_ps(inputs.step + place, step);
    _mm_storeu_ps(inputs.sum + place, _mm_mul_ps(step, _mm_cvtepi32_ps(sum)));
}

template <int TERMS>
PENSTOCK_AVX512 void round_rows(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    for (int64_t row = row_begin; row < row_end; row++) {
        int64_t group = 0;
        if (inputs.group == 32)
            for (; (group + 4) * 32 <= inputs.k; group += 4) round_four_groups<TERMS>(inputs, x + row * stride, row, group);
        for (; group < inputs.num_groups; group++) round_group<TERMS>(inputs, x + row * stride, row, group);
    }
}

// ---- products

constexpr int SIDE_BY_SIDE = 4;

PENSTOCK_INLINE __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
PENSTOCK_INLINE __m512i high_nibbles(__m512i x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
PENSTOCK_INLINE __m512i four(const int8_t* q) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }

// Four columns of R rows; q: those of the first, of one term.
template <int R>
PENSTOCK_INLINE void add_products(__m512i weights, const int8_t* q, int64_t q_stride, __m512i (&sums)[R]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = _mm512_dpbusd_epi32(sums[r], weights, four(q + r * q_stride));
}

// A block of 32 columns, high or low bytes where there are two terms.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_INLINE void add_block(const uint8_t* block, const int8_t* q, int64_t q_stride, __m512i (&sums)[R]) {
#pragma GCC unroll 8
    for (int j = 0; j < (KIND == INT4 ? 4 : 8); j++) {
        const __m512i weights = _mm512_load_si512(block + 64 * j);
        if (KIND == INT4) {
            add_products<R>(low_nibbles(weights), q + TERMS * 8 * j, q_stride, sums);
            add_products<R>(high_nibbles(weights), q + TERMS * (8 * j + 4), q_stride, sums);
        } else {
            add_products<R>(weights, q + TERMS * 4 * j, q_stride, sums);
        }
    }
}

template <int32_t KIND>
PENSTOCK_INLINE void ask_ahead(const uint8_t* data) {
    for (int64_t line = 0; line < block_bytes(KIND); line += 64) _mm_prefetch(reinterpret_cast<const char*>(data + AHEAD + line), _MM_HINT_T0);
}

// The products of `blocks` blocks, no more than MOST_BLOCKS, in steps. Few rows take high and low bytes side by side, so that the chains of sums are
// short; many rows one after the other, so that the sums stay in registers.
template <int32_t KIND, int R>
PENSTOCK_INLINE void multiply_two_terms(const uint8_t* data, int64_t blocks, const int8_t* q, int64_t q_stride, __m512i (&dot)[R]) {
    __m512i low[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r] = low[r] = _mm512_setzero_si512();
    if (R <= SIDE_BY_SIDE) {
        for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += 2 * BLOCK_K) {
            ask_ahead<KIND>(data);
            add_block<KIND, 2, R>(data, q, q_stride, dot);
            add_block<KIND, 2, R>(data, q + 4, q_stride, low);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dot[r] = _mm512_add_epi32(_mm512_slli_epi32(dot[r], LOW_BITS), low[r]);
        return;
    }
    for (int64_t block = 0; block < blocks; block++) {
        ask_ahead<KIND>(data + block * block_bytes(KIND));
        add_block<KIND, 2, R>(data + block * block_bytes(KIND), q + block * 2 * BLOCK_K, q_stride, dot);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r] = _mm512_slli_epi32(dot[r], LOW_BITS);
    for (int64_t block = 0; block < blocks; block++) add_block<KIND, 2, R>(data + block * block_bytes(KIND), q + block * 2 * BLOCK_K + 4, q_stride, dot);
}

// The same, in one term.
template <int32_t KIND, int R>
PENSTOCK_INLINE void multiply_one_term(const uint8_t* data, int64_t blocks, const int8_t* q, int64_t q_stride, __m512i (&dot)[R]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r] = _mm512_setzero_si512();
    for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += BLOCK_K) {
        ask_ahead<KIND>(data);
        add_block<KIND, 1, R>(data, q, q_stride, dot);
    }
}

// R rows from `row` on with one panel.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_AVX512 __attribute__((noinline)) void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int64_t row, float* out,
                                                             int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int64_t groups = inputs.num_groups, q_stride = TERMS * inputs.k_padded;
    const int8_t* q = inputs.q + row * q_stride;
    const float *step = inputs.step + row * groups, *sum = inputs.sum + row * groups;
    __m512 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, step++, sum++) {
        const Scales head = load_head<KIND>(matrix, data);
        data += HEAD_BYTES;
        for (int64_t left = num_blocks(matrix, group); left > 0;) {
            const int64_t blocks = smaller(left, MOST_BLOCKS);
            __m512i dot[R];
            if (TERMS == 1)
                multiply_one_term<KIND, R>(data, blocks, q, q_stride, dot);
            else
                multiply_two_terms<KIND, R>(data, blocks, q, q_stride, dot);
            left -= blocks, data += blocks * block_bytes(KIND), q += blocks * TERMS * BLOCK_K;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                total[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_set1_ps(step[r * groups])), head.scale, total[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum[r * groups]), head.offset, total[r]);
    }
    const __mmask16 mask = mask_of(lanes_of(matrix, panel));
    const __m512 unit = _mm512_set1_ps(matrix.unit);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) _mm512_mask_storeu_ps(out + (row + r) * out_stride + panel * TILE_N, mask, _mm512_mul_ps(total[r], unit));
}

template <int32_t KIND, int TERMS>
void multiply_all_rows(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t row = 0;
        for (; row + 8 <= inputs.m; row += 8) multiply_rows<KIND, TERMS, 8>(matrix, inputs, panel, row, out, out_stride);
        if (inputs.m - row >= 4) multiply_rows<KIND, TERMS, 4>(matrix, inputs, panel, row, out, out_stride), row += 4;
        if (inputs.m - row >= 2) multiply_rows<KIND, TERMS, 2>(matrix, inputs, panel, row, out, out_stride), row += 2;
        if (inputs.m - row >= 1) multiply_rows<KIND, TERMS, 1>(matrix, inputs, panel, row, out, out_stride);
    }
}

template <int TERMS>
Multiply* multiply_of(int32_t kind) {
    return kind == INT4 ? multiply_all_rows<INT4, TERMS> : multiply_all_rows<INT8, TERMS>;
}

}  // namespace

void prepare_rounded_vnni(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    (inputs.terms == 1 ? round_rows<1> : round_rows<2>)(inputs, x, stride, row_begin, row_end);
}

void multiply_rounded_vnni(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    (inputs.terms == 1 ? multiply_of<1>(matrix.kind) : multiply_of<2>(matrix.kind))(matrix, inputs, out, out_stride, begin, end);
}

}  // namespace penstock
#endif
