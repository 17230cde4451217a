// Attention's units by AVX2 for tiled keys and values, of bfloat16 and int8: both are words of 32 bits that hold two (four) neighbouring numbers of a lane,
// and products and sums are float32.
//
// What a row gets is one fixed sequence of operations, as attention_unit.hpp wants it: rows side by side share loads only, positions that a row does not
// see have score -inf and weight 0, and what lies behind the unit's context is read as zeros.

#include "attention/attention_walk.hpp"
#include "linear/linear.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

#if defined(__x86_64__)

namespace {

#define AVX2_TARGET __attribute__((target("avx2,fma")))
#define INLINE AVX2_TARGET inline __attribute__((always_inline))

constexpr int LANES = 8;
constexpr int HALVES = TILE / LANES;  // vectors of a tile's positions

INLINE __m256i load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Numbers of a word: how many, how to get at them, and what to do first with a word of keys.
struct Bf16Words {
    static constexpr int COUNT = 2;
    static constexpr bool IS_SCALED = false;
    template <int I>
    INLINE static __m256 number(__m256i words) {
        return _mm256_castsi256_ps(I == 0 ? _mm256_slli_epi32(words, 16) : _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
    }
    INLINE static __m256i key(__m256i words) { return words; }
};

struct Int8Words {
    static constexpr int COUNT = 4;
    static constexpr bool IS_SCALED = true;
    template <int I>
    INLINE static __m256 number(__m256i words) {
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(I == 3 ? words : _mm256_slli_epi32(words, 24 - 8 * I), 24));
    }
    INLINE static __m256i key(__m256i words) { return _mm256_xor_si256(words, _mm256_set1_epi32(static_cast<int>(0x80808080))); }
};

template <int D>
struct Scratch {
    alignas(64) float q[UNIT_ROWS][D];  // in the softmax's unit
    alignas(64) float sums[UNIT_ROWS][D];
    alignas(64) float weights[ROWS][CHUNK];  // scores at first
    alignas(64) uint32_t last_values[TILE / 2 * D];
    State states[UNIT_ROWS];
};

// Where the tiles of a chunk lie, and their scales, if they have some.
struct Tiles {
    const uint32_t *keys[TILES], *values[TILES];
    const float *key_scales[TILES], *value_scales[TILES];
};

// Calls f(0), f(1), ... f(N - 1) with constants.
template <int I>
struct Constant {
    static constexpr int value = I;
};
template <typename F, int... I>
INLINE void for_each_of(F f, Integers<int, I...>) {
    (f(Constant<I>()), ...);
}
template <int N, typename F>
INLINE void for_each(F f) {
    for_each_of(f, typename Counting<N>::Type());
}

// Scores of R rows against T tiles of keys.
template <typename Words, int D, int R, int T>
INLINE void score(const float (*q)[D], const uint32_t* const* keys, float (*scores)[CHUNK], int tile, const Next& next) {
    constexpr int V = T * HALVES;
    __m256 sums[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = _mm256_setzero_ps();
    for (int d = 0; d < D; d += Words::COUNT) {
        if (tile == 0) next.ask_for_keys(d / Words::COUNT);
        __m256i words[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) words[v] = Words::key(load_words(keys[tile + v / HALVES] + d / Words::COUNT * TILE + v % HALVES * LANES));
        for_each<Words::COUNT>([&](auto number) AVX2_TARGET {
            __m256 x[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) x[v] = Words::template number<number.value>(words[v]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256 y = _mm256_set1_ps(q[r][d + number.value]);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sums[r][v] = _mm256_fmadd_ps(x[v], y, sums[r][v]);
            }
        });
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) _mm256_store_ps(scores[r] + tile * TILE + v * LANES, sums[r][v]);
}

// 2**x for x <= 0, relative error below 2e-7, 0 below 2**-126, NaN of NaN; see exp2_between.
INLINE __m256 exp2_of(__m256 x) {
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(1.5403530393381608e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3333558146428443e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6181291076284772e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5504108664821580e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022650695910071e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314718055994531e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256 result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_or_ps(_mm256_and_ps(result, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ)), is_nan);
}

INLINE float largest_lane(__m256 x) {
    const __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)), b = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

INLINE float sum_of_lanes(__m256 x) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)), b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// The first `count` lanes are ones.
INLINE __m256 first_lanes(int count) {
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

// A row's scores of the first `visible` positions into weights, in place, those of values of 8 bits times their scales; returns what the sums before must
// be multiplied by.
template <typename Words>
INLINE float weigh(State& state, float* scores, const Tiles& tiles, int num_tiles, int visible) {
    __m256 best = _mm256_set1_ps(-__builtin_inff());
    for (int v = 0; v < num_tiles * HALVES; v++) {
        __m256 x = _mm256_load_ps(scores + v * LANES);
        if (Words::IS_SCALED) x = _mm256_mul_ps(x, _mm256_loadu_ps(tiles.key_scales[v / HALVES] + v % HALVES * LANES));
        x = _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, first_lanes(visible - v * LANES));
        best = _mm256_max_ps(best, x);
        _mm256_store_ps(scores + v * LANES, x);
    }
    const float most = largest_lane(best), peak = most > state.peak ? most : state.peak;
    const float factor = _mm256_cvtss_f32(exp2_of(_mm256_set1_ps(state.peak - peak)));
    __m256 sum = _mm256_setzero_ps();
    for (int v = 0; v < num_tiles * HALVES; v++) {
        __m256 p = exp2_of(_mm256_sub_ps(_mm256_load_ps(scores + v * LANES), _mm256_set1_ps(peak)));
        sum = _mm256_add_ps(sum, p);
        if (Words::IS_SCALED)
            p = _mm256_and_ps(_mm256_mul_ps(p, _mm256_loadu_ps(tiles.value_scales[v / HALVES] + v % HALVES * LANES)), first_lanes(visible - v * LANES));
        _mm256_store_ps(scores + v * LANES, p);
    }
    state.peak = peak;
    state.weight = state.weight * factor + sum_of_lanes(sum);
    return factor;
}

