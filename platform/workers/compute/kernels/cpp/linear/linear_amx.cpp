// Products by AMX tiles of bfloat16, for many rows: weights are dequantized to pairs once for all rows, sums stay in tiles for CHUNK_K columns.
//
// Tiles of bytes would take activations of 8 bits and twice the columns at once, but the sums of a group must leave the tile to be scaled: a tile
// product of 16 x 16 outputs and a group of 32 columns takes 16 cycles, scaling its result over 30 (counted, not measured). With bfloat16 there is nothing
// to scale.
//
// Two panels meet 32 rows: four tiles of sums, two of activations, two of weights.

#include "linear/linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

#define TILES __attribute__((target("amx-tile,amx-bf16")))

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

// The processor's tile registers (Intel SDM, volume 2: LDTILECFG, TILELOADD, TDPBF16PS).
struct Processor {
    TILES void begin() const {
        struct alignas(64) Configuration {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
            uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
        } configuration;
        __asm__ volatile("ldtilecfg %0" : : "m"(configuration));
    }
    TILES void end() const { __asm__ volatile("tilerelease"); }
    template <int T>
    TILES void zero() const {
        __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
    }
    template <int T>
    TILES void load(const void* from, int64_t stride) const {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    TILES void store(void* to, int64_t stride) const {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
    }
    template <int SUM, int A, int B>
    TILES void multiply() const {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    }
};

// The same in C++, to test this file on processors without tiles.
struct Emulation {
    struct alignas(64) Tile {
        uint8_t rows[TILE_ROWS][TILE_BYTES];
    };
    Tile tiles[8];
    void begin() { memset(tiles, 0xFF, sizeof tiles); }
    void end() {}
    template <int T>
    void zero() {
        memset(&tiles[T], 0, sizeof tiles[T]);
    }
    template <int T>
    void load(const void* from, int64_t stride) {
        for (int64_t row = 0; row < TILE_ROWS; row++) memcpy(tiles[T].rows[row], static_cast<const uint8_t*>(from) + row * stride, TILE_BYTES);
    }
    template <int T>
    void store(void* to, int64_t stride) {
        for (int64_t row = 0; row < TILE_ROWS; row++) memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[T].rows[row], TILE_BYTES);
    }
    template <int SUM, int A, int B>
    void multiply() {
        for (int64_t row = 0; row < TILE_ROWS; row++)
            for (int64_t column = 0; column < TILE_N; column++) {
                float sum;
                memcpy(&sum, tiles[SUM].rows[row] + 4 * column, 4);
                for (int64_t pair = 0; pair < TILE_ROWS; pair++) {
                    uint16_t a[2], b[2];
                    memcpy(a, tiles[A].rows[row] + 4 * pair, 4);
                    memcpy(b, tiles[B].rows[pair] + 4 * column, 4);
                    sum += from_bf16(a[0]) * from_bf16(b[0]) + from_bf16(a[1]) * from_bf16(b[1]);
                }
                memcpy(tiles[SUM].rows[row] + 4 * column, &sum, 4);
            }
    }
};

using Sums = float[2][2][TILE_ROWS][TILE_N];  // by tile of rows, by panel

template <typename Tiles>
TILES void multiply_tiles(Tiles& tiles, const uint16_t* x, int64_t x_stride, bool has_second_rows, const uint8_t* const (&pairs)[2], int64_t blocks, Sums& sums) {
    const uint16_t* second = has_second_rows ? x + TILE_ROWS * x_stride : x;
    tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>(), tiles.template zero<3>();
    for (int64_t block = 0; block < blocks; block++) {
        tiles.template load<6>(pairs[0] + block * TILE_ROWS * TILE_BYTES, TILE_BYTES);
        tiles.template load<4>(x + block * BLOCK_K, x_stride * 2);
        tiles.template multiply<0, 4, 6>();
        tiles.template load<7>(pairs[1] + block * TILE_ROWS * TILE_BYTES, TILE_BYTES);
        tiles.template multiply<1, 4, 7>();
        tiles.template load<5>(second + block * BLOCK_K, x_stride * 2);
        tiles.template multiply<2, 5, 6>();
        tiles.template multiply<3, 5, 7>();
    }
    tiles.template store<0>(sums[0][0], TILE_BYTES), tiles.template store<1>(sums[0][1], TILE_BYTES);
    tiles.template store<2>(sums[1][0], TILE_BYTES), tiles.template store<3>(sums[1][1], TILE_BYTES);
}

void keep(const float (&sums)[TILE_ROWS][TILE_N], float* out, int64_t out_stride, int64_t rows, int lanes, bool is_first) {
    for (int64_t row = 0; row < smaller(rows, TILE_ROWS); row++)
        for (int lane = 0; lane < lanes; lane++) out[row * out_stride + lane] = (is_first ? 0.0f : out[row * out_stride + lane]) + sums[row][lane];
}

template <typename Tiles>
void multiply_by_tiles(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    if (inputs.m < AMX_ROWS) {
        multiply_dense_bf16(matrix, inputs, out, out_stride, begin, end);
        return;
    }
    alignas(64) uint8_t buffers[2][CHUNK_BYTES];
    alignas(64) Sums sums;
    Tiles tiles;
    tiles.begin();
    for (int64_t panel = begin; panel < end; panel += 2) {
        const bool has_second = panel + 1 < end;
        for (int64_t start = 0; start < inputs.k_padded; start += CHUNK_K) {
            const uint8_t* first = pairs_of(matrix, panel, start, buffers[0]);
            const uint8_t* const pairs[2] = {first, has_second ? pairs_of(matrix, panel + 1, start, buffers[1]) : first};
            const int64_t blocks = smaller(CHUNK_K, inputs.k_padded - start) / BLOCK_K;
            for (int64_t row = 0; row < inputs.m; row += 2 * TILE_ROWS) {
                const uint16_t* x = static_cast<const uint16_t*>(inputs.dense) + row * inputs.k_padded + start;
                multiply_tiles(tiles, x, inputs.k_padded, row + TILE_ROWS < inputs.m, pairs, blocks, sums);
                for (int64_t upper = 0; upper < 2; upper++)
                    for (int64_t right = 0; right < 1 + has_second; right++)
                        keep(sums[upper][right], out + (row + upper * TILE_ROWS) * out_stride + (panel + right) * TILE_N, out_stride,
                             inputs.m - row - upper * TILE_ROWS, lanes_of(matrix, panel + right), start == 0);
            }
        }
    }
    tiles.end();
}

}  // namespace

void multiply_dense_amx(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    multiply_by_tiles<Processor>(matrix, inputs, out, out_stride, begin, end);
}

void multiply_dense_emulated_amx(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    multiply_by_tiles<Emulation>(matrix, inputs, out, out_stride, begin, end);
}

}  // namespace penstock
#endif
