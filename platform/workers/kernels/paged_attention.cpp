// Paged attention on CPUs: its units of work, and a plain C ABI over raw pointers for callers without threads of their own.
//
// One unit is (sequence, kv head, tile of queries, span of the context): keys and values are read once for all query heads of the group and
// all queries of the tile. Softmax is the online one (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention), in float32.
//
// Invariants. Exactness: what one (query, head) gets is one fixed sequence of operations that depends on its own context only: the walk
// goes through chunks of CHUNK positions from 0, segments of SEGMENT positions are merged in order, and rows are never mixed in one
// vector. Tiles, threads and splits decide who computes and when, not what. Safety: scores behind the context are replaced, never
// multiplied, and values behind it are not touched, so whatever lies there (NaN) cannot leak.

#include "attention.hpp"

#include <stdlib.h>

#include "attention_bf16.hpp"
#include "attention_int8.hpp"
#include "linear.hpp"
#include "team.hpp"

namespace penstock {
namespace {

constexpr double ONE_THREAD_WORK = 4e5;  // multiply-adds below which waking a helper costs more than it saves

// ---- W dot products at once
// Lane t of the lower (upper) halves of the groups of S lanes, x's before y's.
template <int S>
constexpr int half_lane(int t, bool upper) {
    const int y = t >= W / 2, u = t % (W / 2);
    return y * W + u / (S / 2) * S + u % (S / 2) + (upper ? S / 2 : 0);
}

template <int S, int... I>
inline Vec add_halves(Vec x, Vec y, Integers<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, half_lane<S>(I, false)...) + __builtin_shufflevector(x, y, half_lane<S>(I, true)...);
#else
    return __builtin_shuffle(x, y, IVec{half_lane<S>(I, false)...}) + __builtin_shuffle(x, y, IVec{half_lane<S>(I, true)...});
#endif
}

// Sums the lanes of each of W vectors: W sums in one vector, in order.
template <int S>
inline Vec reduce(const Vec* x) {
    if constexpr (S == 1) {
        return x[0];
    } else {
        Vec half[S / 2];
#pragma GCC unroll 16
        for (int i = 0; i < S / 2; i++) half[i] = add_halves<S>(x[2 * i], x[2 * i + 1], Lanes());
        return reduce<S / 2>(half);
    }
}

// Scores of one query against W keys that lie side by side.
template <int D>
inline Vec score(const float* q, const float* keys) {
    Vec sums[W] = {};
    for (int d = 0; d < D; d += W) {
        const Vec x = load(q + d);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) sums[j] += x * load(keys + j * D + d);
    }
    return reduce<W>(sums);
}

// ---- softmax

// The running softmax of one (query, head): weights are relative to 2**peak.
struct Row {
    float peak;
    Vec weight;          // sum of the weights, by lane
    float* weighted_sum;  // [D]
};

inline void clear(Row& row, int dim) {
    row.peak = -__builtin_inff();
    row.weight = splat(0.0f);
    memset(row.weighted_sum, 0, sizeof(float) * dim);
}

// W positions to a tile, each tile's keys (values) side by side.
struct Chunk {
    const float* keys[CHUNK / W];
    const float* values[CHUNK / W];
};

// N vectors of the weighted sum; even and odd positions are summed apart, for the latency of the multiply-add.
template <int D, int N>
inline void accumulate(float* sum, const float* weights, const Chunk& chunk, int first, int num_positions, float factor) {
    Vec even[N], odd[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) even[i] = load(sum + first + i * W) * factor, odd[i] = splat(0.0f);
    for (int start = 0; start < num_positions; start += W) {
        const float* values = chunk.values[start / W] + first;
        const float* weight = weights + start;
        const int count = num_positions - start < W ? num_positions - start : W;
        int j = 0;
        for (; j + 1 < count; j += 2) {
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                even[i] += load(values + j * D + i * W) * weight[j];
                odd[i] += load(values + (j + 1) * D + i * W) * weight[j + 1];
            }
        }
        if (j < count) {
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) even[i] += load(values + j * D + i * W) * weight[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) store(sum + first + i * W, even[i] + odd[i]);
}

