// Attention's units for tiled int8 keys and values by AVX512-VNNI: products of bytes, sums in whole numbers within a chunk, float32 between chunks.
//
// Queries are rounded to 8 bits a row; a chunk's weights, times their values' scales, to 16 bits of the largest of them, as a high and a low
// byte. A row's sums are therefore the same whatever other rows are in the unit. A NaN in a scale makes the result NaN.

#pragma once

#if defined(__x86_64__)

#include "attention/attention_bf16.hpp"

namespace penstock {
namespace int8 {

#define PENSTOCK_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))

template <int D>
struct Scratch {
    alignas(64) int8_t q[UNIT_ROWS][D];
    alignas(64) float sums[UNIT_ROWS][D];
    alignas(64) int32_t scores[ROWS][CHUNK];
    alignas(64) uint8_t high[ROWS][CHUNK], low[ROWS][CHUNK];
    float q_scale[UNIT_ROWS];
    int32_t q_bias[UNIT_ROWS];  // what the keys' offset adds to a score
    State states[UNIT_ROWS];
};

// Where the tiles of a chunk lie, and their scales.
struct Tiles {
    const uint8_t* keys[TILES];   // q + 128
    const int8_t* values[TILES];
    const float *key_scales[TILES], *value_scales[TILES];
};

PENSTOCK_VNNI inline __m512i splat_bytes(const void* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

// Scores of R rows against T tiles of keys.
template <int D, int R, int T>
PENSTOCK_VNNI inline void score(const int8_t (*q)[D], const uint8_t* const* keys, const int32_t* bias, int32_t (*scores)[CHUNK], int tile,
                                const Next& next) {
    __m512i sums[R][T];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) sums[r][t] = _mm512_set1_epi32(-bias[r]);
    for (int d = 0; d < D; d += 4) {
        if (tile == 0) next.ask_for_keys(d / 4);
        __m512i bytes[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) bytes[t] = _mm512_loadu_si512(keys[tile + t] + d * TILE);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512i x = splat_bytes(q[r] + d);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], bytes[t], x);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) _mm512_store_si512(scores[r] + (tile + t) * TILE, sums[r][t]);
}

// What a row's sums before are multiplied by, and what the chunk's whole numbers are in units of.
struct Factors {
    float before, unit;
};

// A row's scores of the first `visible` positions into weights, as bytes.
PENSTOCK_VNNI inline Factors weigh(State& state, const int32_t* scores, const Tiles& tiles, int num_tiles, int visible, float scale, uint8_t* high,
                                   uint8_t* low) {
    const __m512 unseen = _mm512_set1_ps(-__builtin_inff());
    __m512 x[TILES], best = unseen;
    __mmask16 masks[TILES];
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
        if (t >= num_tiles) break;
        const int seen = visible - t * TILE;
        masks[t] = seen >= TILE ? 0xFFFF : seen > 0 ? static_cast<__mmask16>((1 << seen) - 1) : 0;
        const __m512 units = _mm512_mul_ps(_mm512_loadu_ps(tiles.key_scales[t]), _mm512_set1_ps(scale));
        x[t] = _mm512_mask_mul_ps(unseen, masks[t], _mm512_cvtepi32_ps(_mm512_load_si512(scores + t * TILE)), units);
        best = _mm512_max_ps(best, x[t]);
    }
    const float most = _mm512_reduce_max_ps(best), peak = most > state.peak ? most : state.peak;
    const float before = _mm512_cvtss_f32(bf16::exp2_of(_mm512_set1_ps(state.peak - peak)));
    __m512 sum = _mm512_setzero_ps(), scaled_sum = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
        if (t >= num_tiles) break;
        const __m512 p = bf16::exp2_of(_mm512_sub_ps(x[t], _mm512_set1_ps(peak)));
        sum = _mm512_add_ps(sum, p);
        x[t] = _mm512_maskz_mul_ps(masks[t], p, _mm512_loadu_ps(tiles.value_scales[t]));
        scaled_sum = _mm512_add_ps(scaled_sum, x[t]);
        largest = _mm512_max_ps(largest, x[t]);
    }
    state.peak = peak;
    state.weight = state.weight * before + _mm512_reduce_add_ps(sum);
    const float total = _mm512_reduce_add_ps(scaled_sum), top = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top > 0 ? 65535.0f / top : 0.0f);
#pragma GCC unroll 4
    for (int t = 0; t < TILES; t++) {
        if (t >= num_tiles) break;
        const __m512i bits = _mm512_cvtps_epi32(_mm512_mul_ps(x[t], inverse));
        _mm_store_si128(reinterpret_cast<__m128i*>(high + t * TILE), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(low + t * TILE), _mm512_cvtepi32_epi8(bits));
    }
    return {before, total != total ? total : top / 65535.0f};
}

// sums = sums * before + unit * (weights * values), R rows of V vectors.
template <int D, int R, int V>
PENSTOCK_VNNI inline void accumulate(Scratch<D>& scratch, int64_t row, const Factors* factors, const int8_t* const* values, int first, int num_tiles,
                                     const Next& next) {
    __m512i high[R][V], low[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) high[r][v] = low[r][v] = _mm512_setzero_si512();
    for (int place = 0; place < num_tiles * TILE; place += 4) {
        const int8_t* from = values[place / TILE] + place % TILE * D + first * TILE * 4;
        if (first == 0) next.ask_for_values<D / 4>(place / 4, num_tiles * TILE / 4);
        __m512i bytes[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) bytes[v] = _mm512_loadu_si512(from + v * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512i x = splat_bytes(scratch.high[r] + place), y = splat_bytes(scratch.low[r] + place);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                high[r][v] = _mm512_dpbusd_epi32(high[r][v], x, bytes[v]);
                low[r][v] = _mm512_dpbusd_epi32(low[r][v], y, bytes[v]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float* sums = scratch.sums[row + r] + (first + v) * TILE;
            const __m512 found = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]));
            const __m512 before = _mm512_mul_ps(_mm512_load_ps(sums), _mm512_set1_ps(factors[r].before));
            _mm512_store_ps(sums, _mm512_fmadd_ps(found, _mm512_set1_ps(factors[r].unit), before));
        }
    }
}

// R rows take in a chunk; visible[r]: how many of its positions row r sees, perhaps none. next: what is asked for meanwhile.
template <int D, int R>
PENSTOCK_VNNI __attribute__((noinline)) void absorb(Scratch<D>& scratch, const Tiles& tiles, int64_t row, const int* visible, int num_tiles, float scale,
                                                    const Next& next) {
    if (num_tiles == TILES) {
        score<D, R, TILES>(scratch.q + row, tiles.keys, scratch.q_bias + row, scratch.scores, 0, next);
    } else {
        for (int tile = 0; tile < num_tiles; tile++) score<D, R, 1>(scratch.q + row, tiles.keys, scratch.q_bias + row, scratch.scores, tile, next);
    }
    Factors factors[R];
    for (int r = 0; r < R; r++) {
        if (visible[r] > 0) {
            factors[r] = weigh(scratch.states[row + r], scratch.scores[r], tiles, num_tiles, visible[r], scale * scratch.q_scale[row + r], scratch.high[r],
                               scratch.low[r]);
        } else {
            factors[r] = {1.0f, 0.0f};
        }
    }
    constexpr int VECTORS = D / TILE;
    static_assert(VECTORS % 2 == 0, "vectors are summed two by two");
    for (int i = 0; i < VECTORS; i += 2) accumulate<D, R, 2>(scratch, row, factors, tiles.values, i, num_tiles, next);
}

}  // namespace int8
}  // namespace penstock

#endif
