// Activations as bytes, by AVX-512: in the form that linear_vnni.cpp multiplies.
//
// Four blocks at once: of four rows that will be multiplied side by side, or one after the other of a row by itself, which has the same steps, bit by bit. 16
// columns of them are words of four columns by block when they have been packed from 32 to 16 and to 8 bits: packing keeps to 128 bits, which are a word of a
// block at first and a word of all four blocks in the end.

#include "linear/linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

// Bits of 16 magnitudes, 0 where the mask has none.
PENSTOCK_INLINE __m512i magnitude_bits(__mmask16 mask, const float* x) {
    return _mm512_and_si512(_mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x)), _mm512_set1_epi32(0x7FFFFFFF));
}

PENSTOCK_INLINE __m512i rounded(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

// Of up to 4 rows or groups, from the bits of their largest magnitudes: a step, NaN where something was not a number, and its inverse, 0 where all is 0 or NaN.
template <int TERMS>
PENSTOCK_INLINE void find_steps(__m128i largest, __m128& step, __m128& inverse) {
    const __m128 most = _mm_castsi128_ps(largest), steps = _mm_set1_ps(TERMS == 1 ? MOST_STEPS_OF_ONE : MOST_STEPS);
    const __mmask8 is_number = _mm_cmplt_epi32_mask(largest, _mm_set1_epi32(NOT_FINITE));
    step = _mm_mask_blend_ps(is_number, _mm_set1_ps(__builtin_nanf("")), _mm_div_ps(most, steps));
    inverse = _mm_maskz_div_ps(_mm_mask_cmpge_epi32_mask(is_number, largest, _mm_set1_epi32(LEAST_ROUNDED)), steps, most);
}

PENSTOCK_INLINE __m512i largest_of(const float* x, int64_t count) {
    __m512i most = _mm512_setzero_si512();  // as bits: NaN is above all numbers
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_epu32(most, magnitude_bits(mask_of(count - i), x + i));
    return most;
}

PENSTOCK_INLINE __m128i largest_of_four(__m512i x) {
    const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// ---- four blocks

constexpr int SIDE_ROWS = 4;
// The last bits of a magnitude, which have its word's number while the largest is looked for. A step is so much too small by that: its 127th part, which is
// rounded to 127 all the same.
constexpr int32_t WORD = 7;
constexpr int64_t BLOCKS_KEPT = 8;  // of a group, whose largest are not looked for again
static_assert(SIDE_ROWS == 4 && BLOCK_K == 32, "a vector is four words of four blocks, a block two vectors");

enum Form { ONE, TWO, WITH_OUTLIERS };

// A row by itself has outliers as a second term.
constexpr int terms_of(Form form, bool is_row) { return form == TWO || (form == WITH_OUTLIERS && is_row) ? 2 : 1; }

// Blocks that are rounded together.
struct Blocks {
    const float* x[SIDE_ROWS];
    int64_t left[SIDE_ROWS];  // columns from x on that there are, of a block or more; none or fewer: there is no block
};

// Those of 16 columns from the `begin`-th on that there are.
PENSTOCK_INLINE __mmask16 mask_between(int64_t begin, int64_t left) { return left > begin ? mask_of(left - begin) : 0; }

// The number in its block of the word that a lane is in.
PENSTOCK_INLINE __m512i word_numbers(int half) {
    return _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * half));
}

// Of 16 lanes of each row: [4][4 rows], lane r the largest of row r's.
PENSTOCK_INLINE __m512i largest_by_row(const __m512i (&bits)[SIDE_ROWS]) {
    const __m512i upper = _mm512_max_epu32(_mm512_unpacklo_epi32(bits[0], bits[1]), _mm512_unpackhi_epi32(bits[0], bits[1]));
    const __m512i lower = _mm512_max_epu32(_mm512_unpacklo_epi32(bits[2], bits[3]), _mm512_unpackhi_epi32(bits[2], bits[3]));
    return _mm512_max_epu32(_mm512_unpacklo_epi64(upper, lower), _mm512_unpackhi_epi64(upper, lower));
}

