// What adapters add to the products of a step: y += x A^T B^T, for each row the matrices of its own adapter, or none (LoRA, Hu et al. 2021); DoRA (Liu et
// al. 2024) multiplies the base product's outputs with factors of their own first.
//
// Two parts. `shrink` computes x A^T, once for each row; `expand` adds that times B^T to any range of outputs, whoever computed them. The matrices are
// bfloat16, and everything else float32; or, beside a quantized model, 8 bits with a scale for each row of A and each output of B: what takes the time is
// their way from memory.
//
// Invariant: a row's result is one fixed sequence of operations, however many rows are computed side by side, and however outputs are cut into ranges.

#pragma once

#include "decoder/low_rank_bytes.hpp"
#include "decoder/low_rank_halves.hpp"

namespace penstock {

// Ranks [begin, end), from a multiple of SHRINK_RANKS on and at most so many, of up to SIDE_ROWS rows, to out[row], where there is room for `ranks`.
template <int ROWS>
inline void shrink_rows(const LowRank& matrix, int64_t begin, int64_t end, const float* const* x, int64_t k, float* const* out, int64_t ranks) {
    if (matrix.scales == nullptr) return shrink_halves<ROWS>(matrix, begin, end, x, k, out);
    shrink_bytes<ROWS>(matrix, begin, end, x, k, out, ranks);
}

inline void shrink(const LowRank& matrix, int64_t begin, int64_t end, int64_t num_rows, const float* const* x, int64_t k, float* const* out, int64_t ranks) {
    switch (num_rows) {
        case 1: return shrink_rows<1>(matrix, begin, end, x, k, out, ranks);
        case 2: return shrink_rows<2>(matrix, begin, end, x, k, out, ranks);
        case 3: return shrink_rows<(SIDE_ROWS > 3 ? 3 : 1)>(matrix, begin, end, x, k, out, ranks);
        default: return shrink_rows<SIDE_ROWS>(matrix, begin, end, x, k, out, ranks);
    }
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

// What `shrink` found for a step's rows.
struct Shrunk {
    const float* const* inner;
    int64_t ranks;  // that each has room for
};

template <int PANELS, int ROWS>
inline void expand_tile(const LowRank& matrix, const LowRankPart& part, int64_t panel, const Shrunk& from, float (*to)[SIDE_PANELS * PANEL]) {
    if (matrix.scales == nullptr) return expand_halves<PANELS, ROWS>(part, panel, from.inner, to);
    expand_bytes<PANELS, ROWS>(part, panel, from.inner, from.ranks, to);
}

template <int ROWS>
inline void expand_rows(const LowRank& matrix, const LowRankPart& part, const Shrunk& from, float* const* out, int64_t begin, int64_t end) {
    alignas(64) float added[ROWS][SIDE_PANELS * PANEL];
    const int64_t num_panels = (end - part.start + PANEL - 1) / PANEL;
    for (int64_t panel = (begin - part.start) / PANEL; panel < num_panels; panel += SIDE_PANELS) {
        const bool is_single = panel + SIDE_PANELS > num_panels;
        (is_single ? expand_tile<1, ROWS> : expand_tile<SIDE_PANELS, ROWS>)(matrix, part, panel, from, added);
        const int64_t start = part.start + panel * PANEL, width = is_single ? PANEL : SIDE_PANELS * PANEL;
        const int64_t first = larger(begin, start), last = smaller(end, start + width);
        for (int row = 0; row < ROWS; row++)
            take_in(out[row] + first - begin, part.factor == nullptr ? nullptr : part.factor + first - part.start, added[row] + first - start, last - first);
    }
}

// Outputs [begin, end) of a part, of up to SIDE_ROWS rows: out[row][output - begin].
inline void expand(const LowRank& matrix, const LowRankPart& part, int64_t num_rows, const Shrunk& from, float* const* out, int64_t begin, int64_t end) {
    switch (num_rows) {
        case 1: return expand_rows<1>(matrix, part, from, out, begin, end);
        case 2: return expand_rows<2>(matrix, part, from, out, begin, end);
        case 3: return expand_rows<(SIDE_ROWS > 3 ? 3 : 1)>(matrix, part, from, out, begin, end);
        default: return expand_rows<SIDE_ROWS>(matrix, part, from, out, begin, end);
    }
}

}  // namespace penstock
