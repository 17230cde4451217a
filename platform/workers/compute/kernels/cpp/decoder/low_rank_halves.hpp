// What adapters in bfloat16 add to the products of a step (low_rank.hpp). Two of a kind lie in a 32-bit word, and become floats by a shift and a mask.

#pragma once

#include "decoder/low_rank_layout.hpp"

namespace penstock {

typedef int32_t UnalignedIVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline IVec load_pairs(const uint32_t* p) { return *reinterpret_cast<const UnalignedIVec*>(p); }
inline Vec low_of(IVec pairs) { return reinterpret_cast<Vec>(pairs << 16); }
inline Vec high_of(IVec pairs) { return reinterpret_cast<Vec>(pairs & static_cast<int32_t>(0xFFFF0000)); }

// ---- x A^T

// Adds a block of columns, which lie at x[row], to the sums. a: this block of the first rank; column i in the low half of a word, column 16 + i in the high.
template <int RANKS, int ROWS>
inline void add_block(Vec (&sums)[RANKS][ROWS], const uint32_t* a, int64_t stride, const float* const* x) {
    for (int lane = 0; lane < PANEL; lane += W) {
        Vec low[ROWS], high[ROWS];
        for (int row = 0; row < ROWS; row++) low[row] = load(x[row] + lane), high[row] = load(x[row] + PANEL + lane);
        for (int rank = 0; rank < RANKS; rank++) {
            const IVec pairs = load_pairs(a + rank * stride + lane);
            for (int row = 0; row < ROWS; row++) {
                sums[rank][row] += low_of(pairs) * low[row];
                sums[rank][row] += high_of(pairs) * high[row];
            }
        }
    }
}

template <int RANKS, int ROWS>
inline void shrink_tile(const uint32_t* a, const float* const* x, int64_t k, float* const* out) {
    const int64_t stride = (k + BLOCK - 1) / BLOCK * PANEL, whole = k / BLOCK;
    Vec sums[RANKS][ROWS] = {};
    const float* from[ROWS];
    for (int64_t block = 0; block < whole; block++) {
        for (int row = 0; row < ROWS; row++) from[row] = x[row] + block * BLOCK;
        add_block<RANKS, ROWS>(sums, a + block * PANEL, stride, from);
    }
    if (whole * BLOCK < k) {
        float rest[ROWS][BLOCK] = {};
        for (int row = 0; row < ROWS; row++) {
            memcpy(rest[row], x[row] + whole * BLOCK, sizeof(float) * (k - whole * BLOCK));
            from[row] = rest[row];
        }
        add_block<RANKS, ROWS>(sums, a + whole * PANEL, stride, from);
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (int row = 0; row < ROWS; row++) out[row][rank] = total(sums[rank][row]);
}

template <int ROWS>
inline void shrink_halves(const LowRank& matrix, int64_t begin, int64_t end, const float* const* x, int64_t k, float* const* out) {
    const int64_t stride = (k + BLOCK - 1) / BLOCK * PANEL;
    const uint32_t* a = reinterpret_cast<const uint32_t*>(matrix.a);
    float* to[ROWS];
    for (int64_t rank = begin; rank < end; rank += 4) {
        for (int row = 0; row < ROWS; row++) to[row] = out[row] + rank;
        (end - rank >= 4 ? shrink_tile<4, ROWS> : shrink_tile<2, ROWS>)(a + rank * stride, x, k, to);
    }
}

// ---- times B^T

// A panel, [pairs, 16 outputs], the even rank's number in the low half of a word, and that behind it: to[row].
template <int PANELS, int ROWS>
inline void expand_halves(const LowRankPart& part, int64_t panel, const float* const* inner, float (*to)[SIDE_PANELS * PANEL]) {
    constexpr int VECTORS = PANELS * PANEL / W;
    const uint32_t* b = reinterpret_cast<const uint32_t*>(part.b) + panel * part.pairs * PANEL;
    Vec low[VECTORS][ROWS] = {}, high[VECTORS][ROWS] = {};
    for (int64_t pair = 0; pair < part.pairs; pair++) {
        for (int i = 0; i < VECTORS; i++) {
            const IVec pairs = load_pairs(b + (i * W / PANEL * part.pairs + pair) * PANEL + i * W % PANEL);
            for (int row = 0; row < ROWS; row++) {
                low[i][row] += low_of(pairs) * inner[row][part.first + 2 * pair];
                high[i][row] += high_of(pairs) * inner[row][part.first + 2 * pair + 1];
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(to[row] + i * W, low[i][row] + high[i][row]);
}

}  // namespace penstock