// One (query, head) takes in the first num_positions (>= 1) of a chunk.
template <int D>
__attribute__((noinline)) void absorb(Row& row, const float* q, const Chunk& chunk, int num_positions) {
    alignas(64) float weights[CHUNK];
    const IVec lane = make_lanes(Lanes());
    Vec best = splat(-__builtin_inff());
    for (int start = 0; start < num_positions; start += W) {
        Vec x = score<D>(q, chunk.keys[start / W]);
        x = lane < num_positions - start ? x : splat(-__builtin_inff());
        best = x > best ? x : best;
        store(weights + start, x);
    }
    const float peak = largest(best) > row.peak ? largest(best) : row.peak;
    const float factor = exp2_nonpositive(splat(row.peak - peak))[0];
    Vec weight = splat(0.0f);
    for (int start = 0; start < num_positions; start += W) {
        Vec x = exp2_nonpositive(load(weights + start) - peak);
        x = lane < num_positions - start ? x : splat(0.0f);
        weight += x;
        store(weights + start, x);
    }
    row.peak = peak;
    row.weight = row.weight * factor + weight;
    constexpr int VECTORS = D / W, BLOCK = 4;
    for (int i = 0; i + BLOCK <= VECTORS; i += BLOCK) accumulate<D, BLOCK>(row.weighted_sum, weights, chunk, i * W, num_positions, factor);
    if constexpr (VECTORS % BLOCK != 0)
        accumulate<D, VECTORS % BLOCK>(row.weighted_sum, weights, chunk, VECTORS / BLOCK * BLOCK * W, num_positions, factor);
}

// Adds a later segment's softmax to an earlier one's.
__attribute__((noinline)) void merge(Row& into, const Row& from, int dim) {
    const float peak = from.peak > into.peak ? from.peak : into.peak;
    const float old_factor = exp2_nonpositive(splat(into.peak - peak))[0], new_factor = exp2_nonpositive(splat(from.peak - peak))[0];
    into.peak = peak;
    into.weight = into.weight * old_factor + from.weight * new_factor;
    for (int d = 0; d < dim; d += W) {
        const Vec old_part = load(into.weighted_sum + d) * old_factor;
        store(into.weighted_sum + d, load(from.weighted_sum + d) * new_factor + old_part);
    }
}

// ---- units of work

struct Unit {
    int64_t seq, kv_head, first_query, num_queries, first_token;
    int64_t first_visible;  // positions that the first query sees
    int64_t begin, end;     // of the context
    int64_t span;
    int64_t num_rows;
};

int64_t tile_queries(const Attention& job) { return larger(MAX_ROWS / job.group(), 1); }
int64_t num_tiles(const Attention& job, int64_t seq) { return (job.num_queries(seq) + tile_queries(job) - 1) / tile_queries(job); }
int64_t num_spans(const Attention& job, int64_t seq) { return job.is_split ? (job.context_len[seq] + SEGMENT - 1) / SEGMENT : 1; }

float* partial_of(const Attention& job, int64_t seq, int64_t segment, int64_t query, int64_t head) {
    return job.partials + (job.first_partial[seq] + (segment * job.num_queries(seq) + query) * job.num_heads + head) * (job.dim + W + 1);
}

Unit find_unit(const Attention& job, int64_t index) {
    Unit unit = {};
    while (job.first_unit[unit.seq + 1] <= index) unit.seq++;
    index -= job.first_unit[unit.seq];
    unit.kv_head = index % job.num_kv_heads;
    index /= job.num_kv_heads;
    unit.first_query = index % num_tiles(job, unit.seq) * tile_queries(job);
    unit.span = index / num_tiles(job, unit.seq);
    unit.num_queries = smaller(job.num_queries(unit.seq) - unit.first_query, tile_queries(job));
    unit.num_rows = unit.num_queries * job.group();
    unit.first_token = job.query_start[unit.seq] + unit.first_query;
    unit.first_visible = job.context_len[unit.seq] - job.num_queries(unit.seq) + unit.first_query + 1;
    const int64_t longest = unit.first_visible + unit.num_queries - 1;
    unit.begin = job.is_split ? unit.span * SEGMENT : 0;
    unit.end = job.is_split ? smaller(unit.begin + SEGMENT, longest) : longest;
    return unit;
}

