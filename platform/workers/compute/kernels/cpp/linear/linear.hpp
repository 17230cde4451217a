// Products of activations with packed matrices: y[m, n] = sum over k of x[m, k] * w[n, k], with w in bfloat16 or in small integers by groups:
// w[n, k] = q[n, k] * scale[n, g] + offset[n, g], g = k / group (the normal form of quant/quantized.py).
//
// Two steps: `prepare` brings activations into the form that a path wants, `multiply` computes a range of outputs from it. Both keep no state
// and may run in several threads at once, on different rows and different outputs. Rounded (W4A8, W8A8) means products of bytes: activations are
// whole steps, with two terms 127 * 128 of them to the largest of its row, 128 * high + low, with one term 127 to the largest of its row and group. One
// term is half the work, and a group's largest activation ruins its neighbours: eight bits of it are few for them. So of each block of 32 columns the four
// neighbours with the largest may have a second term (its outliers), and 127 steps go to the largest of the others. Not rounded (W4A16) means that weights
// are dequantized, activations kept in bfloat16 (float32 where the CPU has no products of bfloat16).
//
// Invariants. A row's result is one fixed sequence of operations on that row and the matrix, whatever other rows there are, as long as the path
// is the same: level, rounding, and, where bfloat16 is quicker for many rows (`dense_rows`), whether m reaches so many. Padding is zeros on both sides. A row
// with NaN or infinity in it comes out with NaN where it has a share, other rows don't notice.

#pragma once

#include <stdint.h>

namespace penstock {

enum Kind : int32_t { BF16 = 0, INT8 = 1, INT4 = 2 };

// What the CPU can do, and is allowed to: VNNI is AVX-512 with VNNI, AVX512 has BF16 on top, AMX tiles of bf16. Tests set a 5 too: AMX with its tiles
// computed in C++ (linear.cpp).
enum Level : int32_t { PORTABLE = 0, AVX2 = 1, VNNI = 2, AVX512 = 3, AMX = 4 };

constexpr int32_t TILE_N = 16;    // outputs of a panel: `multiply` takes whole ones
constexpr int32_t BLOCK_K = 32;   // columns are padded to a multiple of it, and groups are multiples of it
constexpr int32_t TILE_M = 8;     // rows go side by side through products of bytes, the last ones up to `widest_tile`
constexpr int32_t BF16_ROWS = 16;  // rows from which on products of bfloat16 are quicker, for all that weights must be dequantized first
constexpr int32_t AMX_ROWS = 24;   // the same for tiles

// What becomes of activations for quantized matrices.
enum Rounding : int32_t { TWO_TERMS = 0, NOT_ROUNDED = 1, ONE_TERM = 2, OUTLIERS = 3 };

// A packed matrix; `data` is somebody else's memory, aligned to 64 bytes. packed.hpp has the layout.
struct Matrix {
    int32_t kind, n, k;
    int32_t group;     // columns of a group, a multiple of BLOCK_K; the last may be short. 0 for BF16
    int32_t has_zero;  // INT4: groups keep a zero point instead of an offset: offset = -zero * scale
    float unit;        // a power of two that scales (and offsets) are in
    const uint8_t* data;
};

// Memory that is needed soon, for which a path may ask while it multiplies: `each` lines of it with each block of 32 columns and each tile of rows
// (`num_asking`).
constexpr int64_t LINE = 64;  // bytes
struct Stretch {
    const char *begin, *end;  // whole lines
};
struct Ahead {
    const Stretch *next, *last;  // stretches [next, last) are still to come
    const char *at, *end;        // what is left of the one before
    int64_t each;
};

// Rows of activations in a path's form: pointers into scratch.
struct Inputs {
    int32_t m, k, k_padded, group, num_groups, level;
    int32_t kind;     // of the matrix: where a panel has an outlier's weights
    int32_t terms;    // of 8 bits to an activation; 0: not rounded
    bool has_outliers;  // of a row by itself terms are two then, and high bytes are zero elsewhere
    int32_t* outliers;  // [k_padded / BLOCK_K, OUTLIER_FIELDS, outlier_places(R)] of each tile of R rows (packed.hpp), of two rows and more; in dense's memory
    int8_t* q;        // [m, k_padded / 4, terms, 4]: of four columns the high bytes, then the low ones
    float* step;      // [m] with two terms, [m, num_groups] with one or with outliers
    float* sum;       // [m, num_groups]: of the rounded activations, with two terms in steps
    // From level AVX2 on q is [k_padded / 4, terms, R, 4], step and sum are [num_groups, R], with two terms step is [R], of each tile of R rows
    // (packed.hpp).
    void* dense;      // [m, k_padded], bfloat16 from level AVX512 on, float32 below; with AMX rows are padded to a multiple of 16
    // The caller's own, which `prepare` leaves as they are:
    Ahead* ahead;     // null: nothing
    bool is_reused;   // the matrix is wanted again before long, and small enough to stay in a cache until then
};

// Best level of this CPU, or the one that was set below it.
int32_t level();

// Scratch that `prepare` needs, whatever the group, level and rounding. Aligned to 64 bytes.
int64_t inputs_bytes(int32_t m, int32_t k);

// Fills `inputs` (alike in every call with the same arguments, so each thread may have its own) and, in scratch, rows [row_begin, row_end) of m.
// x: [m, k], `stride` floats from row to row, for a product with the matrix, or one of its kind, group and k. row_begin is a multiple of TILE_M, row_end too
// or it is m.
void prepare(Inputs& inputs, void* scratch, const float* x, int64_t stride, int32_t m, const Matrix& matrix, int32_t row_begin, int32_t row_end,
             Rounding rounding);

// Outputs [n_begin, n_end) of all rows, which must be prepared: output n of row m overwrites out[m * out_stride + n - n_begin]. n_begin is a
// multiple of TILE_N, n_end too or it is the matrix's n.
void multiply(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int32_t n_begin, int32_t n_end);

// Groups of rows that ask for memory ahead with each block of columns: of rounded inputs those in which products take longer than the weights' way from
// memory.
int64_t num_asking(const Inputs& inputs);

// Row `row` of the matrix, dequantized, to out[k].
void read_row(const Matrix& matrix, int32_t row, float* out);

}  // namespace penstock
