// How a step's products are shared out among its threads.

#pragma once

#include "decoder/decoder.hpp"

namespace penstock {

constexpr int64_t ROWS_A_PIECE = TILE_M;  // tokens normed or prepared at a time: a tile of them, or a part of the widest
constexpr int64_t PIECES = 4;            // of a product to a thread, or somewhat more, where there are enough panels

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

constexpr int64_t OUTLIER_ROWS = 4;  // of a product that have outliers whatever the step

inline Rounding rounding_of(const Run& run, int64_t num_rows) {
    switch (run.model->activations) {
        case NEVER_ROUNDED: return NOT_ROUNDED;
        case ALWAYS_ONE_TERM: return ONE_TERM;
        case ALWAYS_TWO_TERMS: return TWO_TERMS;
        default: break;
    }
    return run.has_short_prompt || num_rows <= OUTLIER_ROWS ? OUTLIERS : ONE_TERM;
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
    prepare(me.inputs, is_own ? me.prepared : run.prepared, x, operand.width, static_cast<int32_t>(operand.num_rows), matrix, static_cast<int32_t>(begin),
            static_cast<int32_t>(end), rounding_of(run, operand.num_rows));
}

// ---- adapters

// What the step's adapters add to a product: its place in each of their lists of matrices, and which rows have which.
struct Adapted {
    const Groups* groups;  // null: nothing is added
    int64_t place;
};

inline Adapted adapted(const Stream& stream, int64_t layer, AdaptedMatrix matrix) { return {&stream.groups, layer * MATRICES + matrix}; }

// Calls use(the LowRank, its rows, how many) for each adapter that adds something to some rows.
template <typename Use>
inline void for_each_adapter(const Run& run, const Adapted& adapted, Use use) {
    if (adapted.groups == nullptr) return;
    for (int64_t i = 0; i < run.step->num_adapters; i++) {
        const LowRank& matrix = run.step->adapters[i][adapted.place];
        const int64_t first = adapted.groups->first[i], count = adapted.groups->first[i + 1] - first;
        if (matrix.rank > 0 && count > 0) use(matrix, adapted.groups->rows + first, count);
    }
}

inline int64_t parts_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

inline int64_t num_shrinks(const Run& run, const Adapted& adapted) {
    int64_t count = 0;
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t*, int64_t rows) { count += parts_of(matrix.rank, SHRINK_RANKS) * parts_of(rows, SHRINK_ROWS); });
    return count;
}

// The `unit`-th piece of what adapters make of an operand's rows, x [.., k].
inline void shrink_unit(Run& run, const Adapted& adapted, int64_t unit, const float* x, int64_t k) {
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t* rows, int64_t num_rows) {
        const int64_t of_ranks = parts_of(matrix.rank, SHRINK_RANKS), count = of_ranks * parts_of(num_rows, SHRINK_ROWS), mine = unit;
        unit -= count;
        if (mine < 0 || mine >= count) return;
        const int64_t begin = mine % of_ranks * SHRINK_RANKS, end = smaller(matrix.rank, begin + SHRINK_RANKS);
        const int64_t first = mine / of_ranks * SHRINK_ROWS, last = smaller(num_rows, first + SHRINK_ROWS);
        for (int64_t start = first; start < last; start += SIDE_ROWS) {
            const int64_t side = smaller(SIDE_ROWS, last - start);
            const float* from[SIDE_ROWS];
            float* to[SIDE_ROWS];
            for (int64_t i = 0; i < side; i++) from[i] = x + rows[start + i] * k, to[i] = run.shrunk + rows[start + i] * run.step->widest_rank;
            shrink(matrix, begin, end, side, from, k, to, run.step->widest_rank);
        }
    });
}

// Adds what adapters add to outputs [begin, end) of a product, of all rows: output n of row m is out[m * stride + n - begin].
inline void add_adapters(const Run& run, const Worker& me, const Adapted& adapted, float* out, int64_t stride, int64_t begin, int64_t end) {
    if (me.shrinking == nullptr) return;
    wait(*me.shrinking, me.num_shrinks);
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t* rows, int64_t num_rows) {
        for (const LowRankPart* part = matrix.parts; part < matrix.parts + matrix.num_parts; part++) {
            const int64_t first = larger(begin, part->start), last = smaller(end, part->end);
            for (int64_t start = 0; first < last && start < num_rows; start += SIDE_ROWS) {
                const int64_t side = smaller(SIDE_ROWS, num_rows - start);
                const float* inner[SIDE_ROWS];
                float* to[SIDE_ROWS];
                for (int64_t i = 0; i < side; i++)
                    inner[i] = run.shrunk + rows[start + i] * run.step->widest_rank, to[i] = out + rows[start + i] * stride + first - begin;
                expand(matrix, *part, side, {inner, run.step->widest_rank}, to, first, last);
            }
        }
    });
}

// Where adapters' matrices lie that are needed soon.
struct Noted {
    Stretch* stretches;
    int64_t count, lines;

    // From the line in which the stretch begins to the one in which it ends: an adapter's memory is of whole lines.
    void add(const char* begin, const char* end) {
        if (begin == end) return;
        const char* first = begin - reinterpret_cast<uintptr_t>(begin) % LINE;
        const int64_t added = parts_of(end - first, LINE);
        stretches[count++] = {first, first + added * LINE};
        lines += added;
    }
};

