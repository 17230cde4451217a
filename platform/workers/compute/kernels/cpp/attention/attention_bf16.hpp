// Attention's units for bfloat16 keys and values by AVX-512: products of pairs (BF16's own, or two of floats), sums in float32.
//
// Keys are wanted as tiles of 16 positions to a vector, so that a score needs no horizontal sum, values as pairs of positions. A cache that is not
// tiled is laid out so chunk by chunk, once for all rows of the unit. What a row gets is one fixed sequence of operations, as attention_unit.hpp wants
// it: rows side by side share loads only, and positions that a row does not see have score -inf and weight 0; what lies behind the unit's context
// is read as zeros.

#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include "attention/attention_walk.hpp"

namespace penstock {

namespace bf16 {

#define PENSTOCK_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))


template <int D>
struct Scratch {
    alignas(64) uint32_t keys[TILES][D / 2 * TILE];          // of each tile pairs of dimensions, by position
    alignas(64) uint32_t values[TILES][D / 2 * TILE];        // pairs of positions; untiled of 32 dimensions first those that unpacklo takes, then unpackhi's
    alignas(64) uint16_t q[UNIT_ROWS][D];
    alignas(64) uint16_t weights[ROWS][CHUNK];
    alignas(64) float scores[ROWS][CHUNK];
    alignas(64) float sums[UNIT_ROWS][D];                    // in the order of `values`
    State states[UNIT_ROWS];
};

// Where the tiles of a chunk lie.
struct Tiles {
    const uint32_t *keys[TILES], *values[TILES];
};

PENSTOCK_BF16 inline __m512i load_bits(const void* p) { return _mm512_loadu_si512(p); }

// 16 rows of 16 words to 16 columns.
PENSTOCK_BF16 inline void transpose(const __m512i* rows, uint32_t* to) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i x = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44), y = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xEE);
        const __m512i z = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44), w = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xEE);
        _mm512_store_si512(to + i * TILE, _mm512_shuffle_i32x4(x, z, 0x88));
        _mm512_store_si512(to + (4 + i) * TILE, _mm512_shuffle_i32x4(x, z, 0xDD));
        _mm512_store_si512(to + (8 + i) * TILE, _mm512_shuffle_i32x4(y, w, 0x88));
        _mm512_store_si512(to + (12 + i) * TILE, _mm512_shuffle_i32x4(y, w, 0xDD));
    }
}

alignas(64) const uint16_t ZEROS[MAX_DIM] = {};

// A chunk's keys and values, given where those of each position lie.
template <int D>
PENSTOCK_BF16 inline void lay_out(const uint16_t* const* keys, const uint16_t* const* values, int num_tiles, Scratch<D>& scratch) {
    for (int tile = 0; tile < num_tiles; tile++) {
#pragma GCC unroll 2
        for (int d = 0; d < D; d += 32) {
            __m512i rows[TILE];
#pragma GCC unroll 16
            for (int i = 0; i < TILE; i++) rows[i] = load_bits(keys[tile * TILE + i] + d);
            transpose(rows, scratch.keys[tile] + d / 2 * TILE);
        }
        for (int i = 0; i < TILE; i += 2) {
            const uint16_t *even = values[tile * TILE + i], *odd = values[tile * TILE + i + 1];
            uint32_t* to = scratch.values[tile] + i / 2 * D;
#pragma GCC unroll 8
            for (int d = 0; d < D; d += 32) {
                const __m512i x = load_bits(even + d), y = load_bits(odd + d);
                _mm512_store_si512(to + d, _mm512_unpacklo_epi16(x, y));
                _mm512_store_si512(to + d + TILE, _mm512_unpackhi_epi16(x, y));
            }
        }
    }
}