// By row, the bits of the largest magnitude in columns [begin, end).
template <int R>
PENSTOCK_INLINE __m128i find_largest(const float* const (&rows)[SIDE_ROWS], int64_t begin, int64_t end) {
    __m512i bits[SIDE_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < SIDE_ROWS; r++) bits[r] = r < R ? largest_of(rows[r] + begin, end - begin) : _mm512_setzero_si512();
    return largest_of_four(largest_by_row(bits));
}

// By block: the bits of the largest magnitude, with its word's number, and those of the largest in other words.
struct Largest {
    __m128i first, next;
};

template <int R>
PENSTOCK_INLINE Largest find_outliers(const Blocks& blocks) {
    __m512i words[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i bits[SIDE_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < SIDE_ROWS; r++)
            bits[r] = r < R ? magnitude_bits(mask_between(16 * half, blocks.left[r]), blocks.x[r] + 16 * half) : _mm512_setzero_si512();
        words[half] = _mm512_or_si512(_mm512_andnot_si512(_mm512_set1_epi32(WORD), largest_by_row(bits)), word_numbers(half));
    }
    __m512i first = _mm512_max_epu32(words[0], words[1]), next = _mm512_min_epu32(words[0], words[1]);
    const __m512i far = _mm512_shuffle_i64x2(first, first, 0x4E), next_far = _mm512_shuffle_i64x2(next, next, 0x4E);
    next = _mm512_max_epu32(_mm512_min_epu32(first, far), _mm512_max_epu32(next, next_far)), first = _mm512_max_epu32(first, far);
    const __m512i near = _mm512_shuffle_i64x2(first, first, 0xB1), next_near = _mm512_shuffle_i64x2(next, next, 0xB1);
    next = _mm512_max_epu32(_mm512_min_epu32(first, near), _mm512_max_epu32(next, next_near)), first = _mm512_max_epu32(first, near);
    return {_mm512_castsi512_si128(first), _mm512_castsi512_si128(next)};
}

// `find_steps` of one term for groups with outliers: of their blocks' largest.
PENSTOCK_INLINE void find_steps_beside_outliers(Largest largest, __m128& step, __m128& inverse) {
    const __m128i first = _mm_andnot_si128(_mm_set1_epi32(WORD), largest.first), next = _mm_andnot_si128(_mm_set1_epi32(WORD), largest.next);
    const __m128 steps = _mm_max_ps(_mm_mul_ps(_mm_castsi128_ps(first), _mm_set1_ps(1 / MOST_STEPS)),
                                    _mm_mul_ps(_mm_castsi128_ps(next), _mm_set1_ps(1 / MOST_STEPS_OF_ONE)));
    const __mmask8 is_number = _mm_cmplt_epi32_mask(first, _mm_set1_epi32(NOT_FINITE));
    step = _mm_mask_blend_ps(is_number, _mm_set1_ps(__builtin_nanf("")), steps);
    inverse = _mm_maskz_div_ps(_mm_mask_cmpge_epi32_mask(is_number, first, _mm_set1_epi32(LEAST_ROUNDED)), _mm_set1_ps(1.0f), steps);
}

// The first R lanes.
template <int R>
PENSTOCK_INLINE void store_lanes(void* to, __m128i x) {
    if (R == 4)
        _mm_storeu_si128(static_cast<__m128i*>(to), x);
    else if (R >= 2)
        _mm_storel_epi64(static_cast<__m128i*>(to), x);
    if (R % 2 == 1) {
        const int32_t last = _mm_cvtsi128_si32(R == 1 ? x : _mm_unpackhi_epi64(x, x));
        memcpy(static_cast<char*>(to) + 4 * (R - 1), &last, sizeof last);
    }
}

