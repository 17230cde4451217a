// A unit of attention's work, (sequence, kv head, tile of queries, span of the context), and the running softmax of its rows: keys and values are
// read once for all query heads of the group and all queries of the tile. Softmax is the online one (Milakov & Gimelshein 2018; Dao et al. 2022,
// FlashAttention), in float32.
//
// Invariants. Exactness: what one (query, head) gets is one fixed sequence of operations that depends on its own context only: the walk
// goes through chunks of CHUNK positions from 0, segments of SEGMENT positions are merged in order, and rows are never mixed in one
// vector. Tiles, threads and splits decide who computes and when, not what. Safety: scores behind the context are replaced, never
// multiplied, and values behind it are not touched, so whatever lies there (NaN) cannot leak.

#pragma once

#include "attention/attention.hpp"

namespace penstock {

constexpr int64_t UNIT_SCRATCH_BYTES = 352 * 1024;  // of every kind of unit, at most

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

// Adds a later segment's softmax to an earlier one's.
__attribute__((noinline)) inline void merge(Row& into, const Row& from, int dim) {
    const float peak = from.peak > into.peak ? from.peak : into.peak;
    const float old_factor = exp2_nonpositive(splat(into.peak - peak))[0], new_factor = exp2_nonpositive(splat(from.peak - peak))[0];
    into.peak = peak;
    into.weight = into.weight * old_factor + from.weight * new_factor;
    for (int d = 0; d < dim; d += W) {
        const Vec old_part = load(into.weighted_sum + d) * old_factor;
        store(into.weighted_sum + d, load(from.weighted_sum + d) * new_factor + old_part);
    }
}

// ---- what a unit is

struct Unit {
    int64_t index, seq, kv_head, first_query, num_queries, first_token;
    int64_t first_visible;  // positions that the first query sees
    int64_t begin, end;     // of the context
    int64_t span;
    int64_t num_rows;
};

inline int64_t tile_queries(const Attention& job) { return larger(MAX_ROWS / job.group(), 1); }
inline int64_t num_tiles(const Attention& job, int64_t seq) { return (job.num_queries(seq) + tile_queries(job) - 1) / tile_queries(job); }
inline int64_t num_spans(const Attention& job, int64_t seq) { return job.is_split ? (job.context_len[seq] + SEGMENT - 1) / SEGMENT : 1; }

inline float* partial_of(const Attention& job, int64_t seq, int64_t segment, int64_t query, int64_t head) {
    return job.partials + (job.first_partial[seq] + (segment * job.num_queries(seq) + query) * job.num_heads + head) * (job.dim + W + 1);
}

inline Unit find_unit(const Attention& job, int64_t index) {
    Unit unit = {};
    unit.index = index;
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

inline int64_t block_of(const Attention& job, const Unit& unit, int64_t position) {
    return job.block_tables[unit.seq * job.table_stride + position / job.block_size];
}

// Elements of a store before the position's key or value.
inline int64_t offset_of(const Attention& job, const Store& store, const Unit& unit, int64_t position) {
    return block_of(job, unit, position) * store.block_stride + (unit.kv_head * job.block_size + position % job.block_size) * job.dim;
}

// Row r of a unit: its own query and head.
inline int64_t query_of(const Attention& job, int64_t row) { return row / job.group(); }
inline int64_t head_of(const Attention& job, const Unit& unit, int64_t row) { return unit.kv_head * job.group() + row % job.group(); }

inline void read_query(const Attention& job, const Unit& unit, int64_t row, float* to) {
    const int64_t token = unit.first_token + query_of(job, row);
    read(to, job.q, job.q_dtype, token * job.q_stride + head_of(job, unit, row) * job.dim, job.dim);
}

inline void finish(const Attention& job, const Row& row, int64_t token, int64_t head) {
    alignas(64) float result[MAX_DIM];
    const float inverse = 1.0f / total(row.weight);
    for (int d = 0; d < job.dim; d += W) store(result + d, load(row.weighted_sum + d) * inverse);
    write(job.out, job.q_dtype, (token * job.num_heads + head) * job.dim, result, job.dim);
}

inline void keep_partial(const Attention& job, const Row& row, float* partial) {
    memcpy(partial, row.weighted_sum, sizeof(float) * job.dim);
    store(partial + job.dim, row.weight);
    partial[job.dim + W] = row.peak;
}

inline Row read_partial(const Attention& job, float* partial) { return Row{partial[job.dim + W], load(partial + job.dim), partial}; }

inline void hand_over(const Attention& job, const Unit& unit, const Row& row, int64_t index) {
    const int64_t query = query_of(job, index), head = head_of(job, unit, index);
    if (!job.is_split)
        finish(job, row, unit.first_token + query, head);
    else if (unit.first_visible + query > unit.begin)
        keep_partial(job, row, partial_of(job, unit.seq, unit.span, unit.first_query + query, head));
}

inline const float* scales_of(const Attention& job, const Store& store, const Unit& unit, int64_t position) {
    return store.scales + (block_of(job, unit, position) * job.num_kv_heads + unit.kv_head) * job.block_size + position % job.block_size;
}

// ---- the kinds of units; null for what they don't cover

RunUnit float_unit(int dim);
RunUnit avx2_unit(int dim, DType kv_dtype);
RunUnit avx512_unit(int dim, DType kv_dtype);

}  // namespace penstock
