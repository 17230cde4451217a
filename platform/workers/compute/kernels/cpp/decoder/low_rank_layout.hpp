// How adapters' matrices lie in memory, in bfloat16 or in 8 bits; as kernels/low_rank.py has it.

#pragma once

#include "base/numbers.hpp"
#include "base/vectors.hpp"

namespace penstock {

constexpr int64_t PANEL = 16, BLOCK = 2 * PANEL;
constexpr int SIDE_ROWS = W >= 16 ? 4 : 2;        // rows side by side: their sums fit the registers
constexpr int64_t SHRINK_RANKS = 64, SHRINK_ROWS = 4;  // of a piece of `shrink`, at most
constexpr int SIDE_PANELS = W >= 16 ? 2 : 1;
constexpr int MOST_PARTS = 3;

// One module in a matrix of the model.
struct LowRankPart {
    int64_t start, end;   // outputs of the matrix
    int64_t first, pairs; // ranks [first, first + 2 * pairs) of the matrix's A
    const char* b;        // panels of 16 outputs, the scaling in them (low_rank_halves.hpp, low_rank_bytes.hpp)
    const float* factor;  // [end - start], of the base product's outputs (DoRA); null: one
};

// What an adapter adds to one matrix of the model; of rank 0 nothing.
struct LowRank {
    int64_t rank, num_parts;  // of all parts, an even number each
    const char* a;            // [rank, blocks of 32 columns]; columns that are not there are zeros
    const float* scales;      // [rank], of A in 8 bits; null: A and B are bfloat16
    LowRankPart parts[MOST_PARTS];
};

inline int64_t bytes_of_block(const LowRank& matrix) { return BLOCK * (matrix.scales == nullptr ? 2 : 1); }

inline int64_t bytes_of_panel(const LowRank& matrix, const LowRankPart& part) {
    return PANEL * (matrix.scales == nullptr ? 4 * part.pairs : 2 + 2 * part.pairs);
}

}  // namespace penstock
