// What adapters in 8 bits add to the products of a step (low_rank.hpp), as products of integers: x and x A^T are rounded to 16 bits, with steps for every
// 64 columns and every 16 ranks, so that what is lost is what 8 bits of A and B lose.
//
// Sums of 64 or 16 products are exact; levels differ by the order in which float32 adds such sums up.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "decoder/low_rank_layout.hpp"

namespace penstock {

// 2 W numbers of 16 bits; products of two are added to each other and to one of W sums.
#if defined(__AVX512BW__)
typedef __m512i Words;
inline Words load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Words widen(const char* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Words all_pairs(int32_t pair) { return _mm512_set1_epi32(pair); }
inline Words no_sums() { return _mm512_setzero_si512(); }
#if defined(__AVX512VNNI__)
inline Words add_products(Words sums, Words a, Words b) { return _mm512_dpwssd_epi32(sums, a, b); }
#else
inline Words add_products(Words sums, Words a, Words b) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }
#endif
inline Vec to_floats(Words sums) { return _mm512_cvtepi32_ps(sums); }
inline void store_rounded(int16_t* to, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
inline Vec bf16_to_floats(const char* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i Words;
inline Words load_words(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Words widen(const char* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Words all_pairs(int32_t pair) { return _mm256_set1_epi32(pair); }
inline Words no_sums() { return _mm256_setzero_si256(); }
inline Words add_products(Words sums, Words a, Words b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
inline Vec to_floats(Words sums) { return _mm256_cvtepi32_ps(sums); }
inline void store_rounded(int16_t* to, Vec x) {
    const __m256i rounded = _mm256_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
inline Vec bf16_to_floats(const char* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
#else
struct Words {
    int16_t of[2 * W];
};
struct Sums {
    int32_t of[W];
};
inline Words load_words(const int16_t* p) {
    Words x;
    memcpy(x.of, p, sizeof x.of);
    return x;
}
inline Words widen(const char* p) {
    Words x;
    for (int i = 0; i < 2 * W; i++) x.of[i] = static_cast<int8_t>(p[i]);
    return x;
}
inline Words all_pairs(int32_t pair) {
    Words x;
    for (int i = 0; i < W; i++) memcpy(x.of + 2 * i, &pair, sizeof pair);
    return x;
}
inline Sums no_sums() { return {}; }
inline Sums add_products(Sums sums, const Words& a, const Words& b) {
    for (int i = 0; i < W; i++) sums.of[i] += a.of[2 * i] * b.of[2 * i] + a.of[2 * i + 1] * b.of[2 * i + 1];
    return sums;
}
inline Vec to_floats(const Sums& sums) {
    Vec x;
    for (int i = 0; i < W; i++) x[i] = static_cast<float>(sums.of[i]);
    return x;
}
inline void store_rounded(int16_t* to, Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to the nearest integer, which its low bits are
    const Vec shifted = x + magic;
    int32_t bits[W];
    memcpy(bits, &shifted, sizeof bits);
    for (int i = 0; i < W; i++) to[i] = static_cast<int16_t>(bits[i]);
}
inline Vec bf16_to_floats(const char* p) {
    uint16_t halves[W];
    memcpy(halves, p, sizeof halves);
    Vec x;
    for (int i = 0; i < W; i++) x[i] = from_bf16(halves[i]);
    return x;
}
#endif
using Accumulator = decltype(no_sums());

constexpr int64_t NUMBERS = 2 * W;
constexpr int64_t COLUMNS = 64;        // that share a step
constexpr int64_t STRIP = 32 * COLUMNS;  // columns that are rounded at once
constexpr float LARGEST = 32767;

// Of `count` numbers, a multiple of W. They are compared by their bits, by which NaN is above all numbers.
inline float largest_magnitude(const float* x, int64_t count) {
    IVec most = {};
    for (int64_t i = 0; i < count; i += W) {
        const IVec size = reinterpret_cast<IVec>(load(x + i)) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    typedef int32_t Quad __attribute__((vector_size(16)));
    Quad quads[W / 4];
    memcpy(quads, &most, sizeof most);
    for (int n = W / 8; n > 0; n /= 2)
        for (int j = 0; j < n; j++) quads[j] = quads[j + n] > quads[j] ? quads[j + n] : quads[j];
    const int32_t even = quads[0][0] > quads[0][2] ? quads[0][0] : quads[0][2], odd = quads[0][1] > quads[0][3] ? quads[0][1] : quads[0][3];
    return from_bits(static_cast<uint32_t>(even > odd ? even : odd));
}

// Rounds `count` numbers, a multiple of W, and returns their step. Where one is infinite or NaN the step is.
inline float round_words(const float* x, int64_t count, int16_t* to) {
    const float most = largest_magnitude(x, count);
    const Vec inverse = splat(most > 0 ? LARGEST / most : 0);
    for (int64_t i = 0; i < count; i += W) store_rounded(to + i, load(x + i) * inverse);
    return most / LARGEST;
}

// A row's x A^T: [ranks] numbers, then a step for each RANKS_A_STEP of them; both in the place of as many floats.
constexpr int64_t RANKS_A_STEP = 16;
static_assert(SHRINK_RANKS % RANKS_A_STEP == 0, "pieces of `shrink` share no step");
inline const int16_t* words_of(const float* inner) { return reinterpret_cast<const int16_t*>(inner); }
inline float* steps_of(float* inner, int64_t ranks) { return inner + ranks / 2; }
inline const float* steps_of(const float* inner, int64_t ranks) { return inner + ranks / 2; }

// ---- x A^T

// Adds what VECTORS times NUMBERS columns add to the sums. a: these columns of the first rank.
template <int VECTORS, int RANKS, int ROWS>
inline void add_columns(Vec (&sums)[RANKS][ROWS], const char* a, int64_t stride, const int16_t (*words)[STRIP], int64_t column, const float (&steps)[ROWS]) {
    Accumulator products[RANKS][ROWS];
    for (int vector = 0; vector < VECTORS; vector++) {
        Words x[ROWS];
        for (int row = 0; row < ROWS; row++) x[row] = load_words(words[row] + column + vector * NUMBERS);
        for (int rank = 0; rank < RANKS; rank++) {
            const Words numbers = widen(a + rank * stride + column + vector * NUMBERS);
            for (int row = 0; row < ROWS; row++)
                products[rank][row] = add_products(vector == 0 ? no_sums() : products[rank][row], numbers, x[row]);
        }
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int row = 0; row < ROWS; row++) sums[rank][row] += to_floats(products[rank][row]) * steps[row];
}

// The same of `count` columns, a multiple of BLOCK.
template <int RANKS, int ROWS>
inline void add_strip(Vec (*sums)[ROWS], const char* a, int64_t stride, const int16_t (*words)[STRIP], const float (*steps)[STRIP / COLUMNS], int64_t count) {
    Vec own[RANKS][ROWS];
    for (int rank = 0; rank < RANKS; rank++)
        for (int row = 0; row < ROWS; row++) own[rank][row] = sums[rank][row];
    float here[ROWS];
    int64_t column = 0;
    for (; column + COLUMNS <= count; column += COLUMNS) {
        for (int rank = 0; rank < RANKS; rank++) __builtin_prefetch(a + (RANKS + rank) * stride + column);
        for (int row = 0; row < ROWS; row++) here[row] = steps[row][column / COLUMNS];
        add_columns<COLUMNS / NUMBERS, RANKS, ROWS>(own, a, stride, words, column, here);
    }
    if (column < count) {
        for (int row = 0; row < ROWS; row++) here[row] = steps[row][column / COLUMNS];
        add_columns<BLOCK / NUMBERS, RANKS, ROWS>(own, a, stride, words, column, here);
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int row = 0; row < ROWS; row++) sums[rank][row] = own[rank][row];
}

// Ranks [begin, end), from a multiple of RANKS_A_STEP on and at most SHRINK_RANKS, to out[row], where there is room for `ranks`.
template <int ROWS>
inline void shrink_bytes(const LowRank& matrix, int64_t begin, int64_t end, const float* const* x, int64_t k, float* const* out, int64_t ranks) {
    alignas(64) int16_t words[ROWS][STRIP];
    float steps[ROWS][STRIP / COLUMNS];
    Vec sums[SHRINK_RANKS][ROWS] = {};
    const int64_t stride = (k + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t first = 0; first < stride; first += STRIP) {
        const int64_t count = smaller(stride - first, STRIP);
        for (int row = 0; row < ROWS; row++) {
            for (int64_t column = 0; column < count; column += COLUMNS) {
                const float* from = x[row] + first + column;
                const int64_t there = smaller(k - first - column, COLUMNS), padded = smaller(count - column, COLUMNS);
                float rest[COLUMNS] = {};
                if (there < padded) from = static_cast<const float*>(memcpy(rest, from, sizeof(float) * there));
                steps[row][column / COLUMNS] = round_words(from, padded, words[row] + column);
            }
        }
        int64_t rank = begin;
        for (; rank + 4 <= end; rank += 4) add_strip<4, ROWS>(sums + rank - begin, matrix.a + rank * stride + first, stride, words, steps, count);
        for (; rank < end; rank += 2) add_strip<2, ROWS>(sums + rank - begin, matrix.a + rank * stride + first, stride, words, steps, count);
    }
    for (int row = 0; row < ROWS; row++) {
        float found[SHRINK_RANKS] = {};
        int16_t rounded[SHRINK_RANKS];
        for (int64_t rank = begin; rank < end; rank++) found[rank - begin] = matrix.scales[rank] * total(sums[rank - begin][row]);
        for (int64_t rank = 0; rank < end - begin; rank += RANKS_A_STEP)
            steps_of(out[row], ranks)[(begin + rank) / RANKS_A_STEP] = round_words(found + rank, RANKS_A_STEP, rounded + rank);
        memcpy(reinterpret_cast<int16_t*>(out[row]) + begin, rounded, sizeof(int16_t) * (end - begin));
    }
}

// ---- times B^T

// A panel, 16 scales in bfloat16, then [pairs, 16 outputs, both ranks], and that behind it: to[row].
template <int PANELS, int ROWS>
inline void expand_bytes(const LowRankPart& part, int64_t panel, const float* const* inner, int64_t ranks, float (*to)[SIDE_PANELS * PANEL]) {
    constexpr int VECTORS = PANELS * PANEL / W;
    const int64_t size = 2 * PANEL * (1 + part.pairs), first = part.first, last = first + 2 * part.pairs;
    const char* b = part.b + panel * size;
    Vec sums[VECTORS][ROWS] = {};
    for (int64_t begin = first; begin < last;) {
        const int64_t step = begin / RANKS_A_STEP, end = smaller(last, (step + 1) * RANKS_A_STEP);
        Accumulator products[VECTORS][ROWS];
        for (int i = 0; i < VECTORS; i++)
            for (int row = 0; row < ROWS; row++) products[i][row] = no_sums();
        for (int64_t rank = begin; rank < end; rank += 2) {
            const char* numbers = b + 2 * PANEL + (rank - first) * PANEL;
            Words pairs_of[ROWS];
            for (int row = 0; row < ROWS; row++) {
                int32_t pair;
                memcpy(&pair, words_of(inner[row]) + rank, sizeof pair);
                pairs_of[row] = all_pairs(pair);
            }
            for (int i = 0; i < VECTORS; i++) {
                const Words here = widen(numbers + i * W / PANEL * size + i * W % PANEL * 2);
                for (int row = 0; row < ROWS; row++) products[i][row] = add_products(products[i][row], here, pairs_of[row]);
            }
        }
        for (int i = 0; i < VECTORS; i++)
            for (int row = 0; row < ROWS; row++) sums[i][row] += to_floats(products[i][row]) * steps_of(inner[row], ranks)[step];
        begin = end;
    }
    for (int i = 0; i < VECTORS; i++) {
        const Vec scale = bf16_to_floats(b + i * W / PANEL * size + i * W % PANEL * 2);
        for (int row = 0; row < ROWS; row++) store(to[row] + i * W, sums[i][row] * scale);
    }
}

}  // namespace penstock