int64_t block_of(const Attention& job, const Unit& unit, int64_t position) {
    return job.block_tables[unit.seq * job.table_stride + position / job.block_size];
}

// Elements of a store before the position's key or value.
int64_t offset_of(const Attention& job, const Store& store, const Unit& unit, int64_t position) {
    return block_of(job, unit, position) * store.block_stride + (unit.kv_head * job.block_size + position % job.block_size) * job.dim;
}

// Row r of a unit: its own query and head.
int64_t query_of(const Attention& job, int64_t row) { return row / job.group(); }
int64_t head_of(const Attention& job, const Unit& unit, int64_t row) { return unit.kv_head * job.group() + row % job.group(); }

void read_query(const Attention& job, const Unit& unit, int64_t row, float* to) {
    const int64_t token = unit.first_token + query_of(job, row);
    read(to, job.q, job.q_dtype, token * job.q_stride + head_of(job, unit, row) * job.dim, job.dim);
}

void finish(const Attention& job, const Row& row, int64_t token, int64_t head) {
    alignas(64) float result[MAX_DIM];
    const float inverse = 1.0f / total(row.weight);
    for (int d = 0; d < job.dim; d += W) store(result + d, load(row.weighted_sum + d) * inverse);
    write(job.out, job.q_dtype, (token * job.num_heads + head) * job.dim, result, job.dim);
}

void keep_partial(const Attention& job, const Row& row, float* partial) {
    memcpy(partial, row.weighted_sum, sizeof(float) * job.dim);
    store(partial + job.dim, row.weight);
    partial[job.dim + W] = row.peak;
}

Row read_partial(const Attention& job, float* partial) { return Row{partial[job.dim + W], load(partial + job.dim), partial}; }

void hand_over(const Attention& job, const Unit& unit, const Row& row, int64_t index) {
    const int64_t query = query_of(job, index), head = head_of(job, unit, index);
    if (!job.is_split)
        finish(job, row, unit.first_token + query, head);
    else if (unit.first_visible + query > unit.begin)
        keep_partial(job, row, partial_of(job, unit.seq, unit.span, unit.first_query + query, head));
}

// ---- units in float32, for every format and CPU

template <int D>
struct Scratch {
    alignas(64) float q[UNIT_ROWS][D];
    alignas(64) float sums[UNIT_ROWS][D];
    alignas(64) float segment_sum[UNIT_ROWS][D];
    alignas(64) float keys[CHUNK * D], values[CHUNK * D];
    Row rows[UNIT_ROWS];
    Row segment_rows[UNIT_ROWS];
};

const float* scales_of(const Attention& job, const Store& store, const Unit& unit, int64_t position) {
    return store.scales + (block_of(job, unit, position) * job.num_kv_heads + unit.kv_head) * job.block_size + position % job.block_size;
}

void read_scaled(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int8_t* data = static_cast<const int8_t*>(from.data) + offset_of(job, from, unit, position);
    const float* scales = scales_of(job, from, unit, position);
    for (int64_t i = 0; i < count; i++) {
        const float scale = scales[i];
        for (int d = 0; d < job.dim; d++) to[i * job.dim + d] = static_cast<float>(data[i * job.dim + d]) * scale;
    }
}

// Element of a tiled store's head, `together` of which belong to one lane of a product.
int64_t tiled_place(const Store& store, int64_t position, int64_t d, int64_t dim, int64_t together) {
    const int64_t tile = position / TILE * TILE * dim, in_tile = position % TILE;
    return tile + (store.is_values ? in_tile / together * together * dim + together * d + in_tile % together
                                   : d / together * together * TILE + together * in_tile + d % together);
}

constexpr int PAIR = 2, FOUR = 4;