// [4 words][4 rows][4 columns] of R rows in a tile of which a word takes `stride` bytes.
template <int R>
PENSTOCK_INLINE void store_words(int8_t* to, __m512i words, int64_t stride) {
    store_lanes<R>(to, _mm512_castsi512_si128(words));
    store_lanes<R>(to + stride, _mm512_extracti32x4_epi32(words, 1));
    store_lanes<R>(to + 2 * stride, _mm512_extracti32x4_epi32(words, 2));
    store_lanes<R>(to + 3 * stride, _mm512_extracti32x4_epi32(words, 3));
}

// [4 words][4 blocks][4 columns] of `count` blocks of a row.
PENSTOCK_INLINE void store_words_of_row(int8_t* to, __m512i words, int64_t count) {
    words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), words);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(words));
    if (count > 1) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + BLOCK_K), _mm512_extracti32x4_epi32(words, 1));
    if (count > 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * BLOCK_K), _mm512_extracti32x4_epi32(words, 2));
    if (count > 3) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 3 * BLOCK_K), _mm512_extracti32x4_epi32(words, 3));
}

// The same of high bytes and low ones.
PENSTOCK_INLINE void store_terms_of_row(int8_t* to, __m512i high, __m512i low, int64_t count) {
    const __m512i by_block = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i first = _mm512_permutexvar_epi64(by_block, _mm512_unpacklo_epi32(high, low));
    const __m512i second = _mm512_permutexvar_epi64(by_block, _mm512_unpackhi_epi32(high, low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(first));
    if (count > 1) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * BLOCK_K), _mm512_extracti64x4_epi64(first, 1));
    if (count > 2) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * BLOCK_K), _mm512_castsi512_si256(second));
    if (count > 3) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 6 * BLOCK_K), _mm512_extracti64x4_epi64(second, 1));
}

PENSTOCK_INLINE __m512i add_steps(__m512i sums, __m512i bytes) { return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), bytes); }

