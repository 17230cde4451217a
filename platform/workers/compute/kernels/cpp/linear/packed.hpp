// How matrices lie in memory, and what the paths of linear*.cpp share.
//
// A matrix is ceil(n / 16) panels of 16 outputs, one after the other; a panel is its groups in order, each as one stream to read forward:
//   INT4  16 scales, 16 offsets (or zero points), float16; then a block of 256 bytes for each 32 columns: byte [j < 4][lane < 16][b < 4] holds
//         column 8 j + b of output `lane` in its low and column 8 j + 4 + b in its high nibble
//   INT8  16 scales, float32; then 512 bytes for each 32 columns: byte [j < 8][lane][b < 4] holds q + 128 of column 4 j + b
//   BF16  (a single group without a head) 1024 bytes for each 32 columns: [j < 16][lane][b < 2], column 2 j + b
// So 4 (2) neighbouring columns of 16 outputs are a vector for products of bytes (bfloat16 pairs), and rows of an AMX tile.

#pragma once

#include <stdint.h>
#include <string.h>

#include "linear/linear.hpp"
#include "base/numbers.hpp"

namespace penstock {

constexpr int64_t HEAD_BYTES = 64;
constexpr int32_t INT8_ZERO = 128;
constexpr int32_t LOW_BITS = 7, LOW_STEPS = 1 << LOW_BITS;
constexpr float MOST_STEPS = 127 * LOW_STEPS;      // of a row's largest activation, in two terms
constexpr float MOST_STEPS_OF_ONE = 127;           // of a group's, in one
constexpr int32_t NOT_FINITE = 0x7F800000;         // bits of the magnitudes from which on a number is none
constexpr int32_t LEAST_ROUNDED = (127 - 64) << 23;  // of 2**-64: rows or groups of smaller activations count as zeros
constexpr int64_t WIDEST_TILE = 11;
constexpr int64_t MOST_BLOCKS = 16;  // whose sums of 8 bits times MOST_STEPS fit 32 bits
constexpr int32_t CHUNK_K = 1024;  // columns dequantized at a time; a multiple of every BLOCK_K

inline int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t padded_k(const Matrix& matrix) { return rounded_up(matrix.k, BLOCK_K); }
inline int64_t block_bytes(int32_t kind) { return kind == INT4 ? 256 : kind == INT8 ? 512 : 1024; }
inline int64_t num_groups(const Matrix& matrix) { return matrix.group == 0 ? 0 : (matrix.k + matrix.group - 1) / matrix.group; }
inline int64_t panel_bytes(const Matrix& matrix) { return num_groups(matrix) * HEAD_BYTES + padded_k(matrix) / BLOCK_K * block_bytes(matrix.kind); }
inline int64_t group_bytes(const Matrix& matrix) { return HEAD_BYTES + matrix.group / BLOCK_K * block_bytes(matrix.kind); }
inline const uint8_t* panel_of(const Matrix& matrix, int64_t panel) { return matrix.data + panel * panel_bytes(matrix); }
inline int64_t num_panels(const Matrix& matrix) { return (matrix.n + TILE_N - 1) / TILE_N; }

// Blocks of group `group`; the last one may have fewer.
inline int64_t num_blocks(const Matrix& matrix, int64_t group) {
    return smaller(matrix.group, padded_k(matrix) - group * matrix.group) / BLOCK_K;
}

// Scales and offsets of a group's 16 outputs, offset for q as it is stored.
struct Head {
    alignas(64) float scale[TILE_N], offset[TILE_N];
};

inline void read_head(const Matrix& matrix, const uint8_t* group, Head& head) {
    for (int lane = 0; lane < TILE_N; lane++) {
        if (matrix.kind == INT4) {
            uint16_t half[2];
            memcpy(half, group + 2 * lane, 2);
            memcpy(half + 1, group + 2 * (TILE_N + lane), 2);
            head.scale[lane] = from_f16(half[0]);
            head.offset[lane] = matrix.has_zero ? -from_f16(half[1]) * head.scale[lane] : from_f16(half[1]);
        } else {
            memcpy(head.scale + lane, group + 4 * lane, 4);
            head.offset[lane] = -INT8_ZERO * head.scale[lane];
        }
        head.scale[lane] *= matrix.unit;
        head.offset[lane] *= matrix.unit;
    }
}

// q, as stored, of output `lane` and column `column` < 32 of a block.
inline int32_t stored_q(int32_t kind, const uint8_t* block, int64_t lane, int64_t column) {
    if (kind == INT8) return block[(column / 4 * TILE_N + lane) * 4 + column % 4];
    return block[(column / 8 * TILE_N + lane) * 4 + column % 4] >> (column / 4 % 2 * 4) & 15;
}

// A number of rows that is known where code is made.
template <int R>
struct Count {
    constexpr operator int() const { return R; }
};

// Rows that a tile of rounded inputs has at the most; only the last one has more than TILE_M. AVX-512 has registers for eleven of one term alone: a ninth row by
// itself would have a panel read and unpacked again, and wait for its own sums.
inline int64_t widest_tile(const Inputs& inputs) { return inputs.level >= VNNI && inputs.terms == 1 && !inputs.has_outliers ? WIDEST_TILE : TILE_M; }

// The row with which the last tile of rounded inputs begins; those before it have TILE_M.
inline int64_t last_tile(const Inputs& inputs) {
    const int64_t most = widest_tile(inputs);
    return inputs.m <= most ? 0 : (inputs.m - most + TILE_M - 1) / TILE_M * TILE_M;
}

// Calls run(Count) for a number of rows below eight, if there are any: they go side by side too, because weights are unpacked once for all of them.
template <typename Function>
inline void with_rest(int64_t rows, Function run) {
    switch (rows) {
        case 1: return run(Count<1>());
        case 2: return run(Count<2>());
        case 3: return run(Count<3>());
        case 4: return run(Count<4>());
        case 5: return run(Count<5>());
        case 6: return run(Count<6>());
        case 7: return run(Count<7>());
        default: return;
    }
}

// The same for all that a tile may have.
template <typename Function>
inline void with_tile(int64_t rows, Function run) {
    switch (rows) {
        case 8: return run(Count<8>());
        case 9: return run(Count<9>());
        case 10: return run(Count<10>());
        case 11: return run(Count<11>());
        default: return with_rest(rows, run);
    }
}

// What a block of 32 columns of a row has besides one term: the high bytes of four columns, and where a panel's block has the weights to go with them: the bits
// of a mask of the 64 bytes from a place on, in products that are shifted left to be steps.
enum OutlierField { HIGH, MASK, SHIFT, PLACE, OUTLIER_FIELDS };

// Of `rows` rows side by side, the places of each field of a block: no more of them cross lines than must.
constexpr int64_t outlier_places(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : 8; }

constexpr int FEW_ROWS = 4;  // that take no longer side by side than their weights' way from memory, but in one term

// Whether R rows side by side ask for memory ahead.
template <int TERMS, int R>
constexpr bool ASKS = TERMS == 1 || R > FEW_ROWS;

// Asks for what is wanted soon.
inline void ask_for(Ahead* ahead) {
    if (ahead == nullptr) return;
    for (int64_t i = 0; i < ahead->each; i++, ahead->at += LINE) {
        if (ahead->at == ahead->end) {
            if (ahead->next == ahead->last) return;
            ahead->at = ahead->next->begin, ahead->end = ahead->next->end, ahead->next++;
        }
        __builtin_prefetch(ahead->at, 0, 3);
    }
}

// Rows as in `prepare`; panels [begin, end).
using Prepare = void(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end);
using Multiply = void(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end);

Prepare prepare_rounded, prepare_dense;
Multiply multiply_rounded, multiply_dense;
#if defined(__x86_64__)
Prepare prepare_rounded_avx2, prepare_rounded_vnni, prepare_dense_bf16;
Multiply multiply_rounded_avx2, multiply_rounded_vnni, multiply_dense_avx2, multiply_dense_bf16, multiply_dense_amx, multiply_dense_emulated_amx;
#endif

// Outputs of a panel that exist.
inline int lanes_of(const Matrix& matrix, int64_t panel) { return static_cast<int>(smaller(TILE_N, matrix.n - panel * TILE_N)); }

}  // namespace penstock