void read_tiled_bf16(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int64_t first = position % job.block_size;
    const uint16_t* head = static_cast<const uint16_t*>(from.data) + offset_of(job, from, unit, position - first);
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < job.dim; d++) to[i * job.dim + d] = widen(head[tiled_place(from, first + i, d, job.dim, PAIR)]);
}

void read_tiled_int8(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int64_t first = position % job.block_size;
    const uint8_t* head = static_cast<const uint8_t*>(from.data) + offset_of(job, from, unit, position - first);
    const float* scales = scales_of(job, from, unit, position);
    const uint8_t flip = from.is_values ? 0 : 128;
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < job.dim; d++)
            to[i * job.dim + d] = static_cast<float>(static_cast<int8_t>(head[tiled_place(from, first + i, d, job.dim, FOUR)] ^ flip)) * scales[i];
}

// Where the keys (values) of a chunk are: in the cache itself where its layout allows, else copied to `scratch` as float32.
template <int D>
void locate(const Attention& job, const Unit& unit, const Store& from, int64_t start, int64_t end, float* scratch, const float** tiles) {
    const int64_t size = job.block_size;
    if (job.kv_dtype == FLOAT32 && size % W == 0) {
        for (int64_t position = start; position < end; position += W)
            tiles[(position - start) / W] = static_cast<const float*>(from.data) + offset_of(job, from, unit, position);
        return;
    }
    for (int64_t position = start; position < end;) {
        const int64_t count = smaller(size - position % size, end - position), offset = offset_of(job, from, unit, position);
        float* to = scratch + (position - start) * D;
        if (job.kv_dtype == SCALED_INT8)
            read_scaled(job, unit, from, position, count, to);
        else if (job.kv_dtype == TILED_BFLOAT16)
            read_tiled_bf16(job, unit, from, position, count, to);
        else if (job.kv_dtype == TILED_INT8)
            read_tiled_int8(job, unit, from, position, count, to);
        else
            read(to, from.data, job.kv_dtype, offset, count * D);
        position += count;
    }
    // the last tile is scored as a whole
    const int64_t rest = (W - (end - start) % W) % W;
    memset(scratch + (end - start) * D, 0, sizeof(float) * rest * D);
    for (int64_t i = 0; i * W < end - start; i++) tiles[i] = scratch + i * W * D;
}

template <int D>
void run_unit(const Attention& job, int64_t index, void* memory) {
    Scratch<D>& scratch = *static_cast<Scratch<D>*>(memory);
    const Unit unit = find_unit(job, index);
    const float scale = job.scale * 1.4426950408889634f;  // the softmax's base is 2
    for (int64_t r = 0; r < unit.num_rows; r++) {
        read_query(job, unit, r, scratch.q[r]);
        for (int d = 0; d < D; d++) scratch.q[r][d] *= scale;
        scratch.rows[r].weighted_sum = scratch.sums[r];
        scratch.segment_rows[r].weighted_sum = scratch.segment_sum[r];
    }
    for (int64_t segment = unit.begin; segment < unit.end; segment += SEGMENT) {
        Row* rows = segment == unit.begin ? scratch.rows : scratch.segment_rows;
        const int64_t segment_end = smaller(segment + SEGMENT, unit.end);
        for (int64_t r = 0; r < unit.num_rows; r++) clear(rows[r], D);
        for (int64_t start = segment; start < segment_end; start += CHUNK) {
            const int64_t stop = smaller(start + CHUNK, segment_end);
            Chunk chunk;
            locate<D>(job, unit, job.keys, start, stop, scratch.keys, chunk.keys);
            locate<D>(job, unit, job.values, start, stop, scratch.values, chunk.values);
            for (int64_t r = 0; r < unit.num_rows; r++) {
                const int64_t visible = unit.first_visible + query_of(job, r) - start;
                if (visible > 0) absorb<D>(rows[r], scratch.q[r], chunk, static_cast<int>(smaller(visible, stop - start)));
            }
        }
        if (segment == unit.begin) continue;
        for (int64_t r = 0; r < unit.num_rows; r++)
            if (unit.first_visible + query_of(job, r) > segment) merge(scratch.rows[r], scratch.segment_rows[r], D);
    }
    for (int64_t r = 0; r < unit.num_rows; r++) hand_over(job, unit, scratch.rows[r], r);
}

