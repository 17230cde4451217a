// Paged attention as units of work, for whoever has threads: plan once for a batch, then run all units (and, where the plan splits contexts,
// merge every query) for each layer.

#pragma once

#include "base/vectors.hpp"

namespace penstock {

constexpr int CHUNK = 64;       // positions between two rescalings; multiple of W
constexpr int SEGMENT = 256;    // positions merged at a time; multiple of CHUNK
constexpr int MAX_ROWS = 32;    // (query, head) pairs of a unit, but at least one query of all heads of its group
constexpr int MAX_GROUP = 64;   // query heads to a kv head
constexpr int MAX_DIM = 256;    // head_dim
constexpr int UNIT_ROWS = MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS;

constexpr int TILE = 16;        // positions that a tiled store keeps together; block_size is a multiple of it then, and head_dim of 32

// One layer's keys or values: [num_blocks, num_kv_heads, block_size, head_dim], block_stride elements from block to block, the rest contiguous;
// scales of the int8 ones: [num_blocks, num_kv_heads, block_size], contiguous.
// Tiled ones have the numbers of TILE positions of a head in the order in which products take them, each tile in the place that it has untiled:
// keys of TILED_BFLOAT16 as [head_dim / 2][TILE][2], values as [TILE / 2][head_dim][2]; TILED_INT8, scaled, as [head_dim / 4][TILE][4], 128 added to
// them, and [TILE / 4][head_dim][4].
struct Store {
    void* data;
    float* scales;
    int64_t block_stride;
    bool is_values;
};

struct Attention {
    const void* q;  // [num_tokens, num_heads, head_dim], q_stride elements from token to token
    void* out;      // the same, contiguous
    DType q_dtype, kv_dtype;
    int64_t q_stride;
    Store keys, values;
    const int32_t *query_start, *context_len, *block_tables;
    int64_t table_stride;
    int64_t num_seqs, num_heads, num_kv_heads, block_size;
    int dim;
    float scale;
    bool is_in_order;  // units that follow each other are computed by one thread, as a rule

    // the plan
    bool is_split;           // segments are units of their own, and `partials` takes what they find
    int64_t* first_unit;     // [num_seqs + 1]
    int64_t* first_partial;  // [num_seqs + 1]
    float* partials;         // per (sequence, segment, query, head): D sums, W weights, the peak

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_queries(int64_t seq) const { return query_start[seq + 1] - query_start[seq]; }
    int64_t num_units() const { return first_unit[num_seqs]; }
    int64_t num_tokens() const { return query_start[num_seqs]; }
};

// Whether a kernel covers this shape.
bool is_attention_supported(int64_t head_dim, int64_t group);

// Sets is_split; returns the floats that `partials` needs.
int64_t choose_split(Attention& job, int threads);

// Fills in first_unit and first_partial, for which there is room.
void plan_attention(Attention& job);

// What units compute with: for a thread, on its stack or elsewhere, aligned to 64 bytes.
int64_t attention_scratch_bytes(int dim);

using RunUnit = void (*)(const Attention& job, int64_t unit, void* scratch);

// The best that CPU and level have for this head_dim and kv_dtype; null where none covers it.
RunUnit attention_unit(int dim, DType kv_dtype);

// A query's segments into its result; all units done.
void merge_query(const Attention& job, int64_t token);

// One token's keys or values of the `num_heads` kv heads from `first_head` on, `heads` [num_heads, head_dim], contiguous, into their slot (block * block_size +
// offset) of a store that has num_kv_heads.
void write_slot(const Store& store, DType dtype, int64_t slot, int64_t num_kv_heads, int64_t block_size, int64_t dim, int64_t first_head, int64_t num_heads,
                const float* heads);

}  // namespace penstock
