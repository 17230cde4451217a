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

// Tiles that are read behind a chunk, asked for line by line while that is computed: all at once they would be waited for, since a core has few requests to
// memory under way. A chunk of heads of 256 in bfloat16 is more than the nearest cache holds and comes out of the next one then.
struct Next {
    const char *keys[TILES], *values[TILES];
    int count;

    // The `line`-th line of each tile of keys.
    void ask_for_keys(int64_t line) const {
        for (int tile = 0; tile < count; tile++) __builtin_prefetch(keys[tile] + line * 64, 0, 2);
    }

    // The `part`-th of so many parts of each tile of values.
    template <int LINES>
    void ask_for_values(int64_t part, int64_t parts) const {
        for (int tile = 0; tile < count; tile++)
            for (int64_t line = part * LINES / parts; line < (part + 1) * LINES / parts; line++) __builtin_prefetch(values[tile] + line * 64, 0, 2);
    }
};

// Behind the chunk at `start` of stores with elements of so many bytes: the unit's next chunk; behind its last one the next unit's first, where units go by
// neighbours.
template <int64_t BYTES>
inline Next find_next(const Attention& job, const Unit& unit, int64_t start) {
    Next next = {};
    int64_t from = start + CHUNK;
    Unit then = unit;
    if (from >= unit.end) {
        if (!job.is_in_order || unit.index + 1 == job.num_units()) return next;
        then = find_unit(job, unit.index + 1);
        from = then.begin;
    }
    for (int64_t position = from; position < smaller(from + CHUNK, then.end); position += TILE, next.count++) {
        next.keys[next.count] = static_cast<const char*>(job.keys.data) + BYTES * offset_of(job, job.keys, then, position);
        next.values[next.count] = static_cast<const char*>(job.values.data) + BYTES * offset_of(job, job.values, then, position);
    }
    return next;
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