// One head of a token: to `to`, and its scale.
void write_scaled(int8_t* to, float* scale, int64_t dim, const float* from) {
    float most = 0;
    for (int64_t d = 0; d < dim; d++) most = __builtin_fabsf(from[d]) > most || from[d] != from[d] ? __builtin_fabsf(from[d]) : most;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    *scale = most / 127.0f;
    for (int64_t d = 0; d < dim; d++) to[d] = static_cast<int8_t>(__builtin_rintf(from[d] * inverse));
}

// ---- units by AVX512-BF16 and VNNI

#if defined(__x86_64__)

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

// The same where the cache has tiles; those of the chunk from `next` on, if it is before `end`, are asked for ahead.
template <int D>
PENSTOCK_BF16 void find_tiles(const Attention& job, const Unit& unit, int64_t start, int count, int64_t next, int64_t end, bf16::Scratch<D>& scratch,
                              bf16::Tiles& tiles) {
    const uint16_t *keys = static_cast<const uint16_t*>(job.keys.data), *values = static_cast<const uint16_t*>(job.values.data);
    for (int tile = 0; tile * TILE < count; tile++) {
        tiles.keys[tile] = reinterpret_cast<const uint32_t*>(keys + offset_of(job, job.keys, unit, start + tile * TILE));
        tiles.values[tile] = reinterpret_cast<const uint32_t*>(values + offset_of(job, job.values, unit, start + tile * TILE));
        if (count - tile * TILE < TILE) {
            bf16::cut_values<D>(tiles.values[tile], count - tile * TILE, scratch.values[tile]);
            tiles.values[tile] = scratch.values[tile];
        }
    }
    for (int64_t position = next; position < smaller(next + CHUNK, end); position += TILE) {
        bf16::prefetch<D>(keys + offset_of(job, job.keys, unit, position));
        bf16::prefetch<D>(values + offset_of(job, job.values, unit, position));
    }
}

// How many of a chunk's `count` positions from `start` on rows [r, r + rows) see; returns the most.
int64_t find_visible(const Attention& job, const Unit& unit, int64_t r, int64_t rows, int64_t start, int64_t count, int* visible) {
    for (int64_t i = 0; i < rows; i++) visible[i] = static_cast<int>(smaller(unit.first_visible + query_of(job, r + i) - start, count));
    return visible[rows - 1];
}

template <int D, bool IS_TILED>
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
            find_tiles<D>(job, unit, start, count, start + CHUNK, unit.end, scratch, tiles);
        else
            tile_rows<D>(job, unit, start, count, scratch, tiles);
        for (int64_t r = 0; r < unit.num_rows; r += bf16::ROWS) {
            const int64_t rows = smaller(bf16::ROWS, unit.num_rows - r);
            int visible[bf16::ROWS];
            if (find_visible(job, unit, r, rows, start, count, visible) <= 0) continue;
            switch (rows) {
                case 1: bf16::absorb<D, 1>(scratch, tiles, r, visible, num_tiles, scale); break;
                case 2: bf16::absorb<D, 2>(scratch, tiles, r, visible, num_tiles, scale); break;
                case 3: bf16::absorb<D, 3>(scratch, tiles, r, visible, num_tiles, scale); break;
                default: bf16::absorb<D, 4>(scratch, tiles, r, visible, num_tiles, scale);
            }
        }
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
        for (int64_t position = start + CHUNK; position < smaller(start + 2 * CHUNK, unit.end); position += TILE) {
            bf16::prefetch<D / 2>(keys + offset_of(job, job.keys, unit, position));
            bf16::prefetch<D / 2>(values + offset_of(job, job.values, unit, position));
        }
        for (int64_t r = 0; r < unit.num_rows; r += int8::ROWS) {
            const int64_t rows = smaller(int8::ROWS, unit.num_rows - r);
            int visible[int8::ROWS];
            if (find_visible(job, unit, r, rows, start, count, visible) <= 0) continue;
            switch (rows) {
                case 1: int8::absorb<D, 1>(scratch, tiles, r, visible, num_tiles, scale); break;
                case 2: int8::absorb<D, 2>(scratch, tiles, r, visible, num_tiles, scale); break;
                case 3: int8::absorb<D, 3>(scratch, tiles, r, visible, num_tiles, scale); break;
                default: int8::absorb<D, 4>(scratch, tiles, r, visible, num_tiles, scale);
            }
        }
    }

    static void read_sums(const Scratch& scratch, int64_t r, float* sums) { memcpy(sums, scratch.sums[r], sizeof scratch.sums[r]); }
};