// Notes what `add_adapters` reads for outputs [begin, end).
inline void note_expand(const Run& run, const Adapted& adapted, int64_t begin, int64_t end, Noted& noted) {
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t*, int64_t) {
        for (const LowRankPart* part = matrix.parts; part < matrix.parts + matrix.num_parts; part++) {
            const int64_t first = larger(begin, part->start) - part->start, last = smaller(end, part->end) - part->start;
            const int64_t size = bytes_of_panel(matrix, *part);
            if (first < last) noted.add(part->b + first / PANEL * size, part->b + parts_of(last, PANEL) * size);
        }
    });
}

// Notes the `index`-th of `count` parts of what `shrink_unit` reads for an operand of width k.
inline void note_shrink(const Run& run, const Adapted& adapted, int64_t k, int64_t index, int64_t count, Noted& noted) {
    const auto lines_of = [&](const LowRank& matrix) { return parts_of(matrix.rank * parts_of(k, BLOCK) * bytes_of_block(matrix), LINE); };
    int64_t total = 0;
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t*, int64_t) { total += lines_of(matrix); });
    int64_t first = total * index / count, last = total * (index + 1) / count;
    for_each_adapter(run, adapted, [&](const LowRank& matrix, const int64_t*, int64_t) {
        const int64_t lines = lines_of(matrix);
        noted.add(matrix.a + smaller(larger(first, 0), lines) * LINE, matrix.a + smaller(larger(last, 0), lines) * LINE);
        first -= lines, last -= lines;
    });
}

// ---- products

// The product behind another, as far as adapters go: its own matrices of them, and the width of its operand.
struct Following {
    Adapted adapted;
    int64_t width;
};

// Outputs [begin, end) of a product, begin a multiple of TILE_N, with what adapters add: output n of row m is out[m * stride + n - begin]. While a panel is
// multiplied what adapters add to it is asked for, and a part of what the next product's operand meets of theirs, where that takes longer than the panel's way
// from memory.
inline void multiply_adapted(const Run& run, Worker& me, const Adapted& adapted, const Following& following, const Matrix& matrix, float* out, int64_t stride,
                             int64_t begin, int64_t end) {
    const int64_t asking = run.step->num_adapters == 0 ? 0 : num_asking(me.inputs);
    if (asking == 0) {
        multiply(matrix, me.inputs, out, stride, static_cast<int32_t>(begin), static_cast<int32_t>(end));
        add_adapters(run, me, adapted, out, stride, begin, end);
        return;
    }
    constexpr int64_t WIDTH = 4 * SIDE_PANELS * TILE_N;
    const int64_t panels = parts_of(matrix.n, WIDTH);
    for (int64_t first = begin; first < end; first += WIDTH) {
        const int64_t last = smaller(first + WIDTH, end), blocks = parts_of(last - first, TILE_N) * parts_of(matrix.k, BLOCK_K) * asking;
        float* to = out + first - begin;
        Noted noted = {me.stretches, 0, 0};
        note_expand(run, adapted, first, last, noted);
        note_shrink(run, following.adapted, following.width, first / WIDTH, panels, noted);
        Ahead ahead = {noted.stretches, noted.stretches + noted.count, nullptr, nullptr, parts_of(noted.lines, blocks)};
        me.inputs.ahead = &ahead;
        multiply(matrix, me.inputs, to, stride, static_cast<int32_t>(first), static_cast<int32_t>(last));
        me.inputs.ahead = nullptr;
        add_adapters(run, me, adapted, to, stride, first, last);
    }
}

// Shares out `count` pieces of products of the operand with the matrix, its rows prepared before, and what adapters make of them; `piece` takes the inputs
// and a piece's number.
template <typename Piece>
inline void share_matmul(Run& run, Worker& me, Phase*& phase, const Operand& operand, const Matrix& matrix, const Adapted& adapted, int64_t count, Piece piece) {
    const bool is_own = operand.num_rows <= OWN_ROWS;
    if (!is_own) {
        const int64_t pieces = (operand.num_rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
        share(*phase++, pieces, [&](int64_t i) {
            prepare_rows(run, me, operand, matrix, false, i * ROWS_A_PIECE, smaller((i + 1) * ROWS_A_PIECE, operand.num_rows));
        });
    }
    bool is_ready = false;
    const auto get_ready = [&]() {
        if (!is_ready) prepare_rows(run, me, operand, matrix, is_own, 0, is_own ? operand.num_rows : 0);
        is_ready = true;
    };
    // nobody waits for these before he has multiplied something himself
    me.num_shrinks = num_shrinks(run, adapted);
    me.shrinking = me.num_shrinks > 0 ? phase++ : nullptr;
    if (me.num_shrinks > 0) {
        take(phase[-1], me.num_shrinks, [&](int64_t i) {
            get_ready();
            shrink_unit(run, adapted, i, operand.norm == nullptr ? operand.x : is_own ? me.rows : run.rows, operand.width);
        });
    }
    share(*phase++, count, [&](int64_t i) {
        get_ready();
        piece(piece_of(i, count, run.threads));
    });
}

inline void add_bias(float* rows, const float* bias, int64_t num_rows, int64_t width, int64_t stride) {
    if (bias == nullptr) return;
    for (int64_t r = 0; r < num_rows; r++) add(rows + r * stride, bias, width);
}

}  // namespace penstock
