// How units of attention over tiles walk through a context, whatever computes: chunk by chunk, rows side by side, segments merged.

#pragma once

#include "attention/attention_unit.hpp"

namespace penstock {

constexpr int TILES = CHUNK / TILE;
constexpr int ROWS = 4;  // computed side by side, at most

// The running softmax of one (query, head), weights relative to 2**peak.
struct State {
    float peak, weight;
};

// A tile into the nearest cache, ahead of its use. A chunk of heads of 256 in bfloat16 is more than that cache holds and comes out of the next one then.
template <int D>
inline void prefetch(const void* tile) {
    for (int line = 0; line < D * TILE * 2; line += 64) __builtin_prefetch(static_cast<const char*>(tile) + line);
}

// Prefetches what is read behind the chunk at `start`: the unit's next chunk, behind its last one the next head's first, which as a rule is computed
// next in this thread.
template <int TILE_ELEMENTS, typename Element>
inline void ask_for_next(const Attention& job, const Unit& unit, int64_t start, const Element* keys, const Element* values) {
    Unit then = unit;
    int64_t from = start + CHUNK;
    if (from >= unit.end) {
        if (++then.kv_head == job.num_kv_heads) return;
        from = unit.begin;
    }
    for (int64_t position = from; position < smaller(from + CHUNK, unit.end); position += TILE) {
        prefetch<TILE_ELEMENTS>(keys + offset_of(job, job.keys, then, position));
        prefetch<TILE_ELEMENTS>(values + offset_of(job, job.values, then, position));
    }
}

// How many of a chunk's `count` positions from `start` on rows [r, r + rows) see; returns the most.
inline int64_t find_visible(const Attention& job, const Unit& unit, int64_t r, int64_t rows, int64_t start, int64_t count, int* visible) {
    for (int64_t i = 0; i < rows; i++) visible[i] = static_cast<int>(smaller(unit.first_visible + query_of(job, r + i) - start, count));
    return visible[rows - 1];
}

template <int R>
struct Rows {
    static constexpr int count = R;
};

// Calls `absorb` with all rows of a unit that see something of a chunk, ROWS or fewer at a time, and how much each of them sees.
template <typename Absorb>
void for_rows(const Attention& job, const Unit& unit, int64_t start, int64_t count, Absorb absorb) {
    for (int64_t r = 0; r < unit.num_rows; r += ROWS) {
        const int64_t rows = smaller(ROWS, unit.num_rows - r);
        int visible[ROWS];
        if (find_visible(job, unit, r, rows, start, count, visible) <= 0) continue;
        switch (rows) {
            case 1: absorb(Rows<1>(), r, visible); break;
            case 2: absorb(Rows<2>(), r, visible); break;
            case 3: absorb(Rows<3>(), r, visible); break;
            default: absorb(Rows<4>(), r, visible);
        }
    }
}

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

}  // namespace penstock
