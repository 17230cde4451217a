// Attention's units by AVX-512: bfloat16 by products of pairs, int8 by VNNI.

#include "attention/attention_bf16.hpp"
#include "attention/attention_int8.hpp"
#include "attention/attention_store.hpp"
#include "attention/attention_unit.hpp"
#include "linear/linear.hpp"

namespace penstock {

#if defined(__x86_64__)

namespace {

// The tiles of `count` positions from `start` on: made of rows.
template <int D>
PENSTOCK_BF16 void tile_rows(const Attention& job, const Unit& unit, int64_t start, int count, bf16::Scratch<D>& scratch, bf16::Tiles& tiles) {
    const uint16_t *keys[CHUNK], *values[CHUNK];
    const int num_tiles = (count + TILE - 1) / TILE;
    for (int i = 0; i < num_tiles * TILE; i++) {
        keys[i] = i < count ? static_cast<const uint16_t*>(job.keys.data) + offset_of(job, job.keys, unit, start + i) : bf16::ZEROS;
        values[i] = i < count ? static_cast<const uint16_t*>(job.values.data) + offset_of(job, job.values, unit, start + i) : bf16::ZEROS;
    }
    bf16::lay_out<D>(keys, values, num_tiles, scratch);
    for (int tile = 0; tile < num_tiles; tile++) tiles.keys[tile] = scratch.keys[tile], tiles.values[tile] = scratch.values[tile];
}

// The same where the cache has tiles.
template <int D>
PENSTOCK_BF16 void find_tiles(const Attention& job, const Unit& unit, int64_t start, int count, bf16::Scratch<D>& scratch, bf16::Tiles& tiles) {
    const uint16_t *keys = static_cast<const uint16_t*>(job.keys.data), *values = static_cast<const uint16_t*>(job.values.data);
    for (int tile = 0; tile * TILE < count; tile++) {
        tiles.keys[tile] = reinterpret_cast<const uint32_t*>(keys + offset_of(job, job.keys, unit, start + tile * TILE));
        tiles.values[tile] = reinterpret_cast<const uint32_t*>(values + offset_of(job, job.values, unit, start + tile * TILE));
        if (count - tile * TILE < TILE) {
            bf16::cut_values<D>(tiles.values[tile], count - tile * TILE, scratch.values[tile]);
            tiles.values[tile] = scratch.values[tile];
        }
    }
}

template <int D, bool IS_TILED, bool IS_NATIVE>
struct Bf16Walk {
    static constexpr int DIM = D;
    using Scratch = bf16::Scratch<D>;

    PENSTOCK_BF16 static void read_queries(const Attention& job, const Unit& unit, Scratch& scratch) {
        for (int64_t r = 0; r < unit.num_rows; r++) {
            alignas(64) float q[D];
            read_query(job, unit, r, q);
            write(scratch.q[r], BFLOAT16, 0, q, D);
        }
    }

    PENSTOCK_BF16 static void take_chunk(const Attention& job, const Unit& unit, int64_t start, int64_t end, Scratch& scratch) {
        const float scale = job.scale * 1.4426950408889634f;  // the softmax's base is 2
        const int count = static_cast<int>(smaller(CHUNK, end - start)), num_tiles = (count + TILE - 1) / TILE;
        bf16::Tiles tiles;
        if constexpr (IS_TILED)
            find_tiles<D>(job, unit, start, count, scratch, tiles);
        else
            tile_rows<D>(job, unit, start, count, scratch, tiles);
        Next next = IS_TILED ? find_next<2>(job, unit, start) : Next{};
        for_rows(job, unit, start, count, [&](auto rows, int64_t r, const int* visible) {
            bf16::absorb<D, rows.count, IS_NATIVE>(scratch, tiles, r, visible, num_tiles, scale, next);
            next.count = 0;
        });
    }

    PENSTOCK_BF16 static void read_sums(const Scratch& scratch, int64_t r, float* sums) {
        if constexpr (IS_TILED)
            memcpy(sums, scratch.sums[r], sizeof scratch.sums[r]);
        else
            bf16::put_in_order<D>(scratch.sums[r], sums);
    }
};

template <int D>
struct Int8Walk {
    static constexpr int DIM = D;
    using Scratch = int8::Scratch<D>;

    PENSTOCK_VNNI static void read_queries(const Attention& job, const Unit& unit, Scratch& scratch) {
        for (int64_t r = 0; r < unit.num_rows; r++) {
            alignas(64) float q[D];
            read_query(job, unit, r, q);
            write_scaled(scratch.q[r], scratch.q_scale + r, D, q);
            int32_t sum = 0;
            for (int d = 0; d < D; d++) sum += scratch.q[r][d];
            scratch.q_bias[r] = 128 * sum;
        }
    }

    PENSTOCK_VNNI static void take_chunk(const Attention& job, const Unit& unit, int64_t start, int64_t end, Scratch& scratch) {
        const float scale = job.scale * 1.4426950408889634f;  // the softmax's base is 2
        const int count = static_cast<int>(smaller(CHUNK, end - start)), num_tiles = (count + TILE - 1) / TILE;
        const uint8_t *keys = static_cast<const uint8_t*>(job.keys.data), *values = static_cast<const uint8_t*>(job.values.data);
        int8::Tiles tiles;
        for (int tile = 0; tile < num_tiles; tile++) {
            const int64_t position = start + tile * TILE;
            tiles.keys[tile] = keys + offset_of(job, job.keys, unit, position);
            tiles.values[tile] = reinterpret_cast<const int8_t*>(values + offset_of(job, job.values, unit, position));
            tiles.key_scales[tile] = scales_of(job, job.keys, unit, position);
            tiles.value_scales[tile] = scales_of(job, job.values, unit, position);
        }
        Next next = find_next<1>(job, unit, start);
        for_rows(job, unit, start, count, [&](auto rows, int64_t r, const int* visible) {
            int8::absorb<D, rows.count>(scratch, tiles, r, visible, num_tiles, scale, next);
            next.count = 0;
        });
    }

    static void read_sums(const Scratch& scratch, int64_t r, float* sums) { memcpy(sums, scratch.sums[r], sizeof scratch.sums[r]); }
};

static_assert(sizeof(WalkScratch<Bf16Walk<MAX_DIM, false, true>>) <= UNIT_SCRATCH_BYTES, "scratch is for every unit");
static_assert(sizeof(WalkScratch<Int8Walk<MAX_DIM>>) <= UNIT_SCRATCH_BYTES, "scratch is for every unit");

template <int D>
RunUnit walk_of(DType kv_dtype) {
    const bool is_native = level() >= AVX512;
    switch (kv_dtype) {
        case BFLOAT16: return is_native ? run_walk<Bf16Walk<D, false, true>> : run_walk<Bf16Walk<D, false, false>>;
        case TILED_BFLOAT16: return is_native ? run_walk<Bf16Walk<D, true, true>> : run_walk<Bf16Walk<D, true, false>>;
        case TILED_INT8: return run_walk<Int8Walk<D>>;
        default: return nullptr;
    }
}

}  // namespace

RunUnit avx512_unit(int dim, DType kv_dtype) {
    if (level() < VNNI) return nullptr;
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

RunUnit avx512_unit(int, DType) { return nullptr; }

#endif

}  // namespace penstock