// The blocks of R rows in a tile of `width`, or, if IS_ROW, `width` of R of a row; adds [4 words][4 blocks] steps to `sums`. first: as in `Largest`, with
// outliers.
template <Form FORM, bool IS_ROW, int R>
PENSTOCK_INLINE void round_blocks(const Blocks& blocks, __m128 inverse, __m128i first, bool is_int4, int8_t* to, int64_t width, int32_t* outliers,
                                  __m512i& sums) {
    constexpr int TERMS = terms_of(FORM, IS_ROW);
    const __m512 inverses = _mm512_broadcast_f32x4(inverse);
    const __m128i word = _mm_and_si128(first, _mm_set1_epi32(WORD));
    const int64_t stride = 4 * TERMS * width;
    __m512i highs[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, to += IS_ROW ? 16 * TERMS : 4 * stride) {
        __m512i steps[SIDE_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < SIDE_ROWS; r++) {
            if (r >= R) {
                steps[r] = _mm512_setzero_si512();
                continue;
            }
            const __m512 factor = r == 0 ? _mm512_permute_ps(inverses, 0x00) : r == 1 ? _mm512_permute_ps(inverses, 0x55)
                                : r == 2 ? _mm512_permute_ps(inverses, 0xAA) : _mm512_permute_ps(inverses, 0xFF);
            steps[r] = rounded(_mm512_maskz_loadu_ps(mask_between(16 * half, blocks.left[r]), blocks.x[r] + 16 * half), factor);
        }
        const __m512i upper = _mm512_packs_epi32(steps[0], steps[1]), lower = _mm512_packs_epi32(steps[2], steps[3]);
        const __m512i bytes = _mm512_packs_epi16(upper, lower);
        __m512i low = bytes;
        if (FORM != ONE) {
            const __m512i half_step = _mm512_set1_epi16(LOW_STEPS / 2);
            const __m512i upper_high = _mm512_srai_epi16(_mm512_add_epi16(upper, half_step), LOW_BITS);
            const __m512i lower_high = _mm512_srai_epi16(_mm512_add_epi16(lower, half_step), LOW_BITS);
            highs[half] = _mm512_packs_epi16(upper_high, lower_high);
            low = _mm512_packs_epi16(_mm512_sub_epi16(upper, _mm512_slli_epi16(upper_high, LOW_BITS)),
                                     _mm512_sub_epi16(lower, _mm512_slli_epi16(lower_high, LOW_BITS)));
        }
        if (FORM == WITH_OUTLIERS) {
            const __mmask16 is_outlier = _mm512_cmpeq_epi32_mask(_mm512_broadcast_i32x4(word), word_numbers(half));
            low = _mm512_mask_blend_epi32(is_outlier, bytes, low);
            highs[half] = _mm512_maskz_mov_epi32(is_outlier, highs[half]);
        }
        if (TERMS == 2 && IS_ROW) {
            store_terms_of_row(to, highs[half], low, width);
        } else if (IS_ROW) {
            store_words_of_row(to, low, width);
        } else {
            if (TERMS == 2) store_words<R>(to, highs[half], stride);
            store_words<R>(to + (TERMS - 1) * 4 * width, low, stride);
        }
        sums = add_steps(sums, low);
        if (FORM != ONE) sums = _mm512_add_epi32(sums, _mm512_slli_epi32(add_steps(_mm512_setzero_si512(), highs[half]), LOW_BITS));
    }
    if (FORM != WITH_OUTLIERS || IS_ROW) return;
    const __m128i place = _mm_add_epi32(_mm_slli_epi32(word, 2), _mm_setr_epi32(0, 1, 2, 3));
    const __m128i high = _mm512_castsi512_si128(_mm512_permutex2var_epi32(highs[0], _mm512_zextsi128_si512(place), highs[1]));
    // INT4 has two words in a vector, the second one in high nibbles: 16 times as much
    const __m128i nibble = is_int4 ? _mm_slli_epi32(_mm_and_si128(word, _mm_set1_epi32(1)), 2) : _mm_setzero_si128();
    const int64_t places = outlier_places(width);
    constexpr int LANES = static_cast<int>(outlier_places(R));
    store_lanes<LANES>(outliers + HIGH * places, high);
    store_lanes<LANES>(outliers + MASK * places, _mm_sllv_epi32(_mm_set1_epi32(0x0F0F0F0F), nibble));
    store_lanes<LANES>(outliers + SHIFT * places, _mm_sub_epi32(_mm_set1_epi32(LOW_BITS), nibble));
    store_lanes<LANES>(outliers + PLACE * places, _mm_slli_epi32(is_int4 ? _mm_srli_epi32(word, 1) : word, 6));
}

// Of all words, by block.
PENSTOCK_INLINE __m128i add_words(__m512i sums) {
    const __m256i pairs = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

// ---- a row by itself

PENSTOCK_INLINE Blocks blocks_of_row(const float* x, int64_t begin, int64_t end) {
    Blocks blocks;
#pragma GCC unroll 4
    for (int i = 0; i < SIDE_ROWS; i++) blocks.x[i] = x + begin + i * BLOCK_K, blocks.left[i] = end - begin - i * BLOCK_K;
    return blocks;
}

// By block, as far as the form asks for it.
template <Form FORM>
PENSTOCK_INLINE Largest find_in_row(const Blocks& blocks) {
    if (FORM == WITH_OUTLIERS) return find_outliers<SIDE_ROWS>(blocks);
    __m512i bits[SIDE_ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < SIDE_ROWS; i++) {
        bits[i] = _mm512_max_epu32(magnitude_bits(mask_between(0, blocks.left[i]), blocks.x[i]), magnitude_bits(mask_between(16, blocks.left[i]), blocks.x[i] + 16));
    }
    return {largest_of_four(largest_by_row(bits)), _mm_setzero_si128()};
}

PENSTOCK_INLINE __m128i max_of_lanes(__m128i x) {
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
}

PENSTOCK_INLINE __m128i sum_of_lanes(__m128i x) {
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xB1));
}

