// What adapters add to the products of a step: y += x A^T B^T, for each row the matrices of its own adapter, or none (LoRA, Hu et al. 2021); DoRA (Liu et
// al. 2024) multiplies the base product's outputs with factors of their own first.
//
// Two parts. `shrink` computes x A^T, once for each row; `expand` adds that times B^T to any range of outputs, whoever computed them. The matrices are
// bfloat16, two of a kind to a 32-bit word, which become floats by a shift and a mask; everything else is float32.
//
// Invariant: a row's result is one fixed sequence of operations, however many rows are computed side by side, and however outputs are cut into ranges.

#pragma once

#include "base/numbers.hpp"
#include "base/vectors.hpp"

namespace penstock {

constexpr int64_t PANEL = 16, BLOCK = 2 * PANEL;
constexpr int64_t SHRINK_RANKS = 16, SHRINK_ROWS = 16;  // of a piece of `shrink`, at most
constexpr int SIDE_ROWS = W >= 16 ? 4 : 2;          // rows side by side: their sums fit the registers
constexpr int SIDE_PANELS = W >= 16 ? 2 : 1;
constexpr int MOST_PARTS = 3;

// One module in a matrix of the model; as kernels/low_rank.py has it.
struct LowRankPart {
    int64_t start, end;   // outputs of the matrix
    int64_t first, pairs; // ranks [first, first + 2 * pairs) of the matrix's A
    const uint32_t* b;    // [panels of 16 outputs, pairs, 16]: the even rank's number in the low half, the odd one's in the high; the scaling is in it
    const float* factor;  // [end - start], of the base product's outputs (DoRA); null: one
};

// What an adapter adds to one matrix of the model; of rank 0 nothing.
struct LowRank {
    int64_t rank, num_parts;  // of all parts, an even number each
    const uint32_t* a;        // [rank, blocks of 32 columns, 16]: column i in the low half, column 16 + i in the high; columns that are not there are zeros
    LowRankPart parts[MOST_PARTS];
};

typedef int32_t UnalignedIVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline IVec load_pairs(const uint32_t* p) { return *reinterpret_cast<const UnalignedIVec*>(p); }
inline Vec low_of(IVec pairs) { return reinterpret_cast<Vec>(pairs << 16); }
inline Vec high_of(IVec pairs) { return reinterpret_cast<Vec>(pairs & static_cast<int32_t>(0xFFFF0000)); }

// ---- x A^T

// Adds a block of columns, which lie at x[row], to the sums; a: this block of the first rank.
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
inline void shrink_rows(const LowRank& matrix, int64_t begin, int64_t end, const float* const* x, int64_t k, float* const* out) {
    const int64_t stride = (k + BLOCK - 1) / BLOCK * PANEL;
    float* to[ROWS];
    for (int64_t rank = begin; rank < end; rank += 4) {
        for (int row = 0; row < ROWS; row++) to[row] = out[row] + rank;
        (end - rank >= 4 ? shrink_tile<4, ROWS> : shrink_tile<2, ROWS>)(matrix.a + rank * stride, x, k, to);
    }
}

// Ranks [begin, end), from an even one to an even one, of up to SIDE_ROWS rows: out[row][rank].
inline void shrink(const LowRank& matrix, int64_t begin, int64_t end, int64_t num_rows, const float* const* x, int64_t k, float* const* out) {
    switch (num_rows) {
        case 1: return shrink_rows<1>(matrix, begin, end, x, k, out);
        case 2: return shrink_rows<2>(matrix, begin, end, x, k, out);
        case 3: return shrink_rows<(SIDE_ROWS > 3 ? 3 : 1)>(matrix, begin, end, x, k, out);
        default: return shrink_rows<SIDE_ROWS>(matrix, begin, end, x, k, out);
    }
}

// ---- times B^T

template <int PANELS, int ROWS>
inline void expand_tile(const LowRankPart& part, int64_t panel, const float* const* inner, float (*to)[SIDE_PANELS * PANEL]) {
    constexpr int VECTORS = PANELS * PANEL / W;
    const uint32_t* b = part.b + panel * part.pairs * PANEL;
    Vec low[VECTORS][ROWS] = {}, high[VECTORS][ROWS] = {};
    for (int64_t pair = 0; pair < part.pairs; pair++) {
        for (int i = 0; i < VECTORS; i++) {
            const IVec pairs = load_pairs(b + (i * W / PANEL * part.pairs + pair) * PANEL + i * W % PANEL);
            for (int row = 0; row < ROWS; row++) {
                low[i][row] += low_of(pairs) * inner[row][2 * pair];
                high[i][row] += high_of(pairs) * inner[row][2 * pair + 1];
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(to[row] + i * W, low[i][row] + high[i][row]);
}

// out = out * factor + added; factor: null stands for ones.
inline void take_in(float* out, const float* factor, const float* added, int64_t n) {
    int64_t i = 0;
    if (factor == nullptr) {
        for (; i + W <= n; i += W) store(out + i, load(out + i) + load(added + i));
        for (; i < n; i++) out[i] += added[i];
        return;
    }
    for (; i + W <= n; i += W) store(out + i, load(out + i) * load(factor + i) + load(added + i));
    for (; i < n; i++) out[i] = out[i] * factor[i] + added[i];
}

template <int ROWS>
inline void expand_rows(const LowRankPart& part, const float* const* inner, float* const* out, int64_t begin, int64_t end) {
    alignas(64) float added[ROWS][SIDE_PANELS * PANEL];
    const int64_t num_panels = (end - part.start + PANEL - 1) / PANEL;
    for (int64_t panel = (begin - part.start) / PANEL; panel < num_panels; panel += SIDE_PANELS) {
        const bool is_single = panel + SIDE_PANELS > num_panels;
        (is_single ? expand_tile<1, ROWS> : expand_tile<SIDE_PANELS, ROWS>)(part, panel, inner, added);
        const int64_t start = part.start + panel * PANEL, width = is_single ? PANEL : SIDE_PANELS * PANEL;
        const int64_t first = larger(begin, start), last = smaller(end, start + width);
        for (int row = 0; row < ROWS; row++)
            take_in(out[row] + first - begin, part.factor == nullptr ? nullptr : part.factor + first - part.start, added[row] + first - start, last - first);
    }
}

// Outputs [begin, end) of a part, of up to SIDE_ROWS rows: out[row][output - begin]; inner[row]: what `shrink` gave for the matrix.
inline void expand(const LowRankPart& part, int64_t num_rows, const float* const* inner, float* const* out, int64_t begin, int64_t end) {
    const float* from[SIDE_ROWS];
    for (int64_t row = 0; row < num_rows; row++) from[row] = inner[row] + part.first;
    switch (num_rows) {
        case 1: return expand_rows<1>(part, from, out, begin, end);
        case 2: return expand_rows<2>(part, from, out, begin, end);
        case 3: return expand_rows<(SIDE_ROWS > 3 ? 3 : 1)>(part, from, out, begin, end);
        default: return expand_rows<SIDE_ROWS>(part, from, out, begin, end);
    }
}

}  // namespace penstock
