// How a step's products are shared out among its threads.

#pragma once

#include "decoder/decoder.hpp"

namespace penstock {

constexpr int64_t ROWS_A_PIECE = TILE_M;  // tokens normed or prepared at a time, whole tiles of them
constexpr int64_t PIECES = 8;        // of a product to a thread, or somewhat more, where there are enough panels

struct Split {
    int64_t width, count;  // outputs of a piece, and how many pieces
};

// Of `n` outputs that belong together in units of `unit`, itself a multiple of TILE_N unless there is one unit only.
inline Split split(int64_t n, int64_t unit, int64_t num_rows, int threads) {
    const int64_t units = (n + unit - 1) / unit;
    int64_t each = smaller(larger(units / (threads * PIECES), 1), larger(widest(num_rows) * TILE_N / unit, 1));
    // a number of pieces that all threads can have the same of
    for (int64_t fewer = each; fewer > 0 && fewer * 2 >= each; fewer--) {
        if (units % (fewer * threads) == 0) {
            each = fewer;
            break;
        }
    }
    return {each * unit, (units + each - 1) / each};
}

inline int64_t common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t rest = x % y;
        x = y, y = rest;
    }
    return a / x * b;
}

inline Split split_qkv(const Run& run) {
    const Model& model = *run.model;
    return split(num_qkv_heads(model) * model.dim, common_multiple(model.dim, TILE_N), run.step->num_tokens, run.threads);
}

// ---- operands

constexpr int64_t FEW_ROWS = 4;  // the weights' way from memory takes as long as two terms of so many rows

inline Rounding rounding_of(const Run& run, int64_t num_rows) {
    switch (run.model->activations) {
        case NEVER_ROUNDED: return NOT_ROUNDED;
        case ALWAYS_ONE_TERM: return ONE_TERM;
        case ALWAYS_TWO_TERMS: return TWO_TERMS;
        default: break;
    }
    return num_rows <= FEW_ROWS || run.has_short_prompt ? TWO_TERMS : ONE_TERM;
}

// Rows of float32, perhaps to be normed on the way, that a product takes.
struct Operand {
    const float* x;
    const float* norm;  // null: as they are
    int64_t num_rows, width;
};

inline void norm_rows(const Run& run, const Operand& operand, int64_t begin, int64_t end, float* to) {
    for (int64_t r = begin; r < end; r++) {
        rms_norm(operand.x + r * operand.width, operand.norm, operand.width, run.model->eps, to + r * operand.width);
    }
}

inline void prepare_rows(Run& run, Worker& me, const Operand& operand, const Matrix& matrix, bool is_own, int64_t begin, int64_t end) {
    const float* x = operand.x;
    if (operand.norm != nullptr) {
        float* normed = is_own ? me.rows : run.rows;
        norm_rows(run, operand, begin, end, normed);
        x = normed;
    }
    prepare(me.inputs, is_own ? me.prepared : run.prepared, x, operand.width, static_cast<int32_t>(operand.num_rows), static_cast<int32_t>(operand.width),
            matrix.group, static_cast<int32_t>(begin), static_cast<int32_t>(end), rounding_of(run, operand.num_rows));
}

// Shares out `count` pieces of products of the operand with the matrix, its rows prepared before; `piece` takes the inputs and a piece's number.
template <typename Piece>
inline void share_matmul(Run& run, Worker& me, Phase*& phase, const Operand& operand, const Matrix& matrix, int64_t count, Piece piece) {
    const bool is_own = operand.num_rows <= OWN_ROWS;
    if (!is_own) {
        const int64_t pieces = (operand.num_rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
        share(*phase++, pieces, [&](int64_t i) {
            prepare_rows(run, me, operand, matrix, false, i * ROWS_A_PIECE, smaller((i + 1) * ROWS_A_PIECE, operand.num_rows));
        });
    }
    bool is_ready = false;
    share(*phase++, count, [&](int64_t i) {
        if (!is_ready) prepare_rows(run, me, operand, matrix, is_own, 0, is_own ? operand.num_rows : 0);
        is_ready = true;
        piece(i);
    });
}

inline void add_bias(float* rows, const float* bias, int64_t num_rows, int64_t width, int64_t stride) {
    if (bias == nullptr) return;
    for (int64_t r = 0; r < num_rows; r++) add(rows + r * stride, bias, width);
}

}  // namespace penstock