template <typename Walk>
struct WalkScratch {
    typename Walk::Scratch walk;
    alignas(64) float sums[UNIT_ROWS][Walk::DIM];
    alignas(64) float segment_sum[Walk::DIM];
    Row rows[UNIT_ROWS];
};

template <typename Walk>
Row take_segment(const typename Walk::Scratch& scratch, int64_t r, float* sums) {
    Walk::read_sums(scratch, r, sums);
    Row row = {scratch.states[r].peak, splat(0.0f), sums};
    row.weight[0] = scratch.states[r].weight;
    return row;
}

template <typename Walk>
void run_walk(const Attention& job, int64_t index, void* memory) {
    WalkScratch<Walk>& scratch = *static_cast<WalkScratch<Walk>*>(memory);
    const Unit unit = find_unit(job, index);
    Walk::read_queries(job, unit, scratch.walk);
    for (int64_t segment = unit.begin; segment < unit.end; segment += SEGMENT) {
        const int64_t segment_end = smaller(segment + SEGMENT, unit.end);
        for (int64_t r = 0; r < unit.num_rows; r++) scratch.walk.states[r] = {-__builtin_inff(), 0.0f};
        memset(scratch.walk.sums, 0, sizeof scratch.walk.sums[0] * static_cast<size_t>(unit.num_rows));
        for (int64_t start = segment; start < segment_end; start += CHUNK) Walk::take_chunk(job, unit, start, segment_end, scratch.walk);
        for (int64_t r = 0; r < unit.num_rows; r++) {
            if (segment == unit.begin)
                scratch.rows[r] = take_segment<Walk>(scratch.walk, r, scratch.sums[r]);
            else if (unit.first_visible + query_of(job, r) > segment)
                merge(scratch.rows[r], take_segment<Walk>(scratch.walk, r, scratch.segment_sum), Walk::DIM);
        }
    }
    for (int64_t r = 0; r < unit.num_rows; r++) hand_over(job, unit, scratch.rows[r], r);
}

template <int D>
RunUnit walk_of(DType kv_dtype) {
    switch (kv_dtype) {
        case BFLOAT16: return run_walk<Bf16Walk<D, false>>;
        case TILED_BFLOAT16: return run_walk<Bf16Walk<D, true>>;
        case TILED_INT8: return run_walk<Int8Walk<D>>;
        default: return nullptr;
    }
}

RunUnit fast_unit(int dim, DType kv_dtype) {
    if (level() < AVX512) return nullptr;
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

constexpr int64_t MAX_SCRATCH_BYTES = sizeof(WalkScratch<Bf16Walk<MAX_DIM, false>>) > sizeof(Scratch<MAX_DIM>)
                                          ? sizeof(WalkScratch<Bf16Walk<MAX_DIM, false>>)
                                          : sizeof(Scratch<MAX_DIM>);
static_assert(sizeof(WalkScratch<Int8Walk<MAX_DIM>>) <= MAX_SCRATCH_BYTES, "scratch is for every walk");

#else

RunUnit fast_unit(int, DType) { return nullptr; }
constexpr int64_t MAX_SCRATCH_BYTES = sizeof(Scratch<MAX_DIM>);

#endif

RunUnit float_unit(int dim) {
    switch (dim) {
        case 16: return run_unit<16>;
        case 32: return run_unit<32>;
        case 48: return run_unit<48>;
        case 64: return run_unit<64>;
        case 80: return run_unit<80>;
        case 96: return run_unit<96>;
        case 128: return run_unit<128>;
        case 192: return run_unit<192>;
        case 256: return run_unit<256>;
        default: return nullptr;
    }
}

// To the head that begins at `head`.
void write_tiled_bf16(const Store& store, uint16_t* head, int64_t position, int64_t dim, const float* from) {
    for (int64_t d = 0; d < dim; d++) head[tiled_place(store, position, d, dim, PAIR)] = narrow(from[d]);
}

void write_tiled_int8(const Store& store, uint8_t* head, float* scale, int64_t position, int64_t dim, const float* from) {
    int8_t rounded[MAX_DIM];
    write_scaled(rounded, scale, dim, from);
    const uint8_t flip = store.is_values ? 0 : 128;
    for (int64_t d = 0; d < dim; d++) head[tiled_place(store, position, d, dim, FOUR)] = static_cast<uint8_t>(rounded[d]) ^ flip;
}

}  // namespace