// Groups of a block go four at a time, each in a lane of its own; of longer ones a group has all lanes.
template <Form FORM>
PENSTOCK_AVX512 void round_row(const Inputs& inputs, const float* x, int64_t row) {
    constexpr int TERMS = terms_of(FORM, true);
    constexpr int64_t SPAN = SIDE_ROWS * BLOCK_K;
    const bool are_blocks = inputs.group == BLOCK_K;
    int8_t* q = inputs.q + TERMS * row * inputs.k_padded;
    float *to_step = inputs.step + row * inputs.num_groups, *to_sum = inputs.sum + row * inputs.num_groups;
    __m128 step = _mm_set1_ps(1.0f), inverse;
    if (FORM == TWO) {
        __m128 of_row;
        find_steps<2>(_mm_set1_epi32(static_cast<int32_t>(_mm512_reduce_max_epu32(largest_of(x, inputs.k)))), of_row, inverse);
        inputs.step[row] = _mm_cvtss_f32(of_row);
    }
    const int64_t width = are_blocks ? SPAN : inputs.group;
    for (int64_t begin = 0; begin < inputs.k; begin += width) {
        const int64_t end = smaller(inputs.k, begin + width);
        Largest found = {_mm_setzero_si128(), _mm_setzero_si128()};
        if (FORM != TWO) {
            Largest largest = found;
            for (int64_t i = begin; i < end; i += SPAN) {
                found = find_in_row<FORM>(blocks_of_row(x, i, end));
                largest = {_mm_max_epu32(largest.first, found.first), _mm_max_epu32(largest.next, found.next)};
            }
            if (!are_blocks) largest = {max_of_lanes(largest.first), max_of_lanes(largest.next)};
            if (FORM == ONE)
                find_steps<1>(largest.first, step, inverse);
            else
                find_steps_beside_outliers(largest, step, inverse);
        }
        __m512i sums = _mm512_setzero_si512();
        for (int64_t i = begin; i < end; i += SPAN) {
            const Blocks blocks = blocks_of_row(x, i, end);
            const int64_t count = smaller(SIDE_ROWS, (end - i + BLOCK_K - 1) / BLOCK_K);
            if (FORM == WITH_OUTLIERS && end - begin > SPAN) found = find_in_row<FORM>(blocks);
            round_blocks<FORM, true, SIDE_ROWS>(blocks, inverse, found.first, false, q, count, nullptr, sums);
            q += TERMS * count * BLOCK_K;
        }
        const __m128i sum = are_blocks ? add_words(sums) : sum_of_lanes(add_words(sums));
        const int64_t groups = are_blocks ? (end - begin + BLOCK_K - 1) / BLOCK_K : 1, group = begin / inputs.group;
        const __mmask8 mask = static_cast<__mmask8>((1 << groups) - 1);
        if (FORM != TWO) _mm_mask_storeu_ps(to_step + group, mask, step);
        _mm_mask_storeu_ps(to_sum + group, mask, _mm_mul_ps(step, _mm_cvtepi32_ps(sum)));
    }
}

// ---- rows side by side

// The block of R rows from column `begin` on.
template <int R>
PENSTOCK_INLINE Blocks blocks_of(const float* const (&rows)[SIDE_ROWS], int64_t begin, int64_t end) {
    Blocks blocks = {};
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) blocks.x[r] = rows[r] + begin, blocks.left[r] = end - begin;
    return blocks;
}

