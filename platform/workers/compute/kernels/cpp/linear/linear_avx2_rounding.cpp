// Activations as bytes, by AVX2: in the form that linear_avx2.cpp multiplies, which is that of AVX-512 (linear_vnni_rounding.cpp).
//
// Rows that will be multiplied side by side are rounded side by side: what stands at one place of their vectors comes to stand in one vector.

#include "linear/linear_avx2.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

PENSTOCK_AVX2_INLINE __m256i magnitude_bits(const float* x) {
    return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), _mm256_set1_epi32(0x7FFFFFFF));
}

PENSTOCK_AVX2_INLINE __m256i max_of_four(__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
}

// As bits, by lane, of a block of 32 columns; NaN is above all numbers.
PENSTOCK_AVX2_INLINE __m256i largest_of_block(const float* x) {
    return max_of_four(magnitude_bits(x), magnitude_bits(x + 8), magnitude_bits(x + 16), magnitude_bits(x + 24));
}

// Lane r: the largest lane of x[r].
PENSTOCK_AVX2_INLINE __m256i largest_of_each(const __m256i (&x)[8]) {
    __m256i pairs[4], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        fours[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    return _mm256_max_epu32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20), _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

// Of 8 rows or groups, from the bits of their largest magnitudes: a step, NaN where something was not a number, and its inverse, 0 where all is 0 or NaN.
template <int TERMS>
PENSTOCK_AVX2_INLINE void find_steps(__m256i largest, __m256& step, __m256& inverse) {
    const __m256 most = _mm256_castsi256_ps(largest), steps = _mm256_set1_ps(TERMS == 1 ? MOST_STEPS_OF_ONE : MOST_STEPS);
    const __m256i is_number = _mm256_cmpgt_epi32(_mm256_set1_epi32(NOT_FINITE), largest);
    const __m256i is_rounded = _mm256_and_si256(is_number, _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(LEAST_ROUNDED - 1)));
    step = _mm256_blendv_ps(_mm256_set1_ps(__builtin_nanf("")), _mm256_div_ps(most, steps), _mm256_castsi256_ps(is_number));
    inverse = _mm256_and_ps(_mm256_div_ps(steps, most), _mm256_castsi256_ps(is_rounded));
}

// 16 activations in whole steps of 16 bits: lanes 0-3 and 8-11, then 4-7 and 12-15.
PENSTOCK_AVX2_INLINE __m256i sixteen_rounded(const float* x, __m256 inverse) {
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse)));
}

// 32 activations as bytes, in one term or in two. Words of four columns come to stand in the order 0, 2, 4, 6, 1, 3, 5, 7.
template <int TERMS>
PENSTOCK_AVX2_INLINE void round_32(const float* x, __m256 inverse, __m256i& upper, __m256i& low) {
    const __m256i first = sixteen_rounded(x, inverse), second = sixteen_rounded(x + 16, inverse);
    if (TERMS == 1) {
        upper = _mm256_packs_epi16(first, second);
        return;
    }
    const __m256i half = _mm256_set1_epi16(LOW_STEPS / 2);
    const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(first, half), LOW_BITS), high2 = _mm256_srai_epi16(_mm256_add_epi16(second, half), LOW_BITS);
    upper = _mm256_packs_epi16(high, high2);
    low = _mm256_packs_epi16(_mm256_sub_epi16(first, _mm256_slli_epi16(high, LOW_BITS)), _mm256_sub_epi16(second, _mm256_slli_epi16(high2, LOW_BITS)));
}

// Sums of each four bytes, `factor` times.
PENSTOCK_AVX2_INLINE __m256i sums_of_four(__m256i bytes, int factor) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(static_cast<int16_t>(factor)));
}