bool is_attention_supported(int64_t head_dim, int64_t group) { return float_unit(static_cast<int>(head_dim)) != nullptr && group <= MAX_GROUP; }

int64_t attention_scratch_bytes(int) { return MAX_SCRATCH_BYTES; }

RunUnit attention_unit(int dim, DType kv_dtype) {
    const RunUnit fast = fast_unit(dim, kv_dtype);
    return fast != nullptr ? fast : float_unit(dim);
}

int64_t choose_split(Attention& job, int threads) {
    int64_t units = 0, partials = 0;
    job.is_split = false;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) units += num_tiles(job, seq) * job.num_kv_heads;
    job.is_split = units < 4 * threads && threads > 1;
    if (!job.is_split) return 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) partials += num_spans(job, seq) * job.num_queries(seq) * job.num_heads;
    return partials * (job.dim + W + 1);
}

void plan_attention(Attention& job) {
    int64_t units = 0, partials = 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) {
        job.first_unit[seq] = units;
        job.first_partial[seq] = partials;
        units += num_tiles(job, seq) * job.num_kv_heads * num_spans(job, seq);
        partials += num_spans(job, seq) * job.num_queries(seq) * job.num_heads;
    }
    job.first_unit[job.num_seqs] = units;
    job.first_partial[job.num_seqs] = partials;
}

void merge_query(const Attention& job, int64_t token) {
    int64_t seq = 0;
    while (job.query_start[seq + 1] <= token) seq++;
    const int64_t query = token - job.query_start[seq];
    const int64_t visible = job.context_len[seq] - job.num_queries(seq) + query + 1;
    for (int64_t head = 0; head < job.num_heads; head++) {
        Row row = read_partial(job, partial_of(job, seq, 0, query, head));
        for (int64_t segment = 1; segment * SEGMENT < visible; segment++)
            merge(row, read_partial(job, partial_of(job, seq, segment, query, head)), job.dim);
        finish(job, row, token, head);
    }
}

void write_slot(const Store& store, DType dtype, int64_t slot, int64_t num_kv_heads, int64_t block_size, int64_t dim, int64_t first_head, int64_t num_heads,
                const float* heads) {
    const int64_t block = slot / block_size, position = slot % block_size;
    for (int64_t i = 0; i < num_heads; i++) {
        const int64_t head = first_head + i, begin = block * store.block_stride + head * block_size * dim, place = begin + position * dim;
        const float* from = heads + i * dim;
        float* scale = store.scales == nullptr ? nullptr : store.scales + (block * num_kv_heads + head) * block_size + position;
        if (dtype == SCALED_INT8)
            write_scaled(static_cast<int8_t*>(store.data) + place, scale, dim, from);
        else if (dtype == TILED_INT8)
            write_tiled_int8(store, static_cast<uint8_t*>(store.data) + begin, scale, position, dim, from);
        else if (dtype == TILED_BFLOAT16)
            write_tiled_bf16(store, static_cast<uint16_t*>(store.data) + begin, position, dim, from);
        else
            write(store.data, dtype, place, from, dim);
    }
}

namespace {

double multiply_adds(const Attention& job) {
    double sum = 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) sum += 2.0 * job.num_queries(seq) * job.context_len[seq] * job.num_heads * job.dim;
    return sum;
}

