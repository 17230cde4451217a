// Activations as bytes, by AVX-512: in the form that linear_vnni.cpp multiplies.
//
// Rows that will be multiplied side by side are rounded side by side, and what stands at one place of eight vectors comes to stand in one vector. A row by
// itself has the same steps, bit by bit.

#include "linear/linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

// ---- one row

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

// Of up to 8 rows or groups, from the bits of their largest magnitudes: a step, NaN where something was not a number, and its inverse, 0 where all is 0 or NaN.
template <int TERMS>
PENSTOCK_INLINE void find_steps(__m256i largest, __m256& step, __m256& inverse) {
    const __m256 most = _mm256_castsi256_ps(largest), steps = _mm256_set1_ps(TERMS == 1 ? MOST_STEPS_OF_ONE : MOST_STEPS);
    const __mmask8 is_number = _mm256_cmplt_epi32_mask(largest, _mm256_set1_epi32(NOT_FINITE));
    step = _mm256_mask_blend_ps(is_number, _mm256_set1_ps(__builtin_nanf("")), _mm256_div_ps(most, steps));
    inverse = _mm256_maskz_div_ps(_mm256_mask_cmpge_epi32_mask(is_number, largest, _mm256_set1_epi32(LEAST_ROUNDED)), steps, most);
}

// The same of up to 4.
template <int TERMS>
PENSTOCK_INLINE void find_steps(__m128i largest, __m128& step, __m128& inverse) {
    __m256 steps, inverses;
    find_steps<TERMS>(_mm256_zextsi128_si256(largest), steps, inverses);
    step = _mm256_castps256_ps128(steps), inverse = _mm256_castps256_ps128(inverses);
}

PENSTOCK_INLINE __m512i largest_of(const float* x, int64_t count) {
    __m512i most = _mm512_setzero_si512();  // as bits: NaN is above all numbers
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_epu32(most, magnitude_bits(mask_of(count - i), x + i));
    return most;
}

// `inverse`: of the row's step, with two terms.
template <int TERMS>
PENSTOCK_INLINE void round_group(const Inputs& inputs, const float* x, int64_t row, int64_t group, __m128 inverse) {
    const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group), place = row * inputs.num_groups + group;
    __m128 step = _mm_set_ss(1.0f);
    if (TERMS == 1) {
        find_steps<TERMS>(_mm_cvtsi32_si128(static_cast<int32_t>(_mm512_reduce_max_epu32(largest_of(x + begin, end - begin)))), step, inverse);
        inputs.step[place] = _mm_cvtss_f32(step);
    }
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < smaller(inputs.k_padded, begin + inputs.group); i += 16) {
        const __m512i steps = rounded(_mm512_maskz_loadu_ps(i < end ? mask_of(end - i) : 0, x + i), _mm512_broadcastss_ps(inverse));
        sum = _mm512_add_epi32(sum, steps);
        store_rounded<TERMS>(inputs.q + TERMS * (row * inputs.k_padded + i), steps);
    }
    inputs.sum[place] = _mm_cvtss_f32(step) * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

PENSTOCK_INLINE __m256i halves_max(__m512i x) { return _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)); }