// A tile of values of which only the first `count` positions are to be read, copied to `to`; zeros behind them.
template <int D>
PENSTOCK_BF16 inline void cut_values(const uint32_t* from, int count, uint32_t* to) {
    for (int pair = 0; pair < TILE / 2; pair++) {
        const int left = count - 2 * pair;
        const __mmask32 mask = left >= 2 ? 0xFFFFFFFF : left == 1 ? 0x55555555 : 0;
#pragma GCC unroll 8
        for (int d = 0; d < D; d += TILE) _mm512_store_si512(to + pair * D + d, _mm512_maskz_mov_epi16(mask, load_bits(from + pair * D + d)));
    }
}

PENSTOCK_BF16 inline __m512i splat_pair(const uint16_t* p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(static_cast<int>(pair));
}

// The even (odd) ones of pairs, as floats.
PENSTOCK_BF16 inline __m512 even(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
PENSTOCK_BF16 inline __m512 odd(__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))); }

// sum + the products of pairs. Not native: for processors that have AVX-512 but not BF16; nothing of it is used then.
template <bool IS_NATIVE>
PENSTOCK_BF16 inline __m512 add_pairs(__m512 sum, __m512i x, __m512i y) {
    if constexpr (IS_NATIVE)
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
    else
        return _mm512_fmadd_ps(odd(x), odd(y), _mm512_fmadd_ps(even(x), even(y), sum));
}

// To nearest, ties to even; NaN stays NaN.
template <bool IS_NATIVE>
PENSTOCK_BF16 inline __m256i narrowed(__m512 x) {
    if constexpr (IS_NATIVE) {
        return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
    } else {
        const __m512i bits = _mm512_castps_si512(x), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, last), _mm512_set1_epi32(0x7FFF));
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet), 16));
    }
}

// Scores of R rows against T tiles of keys.
template <int D, int R, int T, bool IS_NATIVE>
PENSTOCK_BF16 inline void score(const uint16_t (*q)[D], const uint32_t* const* keys, float (*scores)[CHUNK], int tile, const Next& next) {
    __m512 sums[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) sums[r][t] = _mm512_setzero_ps();
    for (int d = 0; d < D / 2; d++) {
        if (tile == 0) next.ask_for_keys(d);
        __m512i pairs[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) pairs[t] = load_bits(keys[tile + t] + d * TILE);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512i x = splat_pair(q[r] + 2 * d);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) sums[r][t] = add_pairs<IS_NATIVE>(sums[r][t], pairs[t], x);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) _mm512_store_ps(scores[r] + (tile + t) * TILE, sums[r][t]);
}

// 2**x for x <= 0, relative error below 2e-7, 0 below 2**-126, NaN of NaN; see exp2_between.
PENSTOCK_BF16 inline __m512 exp2_of(__m512 x) {
    const __mmask16 mask = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.5403530393381608e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558146428443e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291076284772e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504108664821580e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022650695910071e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718055994531e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(mask, p, n);
}

// Scores of R rows, of which row r sees the first visible[r] positions of T tiles, perhaps none, into weights; factors: what the sums before must be
// multiplied by. All rows go through each stage together: most of a row's time is waiting for its maximum, its exponentials and its sum.
template <int R, int T, bool IS_NATIVE>
PENSTOCK_BF16 inline void weigh(State* states, const float (*scores)[CHUNK], const int* visible, float scale, uint16_t (*weights)[CHUNK], float* factors) {
    const __m512 unseen = _mm512_set1_ps(-__builtin_inff());
    __m512 x[R][T];
    alignas(64) float changes[TILE] = {};
    float peaks[R], sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        __m512 best = unseen;
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            const int seen = visible[r] - t * TILE;
            const __mmask16 mask = seen >= TILE ? 0xFFFF : seen > 0 ? static_cast<__mmask16>((1 << seen) - 1) : 0;
            x[r][t] = _mm512_mask_mul_ps(unseen, mask, _mm512_load_ps(scores[r] + t * TILE), _mm512_set1_ps(scale));
            best = _mm512_max_ps(best, x[r][t]);
        }
        peaks[r] = _mm512_reduce_max_ps(best);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        const float before = states[r].peak;
        states[r].peak = peaks[r] > before ? peaks[r] : before;
        peaks[r] = visible[r] > 0 ? states[r].peak : 0.0f;
        changes[r] = visible[r] > 0 ? before - peaks[r] : 0.0f;
    }
    _mm512_store_ps(changes, exp2_of(_mm512_load_ps(changes)));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            const __m512 p = exp2_of(_mm512_sub_ps(x[r][t], _mm512_set1_ps(peaks[r])));
            sum = _mm512_add_ps(sum, p);
            _mm256_store_si256(reinterpret_cast<__m256i*>(weights[r] + t * TILE), narrowed<IS_NATIVE>(p));
        }
        sums[r] = _mm512_reduce_add_ps(sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        factors[r] = changes[r];
        states[r].weight = states[r].weight * factors[r] + sums[r];
    }
}