struct Call {
    const Attention* job;
    RunUnit run;
    Phase units, merges;
};

void work(void* context, int) {
    Call& call = *static_cast<Call*>(context);
    const Attention& job = *call.job;
    alignas(64) char scratch[MAX_SCRATCH_BYTES];
    share(call.units, job.num_units(), [&](int64_t unit) { call.run(job, unit, scratch); });
    if (job.is_split) share(call.merges, job.num_tokens(), [&](int64_t token) { merge_query(job, token); });
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// Changes with every signature below.
int32_t penstock_kernels_abi() { return 4; }

int32_t penstock_supports(int64_t head_dim, int64_t group) { return is_attention_supported(head_dim, group); }

// k, v: [num_tokens, num_kv_heads, head_dim], `stride` elements from token to token. slots: [num_tokens] block * block_size + offset. Scales only of
// SCALED_INT8.
void penstock_write_kv(const void* k, const void* v, int32_t dtype, int64_t k_stride, int64_t v_stride, void* k_cache, void* v_cache, float* k_scales,
                       float* v_scales, int64_t block_stride, int32_t kv_dtype, const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, int64_t dim) {
    alignas(64) float row[MAX_DIM];
    const Store keys = {k_cache, k_scales, block_stride, false}, values = {v_cache, v_scales, block_stride, true};
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t head = 0; head < num_kv_heads; head++) {
            read(row, k, static_cast<DType>(dtype), token * k_stride + head * dim, dim);
            write_slot(keys, static_cast<DType>(kv_dtype), slots[token], num_kv_heads, block_size, dim, head, 1, row);
            read(row, v, static_cast<DType>(dtype), token * v_stride + head * dim, dim);
            write_slot(values, static_cast<DType>(kv_dtype), slots[token], num_kv_heads, block_size, dim, head, 1, row);
        }
    }
}

// q, out: [num_tokens, num_heads, head_dim]; q with `q_stride` elements from token to token, out contiguous. Returns 0, or 1 without memory,
// 2 for a head_dim or group that penstock_supports denies.
int32_t penstock_attend(const void* q, int32_t q_dtype, int64_t q_stride, void* out, void* k_cache, void* v_cache, float* k_scales, float* v_scales,
                        int64_t block_stride, int32_t kv_dtype, const int32_t* query_start, const int32_t* context_len, const int32_t* block_tables, int64_t table_stride,
                        int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_dim, float scale, int32_t threads) {
    if (!is_attention_supported(head_dim, num_heads / num_kv_heads)) return 2;
    Attention job = {};
    job.q = q, job.out = out, job.q_dtype = static_cast<DType>(q_dtype), job.kv_dtype = static_cast<DType>(kv_dtype), job.q_stride = q_stride;
    job.keys = {k_cache, k_scales, block_stride, false}, job.values = {v_cache, v_scales, block_stride, true};
    job.query_start = query_start, job.context_len = context_len, job.block_tables = block_tables, job.table_stride = table_stride;
    job.num_seqs = num_seqs, job.num_heads = num_heads, job.num_kv_heads = num_kv_heads, job.block_size = block_size;
    job.dim = static_cast<int>(head_dim), job.scale = scale;
    job.first_unit = static_cast<int64_t*>(malloc(sizeof(int64_t) * 2 * (num_seqs + 1)));
    if (job.first_unit == nullptr) return 1;
    job.first_partial = job.first_unit + num_seqs + 1;

    const int64_t num_floats = choose_split(job, threads);
    plan_attention(job);
    if (job.is_split) {
        job.partials = static_cast<float*>(malloc(sizeof(float) * num_floats));
        if (job.partials == nullptr) {
            free(job.first_unit);
            return 1;
        }
    }
    Call call = {&job, attention_unit(job.dim, job.kv_dtype), {}, {}};
    run_team(multiply_adds(job) < ONE_THREAD_WORK ? 1 : threads, work, &call);
    free(job.partials);
    free(job.first_unit);
    return 0;
}
}