// sums = sums * factor + weights * values, R rows of V vectors.
template <typename Words, int D, int R, int V>
INLINE void accumulate(float (*sums)[D], const float* factors, const float (*weights)[CHUNK], const uint32_t* const* values, int first, int num_tiles,
                       const Next& next) {
    __m256 x[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) x[r][v] = _mm256_mul_ps(_mm256_load_ps(sums[r] + (first + v) * LANES), _mm256_set1_ps(factors[r]));
    constexpr int WORDS = TILE / Words::COUNT;  // of a tile, for a dimension
    for (int word = 0; word < num_tiles * WORDS; word++) {
        const uint32_t* from = values[word / WORDS] + word % WORDS * D + first * LANES;
        if (first == 0) next.ask_for_values<D / Words::COUNT>(word, num_tiles * WORDS);
        __m256i words[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) words[v] = load_words(from + v * LANES);
        for_each<Words::COUNT>([&](auto number) AVX2_TARGET {
            __m256 y[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) y[v] = Words::template number<number.value>(words[v]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256 weight = _mm256_set1_ps(weights[r][word * Words::COUNT + number.value]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) x[r][v] = _mm256_fmadd_ps(y[v], weight, x[r][v]);
            }
        });
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm256_store_ps(sums[r] + (first + v) * LANES, x[r][v]);
}

// R rows take in a chunk; visible[r]: how many of its positions row r sees, perhaps none. next: what is asked for meanwhile.
template <typename Words, int D, int R>
AVX2_TARGET __attribute__((noinline)) void absorb(Scratch<D>& scratch, const Tiles& tiles, int64_t row, const int* visible, int num_tiles, const Next& next) {
    constexpr int T = R == 1 ? 4 : R == 2 ? 2 : 1;  // as many chains of sums as there are registers for
    int tile = 0;
    for (; tile + T <= num_tiles; tile += T) score<Words, D, R, T>(scratch.q + row, tiles.keys, scratch.weights, tile, next);
    for (; tile < num_tiles; tile++) score<Words, D, R, 1>(scratch.q + row, tiles.keys, scratch.weights, tile, next);
    float factors[R];
    for (int r = 0; r < R; r++) {
        if (visible[r] > 0) {
            factors[r] = weigh<Words>(scratch.states[row + r], scratch.weights[r], tiles, num_tiles, visible[r]);
        } else {
            factors[r] = 1.0f;
            memset(scratch.weights[r], 0, sizeof scratch.weights[r]);
        }
    }
    constexpr int V = R <= 2 ? 4 : 2;
    for (int first = 0; first < D / LANES; first += V)
        accumulate<Words, D, R, V>(scratch.sums + row, factors, scratch.weights, tiles.values, first, num_tiles, next);
}

// A tile of bfloat16 values of which only the first `count` positions are to be read, copied to `to`; zeros behind them.
template <int D>
void cut_values(const uint32_t* from, int count, uint32_t* to) {
    for (int pair = 0; pair < TILE / 2; pair++) {
        const int left = count - 2 * pair;
        const uint32_t mask = left >= 2 ? 0xFFFFFFFF : left == 1 ? 0xFFFF : 0;
        for (int d = 0; d < D; d++) to[pair * D + d] = from[pair * D + d] & mask;
    }
}

template <typename Words, int D>
struct TiledWalk {
    static constexpr int DIM = D;
    using Scratch = penstock::Scratch<D>;

    static void read_queries(const Attention& job, const Unit& unit, Scratch& scratch) {
        const float scale = job.scale * 1.4426950408889634f;  // the softmax's base is 2
        for (int64_t r = 0; r < unit.num_rows; r++) {
            read_query(job, unit, r, scratch.q[r]);
            for (int d = 0; d < D; d++) scratch.q[r][d] *= scale;
        }
    }

    static void take_chunk(const Attention& job, const Unit& unit, int64_t start, int64_t end, Scratch& scratch) {
        constexpr int64_t BYTES = 4 / Words::COUNT;  // of an element
        const int count = static_cast<int>(smaller(CHUNK, end - start)), num_tiles = (count + TILE - 1) / TILE;
        const uint8_t *keys = static_cast<const uint8_t*>(job.keys.data), *values = static_cast<const uint8_t*>(job.values.data);
        Tiles tiles;
        for (int tile = 0; tile < num_tiles; tile++) {
            const int64_t position = start + tile * TILE;
            tiles.keys[tile] = reinterpret_cast<const uint32_t*>(keys + BYTES * offset_of(job, job.keys, unit, position));
            tiles.values[tile] = reinterpret_cast<const uint32_t*>(values + BYTES * offset_of(job, job.values, unit, position));
            if (Words::IS_SCALED) {
                tiles.key_scales[tile] = scales_of(job, job.keys, unit, position);
                tiles.value_scales[tile] = scales_of(job, job.values, unit, position);
            } else if (count - tile * TILE < TILE) {
                cut_values<D>(tiles.values[tile], count - tile * TILE, scratch.last_values);
                tiles.values[tile] = scratch.last_values;
            }
        }
        Next next = find_next<BYTES>(job, unit, start);
        for_rows(job, unit, start, count, [&](auto rows, int64_t r, const int* visible) {
            absorb<Words, D, rows.count>(scratch, tiles, r, visible, num_tiles, next);
            next.count = 0;
        });
    }

    static void read_sums(const Scratch& scratch, int64_t r, float* sums) { memcpy(sums, scratch.sums[r], sizeof scratch.sums[r]); }
};

static_assert(sizeof(WalkScratch<TiledWalk<Bf16Words, MAX_DIM>>) <= UNIT_SCRATCH_BYTES, "scratch is for every unit");

template <int D>
RunUnit walk_of(DType kv_dtype) {
    switch (kv_dtype) {
        case TILED_BFLOAT16: return run_walk<TiledWalk<Bf16Words, D>>;
        case TILED_INT8: return run_walk<TiledWalk<Int8Words, D>>;
        default: return nullptr;
    }
}

}  // namespace

RunUnit avx2_unit(int dim, DType kv_dtype) {
    if (level() < AVX2) return nullptr;
    switch (dim) {
        case 32: return walk_of<32>(kv_dtype);
        case 64: return walk_of<64>(kv_dtype);
        case 96: return walk_of<96>(kv_dtype);
        case 128: return walk_of<128>(kv_dtype);
        case 192: return walk_of<192>(kv_dtype);
        case 256: return walk_of<256>(kv_dtype);
        default: return nullptr;
    }
}

#else

RunUnit avx2_unit(int, DType) { return nullptr; }

#endif

}  // namespace penstock