// sums = sums * factor + weights * values, R rows of V vectors.
template <int D, int R, int V, bool IS_NATIVE>
PENSTOCK_BF16 inline void accumulate(float (*sums)[D], const float* factors, const uint16_t (*weights)[CHUNK], const uint32_t* const* values,
                                     int first, int num_tiles, const Next& next) {
    __m512 x[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) x[r][v] = _mm512_mul_ps(_mm512_load_ps(sums[r] + (first + v) * TILE), _mm512_set1_ps(factors[r]));
    for (int pair = 0; pair < num_tiles * TILE / 2; pair++) {
        const uint32_t* from = values[pair / (TILE / 2)] + pair % (TILE / 2) * D + first * TILE;
        if (first == 0) next.ask_for_values<D / 2>(pair, num_tiles * TILE / 2);
        __m512i pairs[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) pairs[v] = load_bits(from + v * TILE);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512i weight = splat_pair(weights[r] + 2 * pair);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) x[r][v] = add_pairs<IS_NATIVE>(x[r][v], pairs[v], weight);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_store_ps(sums[r] + (first + v) * TILE, x[r][v]);
}

// R rows take in a chunk; visible[r]: how many of its positions row r sees, perhaps none. next: what is asked for meanwhile.
template <int D, int R, bool IS_NATIVE>
PENSTOCK_BF16 __attribute__((noinline)) void absorb(Scratch<D>& scratch, const Tiles& tiles, int64_t row, const int* visible, int num_tiles, float scale,
                                                    const Next& next) {
    if (num_tiles == TILES) {
        score<D, R, TILES, IS_NATIVE>(scratch.q + row, tiles.keys, scratch.scores, 0, next);
    } else {
        for (int tile = 0; tile < num_tiles; tile++) score<D, R, 1, IS_NATIVE>(scratch.q + row, tiles.keys, scratch.scores, tile, next);
    }
    float factors[R];
    if (num_tiles == 1)
        weigh<R, 1, IS_NATIVE>(scratch.states + row, scratch.scores, visible, scale, scratch.weights, factors);
    else
        weigh<R, TILES, IS_NATIVE>(scratch.states + row, scratch.scores, visible, scale, scratch.weights, factors);
    constexpr int VECTORS = D / TILE, BLOCK = VECTORS < 4 ? VECTORS : 4;
    for (int i = 0; i + BLOCK <= VECTORS; i += BLOCK)
        accumulate<D, R, BLOCK, IS_NATIVE>(scratch.sums + row, factors, scratch.weights, tiles.values, i, num_tiles, next);
    if constexpr (VECTORS % BLOCK != 0)
        accumulate<D, R, VECTORS % BLOCK, IS_NATIVE>(scratch.sums + row, factors, scratch.weights, tiles.values, VECTORS / BLOCK * BLOCK, num_tiles, next);
}

// A row's sums in the order of dimensions.
template <int D>
PENSTOCK_BF16 inline void put_in_order(const float* sums, float* to) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int d = 0; d < D; d += 32) {
        const __m512 x = _mm512_load_ps(sums + d), y = _mm512_load_ps(sums + d + 16);
        _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(x, low, y));
        _mm512_storeu_ps(to + d + 16, _mm512_permutex2var_ps(x, high, y));
    }
}

}  // namespace bf16
}  // namespace penstock

#endif