// Words: to[w] lane r is word w of from[r], where those stand as round_32 leaves them.
PENSTOCK_AVX2_INLINE void transpose_words(const __m256i (&from)[8], __m256i (&to)[8]) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(from[i], from[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(from[i], from[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[2 * i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        to[2 * i + 1] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

// The first R lanes.
template <int R>
PENSTOCK_AVX2_INLINE void store_lanes(void* to, __m256i x) {
    if (R == 8)
        _mm256_storeu_si256(static_cast<__m256i*>(to), x);
    else if (R == 4)
        _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(x));
    else if (R == 2)
        _mm_storel_epi64(static_cast<__m128i*>(to), _mm256_castsi256_si128(x));
    else if (R == 1)
        memcpy(to, &x, 4);
    else
        _mm256_maskstore_epi32(static_cast<int*>(to), _mm256_setr_epi32(-1, -1, -1, -(R > 3), -(R > 4), -(R > 5), -(R > 6), 0), x);
}

// 32 columns of rows side by side; adds each row's steps to `sum`.
template <int TERMS, int R>
PENSTOCK_AVX2_INLINE void round_block(const float* const (&x)[8], const float* inverse, int8_t* to, __m256i& sum) {
    __m256i upper[8], low[8], words[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        if (r < R)
            round_32<TERMS>(x[r], _mm256_set1_ps(inverse[r]), upper[r], low[r]);
        else
            upper[r] = low[r] = _mm256_setzero_si256();
    }
    transpose_words(upper, words);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
        store_lanes<R>(to + TERMS * w * 4 * R, words[w]);
        sum = _mm256_add_epi32(sum, sums_of_four(words[w], TERMS == 1 ? 1 : LOW_STEPS));
    }
    if (TERMS == 1) return;
    transpose_words(low, words);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
        store_lanes<R>(to + (2 * w + 1) * 4 * R, words[w]);
        sum = _mm256_add_epi32(sum, sums_of_four(words[w], 1));
    }
}

// Steps of columns [begin, end) of R rows, whose block at a column block_of(r, column) is.
template <int TERMS, int R, typename BlockOf>
PENSTOCK_AVX2_INLINE __m256 find_steps(BlockOf block_of, int64_t begin, int64_t end, float* inverses) {
    __m256i most[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        most[r] = _mm256_setzero_si256();
        if (r < R)
            for (int64_t i = begin; i < end; i += BLOCK_K) most[r] = _mm256_max_epu32(most[r], largest_of_block(block_of(r, i)));
    }
    __m256 step, inverse;
    find_steps<TERMS>(largest_of_each(most), step, inverse);
    _mm256_store_ps(inverses, inverse);
    return step;
}

// R rows from `row` on.
template <int TERMS, int R>
PENSTOCK_AVX2 void round_tile(const Inputs& inputs, const float* x, int64_t stride, int64_t row) {
    const int64_t whole = inputs.k / BLOCK_K * BLOCK_K;  // columns in whole blocks; behind a short one are zeros
    alignas(32) float last[R][BLOCK_K] = {};
    for (int r = 0; r < R; r++) memcpy(last[r], x + (row + r) * stride + whole, sizeof(float) * static_cast<size_t>(inputs.k - whole));
    const auto block_of = [&](int r, int64_t column) { return column < whole ? x + (row + r) * stride + column : last[r]; };
    alignas(32) float inverses[8];
    int8_t* q = inputs.q + TERMS * row * inputs.k_padded;
    if (TERMS == 2) store_lanes<R>(inputs.step + row, _mm256_castps_si256(find_steps<TERMS, R>(block_of, 0, inputs.k, inverses)));
    for (int64_t group = 0; group < inputs.num_groups; group++) {
        const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
        const int64_t place = row * inputs.num_groups + group * R;
        __m256 step = _mm256_set1_ps(1.0f);
        if (TERMS == 1) {
            step = find_steps<TERMS, R>(block_of, begin, end, inverses);
            store_lanes<R>(inputs.step + place, _mm256_castps_si256(step));
        }
        __m256i sum = _mm256_setzero_si256();
        for (int64_t i = begin; i < end; i += BLOCK_K, q += TERMS * R * BLOCK_K) {
            const float* block[8];
            for (int r = 0; r < 8; r++) block[r] = block_of(r < R ? r : 0, i);
            round_block<TERMS, R>(block, inverses, q, sum);
        }
        store_lanes<R>(inputs.sum + place, _mm256_castps_si256(_mm256_mul_ps(step, _mm256_cvtepi32_ps(sum))));
    }
}

// Rows are prepared and multiplied R at a time: as many eights as there are, then the rest.
template <int TERMS>
void round_rows(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    int64_t row = row_begin;
    for (; row + 8 <= row_end; row += 8) round_tile<TERMS, 8>(inputs, x, stride, row);
    with_rest(row_end - row, [&](auto rest) { round_tile<TERMS, rest>(inputs, x, stride, row); });
}

}  // namespace

void prepare_rounded_avx2(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    (inputs.terms == 1 ? round_rows<1> : round_rows<2>)(inputs, x, stride, row_begin, row_end);
}

}  // namespace penstock
#endif