// R rows from the `first` one of a tile on, which has `width` rows from `row` on.
template <Form FORM, int R>
PENSTOCK_AVX512 void round_side(const Inputs& inputs, const float* x, int64_t stride, int64_t row, int64_t width, int64_t first) {
    const float* rows[SIDE_ROWS] = {};
    for (int r = 0; r < R; r++) rows[r] = x + (row + first + r) * stride;
    constexpr int TERMS = terms_of(FORM, false);
    int8_t* q = inputs.q + TERMS * row * inputs.k_padded + 4 * first;
    int32_t* outliers = inputs.outliers + row * (inputs.k_padded / BLOCK_K) * OUTLIER_FIELDS + first;
    __m128 step = _mm_set1_ps(1.0f), inverse;
    if (FORM == TWO) {
        __m128 of_row;
        find_steps<2>(find_largest<R>(rows, 0, inputs.k), of_row, inverse);
        store_lanes<R>(inputs.step + row + first, _mm_castps_si128(of_row));
    }
    for (int64_t group = 0; group < inputs.num_groups; group++) {
        const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
        const int64_t place = row * inputs.num_groups + group * width + first;
        __m128i kept[BLOCKS_KEPT];
        if (FORM == ONE) find_steps<1>(find_largest<R>(rows, begin, end), step, inverse);
        if (FORM == WITH_OUTLIERS) {
            Largest largest = {_mm_setzero_si128(), _mm_setzero_si128()};
            for (int64_t i = begin, block = 0; i < end; i += BLOCK_K, block++) {
                const Largest found = find_outliers<R>(blocks_of<R>(rows, i, end));
                if (block < BLOCKS_KEPT) kept[block] = found.first;
                largest = {_mm_max_epu32(largest.first, found.first), _mm_max_epu32(largest.next, found.next)};
            }
            find_steps_beside_outliers(largest, step, inverse);
        }
        if (FORM != TWO) store_lanes<R>(inputs.step + place, _mm_castps_si128(step));
        __m512i sums = _mm512_setzero_si512();
        for (int64_t i = begin, block = 0; i < end; i += BLOCK_K, block++, q += TERMS * width * BLOCK_K) {
            const Blocks blocks = blocks_of<R>(rows, i, end);
            __m128i largest = _mm_setzero_si128();
            if (FORM == WITH_OUTLIERS) largest = block < BLOCKS_KEPT ? kept[block] : find_outliers<R>(blocks).first;
            round_blocks<FORM, false, R>(blocks, inverse, largest, inputs.kind == INT4, q, width, outliers, sums);
            if (FORM == WITH_OUTLIERS) outliers += OUTLIER_FIELDS * outlier_places(width);
        }
        store_lanes<R>(inputs.sum + place, _mm_castps_si128(_mm_mul_ps(step, _mm_cvtepi32_ps(add_words(sums)))));
    }
}

// Rows are prepared side by side as they are multiplied, but no more than four at once.
template <Form FORM>
void round_rows(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    const int64_t last = last_tile(inputs);
    for (int64_t row = row_begin; row < row_end; row += SIDE_ROWS) {
        const int64_t tile = row < last ? row / TILE_M * TILE_M : last, width = row < last ? TILE_M : inputs.m - last, left = row_end - row;
        if (width == 1 && (FORM != WITH_OUTLIERS || inputs.m == 1))
            round_row<FORM>(inputs, x + row * stride, row);
        else if (left >= SIDE_ROWS)
            round_side<FORM, SIDE_ROWS>(inputs, x, stride, tile, width, row - tile);
        else
            with_rest(left, [&](auto rest) {
                if constexpr (rest < SIDE_ROWS) round_side<FORM, rest>(inputs, x, stride, tile, width, row - tile);
            });
    }
}

}  // namespace

void prepare_rounded_vnni(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    const auto round = inputs.has_outliers ? round_rows<WITH_OUTLIERS> : inputs.terms == 1 ? round_rows<ONE> : round_rows<TWO>;
    round(inputs, x, stride, row_begin, row_end);
}

}  // namespace penstock
#endif