PENSTOCK_INLINE __m128i largest_of_four(__m512i x) {
    const __m256i half = halves_max(x);
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Of one term: of each of four whole groups of 32 columns. Their maxima are brought together instead of one after the other.
PENSTOCK_INLINE void find_four_steps(const float* x, __m128& step, __m128& inverse) {
    __m128i most[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most[i] = largest_of_four(_mm512_max_epu32(magnitude_bits(0xFFFF, x + 32 * i), magnitude_bits(0xFFFF, x + 32 * i + 16)));
    const __m128i first = _mm_max_epu32(_mm_unpacklo_epi32(most[0], most[1]), _mm_unpackhi_epi32(most[0], most[1]));
    const __m128i second = _mm_max_epu32(_mm_unpacklo_epi32(most[2], most[3]), _mm_unpackhi_epi32(most[2], most[3]));
    find_steps<1>(_mm_max_epu32(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second)), step, inverse);
}

// Four whole groups of 32 columns at once, their sums too.
template <int TERMS>
PENSTOCK_INLINE void round_four_groups(const Inputs& inputs, const float* x, int64_t row, int64_t group, __m128 inverse) {
    const int64_t begin = group * 32, place = row * inputs.num_groups + group;
    __m128 step = _mm_set1_ps(1.0f);
    if (TERMS == 1) {
        find_four_steps(x + begin, step, inverse);
        _mm_storeu_ps(inputs.step + place, step);
    }
    alignas(16) float inverses[4];
    _mm_store_ps(inverses, inverse);
    int8_t* q = inputs.q + TERMS * (row * inputs.k_padded + begin);
    __m128i sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 factor = TERMS == 1 ? _mm512_set1_ps(inverses[i]) : _mm512_broadcastss_ps(inverse);
        const __m512i left = rounded(_mm512_loadu_ps(x + begin + 32 * i), factor), right = rounded(_mm512_loadu_ps(x + begin + 32 * i + 16), factor);
        store_rounded<TERMS>(q + TERMS * 32 * i, left);
        store_rounded<TERMS>(q + TERMS * (32 * i + 16), right);
        const __m512i both = _mm512_add_epi32(left, right);
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        sums[i] = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
    const __m128i sum = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]));
    _mm_storeu_ps(inputs.sum + place, _mm_mul_ps(step, _mm_cvtepi32_ps(sum)));
}

template <int TERMS>
PENSTOCK_AVX512 void round_row(const Inputs& inputs, const float* x, int64_t row) {
    __m128 inverse = _mm_setzero_ps();
    if (TERMS == 2) {
        __m128 step;
        find_steps<TERMS>(_mm_cvtsi32_si128(static_cast<int32_t>(_mm512_reduce_max_epu32(largest_of(x, inputs.k)))), step, inverse);
        inputs.step[row] = _mm_cvtss_f32(step);
    }
    int64_t group = 0;
    if (inputs.group == 32)
        for (; (group + 4) * 32 <= inputs.k; group += 4) round_four_groups<TERMS>(inputs, x, row, group, inverse);
    for (; group < inputs.num_groups; group++) round_group<TERMS>(inputs, x, row, group, inverse);
}

// ---- rows side by side

// Lane r: the largest lane of x[r].
PENSTOCK_INLINE __m256i largest_of_each(const __m512i (&x)[8]) {
    __m256i pairs[4], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i even = halves_max(x[2 * i]), odd = halves_max(x[2 * i + 1]);
        pairs[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(even, odd), _mm256_unpackhi_epi32(even, odd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        fours[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    return _mm256_max_epu32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20), _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

// Words: to[w] lane r is word w of from[r].
PENSTOCK_INLINE void transpose_words(const __m256i (&from)[8], __m256i (&to)[8]) {
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
        to[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        to[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

// The first R lanes.
template <int R>
PENSTOCK_INLINE void store_lanes(void* to, __m256i x) {
    if (R == 8)
        _mm256_storeu_si256(static_cast<__m256i*>(to), x);
    else if (R == 4)
        _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(x));
    else
        _mm256_mask_storeu_epi32(to, static_cast<__mmask8>((1u << R) - 1), x);
}

// 32 columns of R rows side by side, `left` of them there, in a tile of `width` rows; adds each row's steps to `sum`.
template <int TERMS, int R>
PENSTOCK_INLINE void round_block(const float* const (&x)[8], int64_t left, const float* inverse, int8_t* to, int64_t width, __m256i& sum) {
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i upper[8], low[8], words[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        if (r >= R) {
            upper[r] = low[r] = _mm256_setzero_si256();
            continue;
        }
        const __m512 factor = _mm512_set1_ps(inverse[r]);
        const __m512i first = rounded(_mm512_maskz_loadu_ps(mask_of(left), x[r]), factor);
        const __m512i second = rounded(_mm512_maskz_loadu_ps(left > 16 ? mask_of(left - 16) : 0, x[r] + 16), factor);
        if (TERMS == 1) {
            upper[r] = _mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first));
            continue;
        }
        const __m512i half = _mm512_set1_epi32(LOW_STEPS / 2);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(first, half), LOW_BITS), high2 = _mm512_srai_epi32(_mm512_add_epi32(second, half), LOW_BITS);
        upper[r] = _mm256_set_m128i(_mm512_cvtepi32_epi8(high2), _mm512_cvtepi32_epi8(high));
        low[r] = _mm256_set_m128i(_mm512_cvtepi32_epi8(_mm512_sub_epi32(second, _mm512_slli_epi32(high2, LOW_BITS))),
                                  _mm512_cvtepi32_epi8(_mm512_sub_epi32(first, _mm512_slli_epi32(high, LOW_BITS))));
    }
    __m256i added = _mm256_setzero_si256();
    transpose_words(upper, words);
#pragma GCC unroll 8
    for (int w = 0; w < 8; w++) {
        store_lanes<R>(to + TERMS * w * 4 * width, words[w]);
        added = _mm256_dpbusd_epi32(added, ones, words[w]);
    }
    if (TERMS == 2) {
        added = _mm256_slli_epi32(added, LOW_BITS);
        transpose_words(low, words);
#pragma GCC unroll 8
        for (int w = 0; w < 8; w++) {
            store_lanes<R>(to + (2 * w + 1) * 4 * width, words[w]);
            added = _mm256_dpbusd_epi32(added, ones, words[w]);
        }
    }
    sum = _mm256_add_epi32(sum, added);
}

// Steps of columns [begin, end) of R rows.
template <int TERMS, int R>
PENSTOCK_INLINE __m256 find_steps(const float* const (&rows)[8], int64_t begin, int64_t end, float* inverses) {
    __m512i most[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) most[r] = r < R ? largest_of(rows[r] + begin, end - begin) : _mm512_setzero_si512();
    __m256 step, inverse;
    find_steps<TERMS>(largest_of_each(most), step, inverse);
    _mm256_store_ps(inverses, inverse);
    return step;
}

// R rows from the `first` one of a tile on, which has `width` rows from `row` on. Lanes without a row are zeros, and not stored.
template <int TERMS, int R>
PENSTOCK_AVX512 void round_tile(const Inputs& inputs, const float* x, int64_t stride, int64_t row, int64_t width, int64_t first) {
    const float* rows[8] = {};
    for (int r = 0; r < R; r++) rows[r] = x + (row + first + r) * stride;
    int8_t* q = inputs.q + TERMS * row * inputs.k_padded + 4 * first;
    alignas(32) float inverses[8];
    if (TERMS == 2) store_lanes<R>(inputs.step + row + first, _mm256_castps_si256(find_steps<TERMS, R>(rows, 0, inputs.k, inverses)));
    for (int64_t group = 0; group < inputs.num_groups; group++) {
        const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
        const int64_t place = row * inputs.num_groups + group * width + first;
        __m256 step = _mm256_set1_ps(1.0f);
        if (TERMS == 1) {
            step = find_steps<TERMS, R>(rows, begin, end, inverses);
            store_lanes<R>(inputs.step + place, _mm256_castps_si256(step));
        }
        __m256i sum = _mm256_setzero_si256();
        for (int64_t i = begin; i < end; i += BLOCK_K, q += TERMS * width * BLOCK_K) {
            const float* block[8] = {};
            for (int r = 0; r < R; r++) block[r] = rows[r] + i;
            round_block<TERMS, R>(block, end - i, inverses, q, width, sum);
        }
        store_lanes<R>(inputs.sum + place, _mm256_castps_si256(_mm256_mul_ps(step, _mm256_cvtepi32_ps(sum))));
    }
}

// Rows are prepared side by side as they are multiplied, but no more than eight at once.
template <int TERMS>
void round_rows(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    const int64_t last = last_tile(inputs);
    for (int64_t row = row_begin; row < row_end; row += 8) {
        const int64_t tile = smaller(row, last), width = row < last ? TILE_M : inputs.m - last, left = smaller(row_end - row, 8);
        if (width == 1)
            round_row<TERMS>(inputs, x + row * stride, row);
        else if (left == 8)
            round_tile<TERMS, 8>(inputs, x, stride, tile, width, row - tile);
        else
            with_rest(left, [&](auto rest) { round_tile<TERMS, rest>(inputs, x, stride, tile, width, row - tile); });
    }
}

}  // namespace

void prepare_rounded_vnni(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    (inputs.terms == 1 ? round_rows<1> : round_rows<2>)(inputs, x, stride, row_begin, row_end);
}

}  // namespace penstock
#endif
