// Packing, the choice of a path, the portable path, and the C ABI. See linear.hpp.

#include "linear/linear.hpp"

#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear/packed.hpp"
#include "base/team.hpp"

namespace penstock {

namespace {

// ---- levels

#if defined(__x86_64__)
bool has_bits(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

// Processor state that the operating system keeps (XCR0).
uint64_t enabled_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

int32_t detected_level() {
    uint32_t a, b, c, d, a1, b1, c1, d1;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return PORTABLE;
    if (!has_bits(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C) || (enabled_state() & 6) != 6) return PORTABLE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_bits(b, bit_AVX2)) return PORTABLE;
    constexpr uint32_t F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, BYTES = 1u << 11, BFLOAT16 = 1u << 5;
    if (!has_bits(b, F_DQ_BW_VL) || !has_bits(c, BYTES) || (enabled_state() & 0xE6) != 0xE6) return AVX2;
    if (!__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) || !has_bits(a1, BFLOAT16)) return VNNI;
    // tiles have run in their emulation only: until they have on hardware, it takes somebody who asks for them
    const char* wanted = getenv("PENSTOCK_AMX");
    if (wanted == nullptr || wanted[0] != '1') return AVX512;
    constexpr uint32_t TILES_INT8_BF16 = 1u << 22 | 1u << 24 | 1u << 25;
    // ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA (Linux, arch/x86/kernel/fpu/xstate.c): without it the first tile instruction is a SIGILL
    if (!has_bits(d, TILES_INT8_BF16) || syscall(SYS_arch_prctl, 0x1023, 18) != 0) return AVX512;
    return AMX;
}
#else
int32_t detected_level() { return PORTABLE; }
#endif

int32_t best_level() {
    static int32_t found = -1;
    int32_t level = __atomic_load_n(&found, __ATOMIC_RELAXED);
    if (level < 0) __atomic_store_n(&found, level = detected_level(), __ATOMIC_RELAXED);
    return level;
}

constexpr int32_t EMULATED_AMX = 5;  // tiles in C++, for tests on machines without them
int32_t set_level = -1;

struct Path {
    Prepare *prepare_rounded, *prepare_dense;
    Multiply *multiply_rounded, *multiply_dense;
};

constexpr Path PATHS[] = {
    // by level
    {prepare_rounded, prepare_dense, multiply_rounded, multiply_dense},
#if defined(__x86_64__)
    {prepare_rounded_avx2, prepare_dense, multiply_rounded_avx2, multiply_dense_avx2},
    {prepare_rounded_vnni, prepare_dense, multiply_rounded_vnni, multiply_dense_avx2},
    {prepare_rounded_vnni, prepare_dense_bf16, multiply_rounded_vnni, multiply_dense_bf16},
    {prepare_rounded_vnni, prepare_dense_bf16, multiply_rounded_vnni, multiply_dense_amx},
    {prepare_rounded_vnni, prepare_dense_bf16, multiply_rounded_vnni, multiply_dense_emulated_amx},
#endif
};

// Rows from which on activations are kept in bfloat16 instead of rounded: tiles are quicker than any bytes, pairs than two terms.
int32_t dense_rows(int32_t level, Rounding rounding) {
    if (level >= AMX) return AMX_ROWS;
    return level == AVX512 && rounding == TWO_TERMS ? BF16_ROWS : INT32_MAX;
}

int32_t terms_of(int32_t level, Rounding rounding, int32_t m) {
    if (rounding == NOT_ROUNDED || m >= dense_rows(level, rounding)) return 0;
    if (rounding == OUTLIERS) return level >= VNNI && m > 1 ? 1 : 2;
    return rounding == ONE_TERM && level >= AVX2 ? 1 : 2;  // the portable path has two only
}

// ---- inputs

struct Sizes {
    int64_t q, scale, dense;  // bytes
    explicit Sizes(int64_t m, int64_t k)
        : q(rounded_up(m * 2 * rounded_up(k, BLOCK_K), 64)),
          scale(rounded_up(m * (rounded_up(k, BLOCK_K) / BLOCK_K) * 4, 64)),
          dense(rounded_up(m, 16) * rounded_up(k, BLOCK_K) * 4) {}
};

// ---- packing

// Where block and head of `column` are.
struct Place {
    int64_t group, head, block;  // head, block: bytes from the panel's begin
    Place(const Matrix& matrix, int64_t column) {
        group = matrix.group == 0 ? 0 : column / matrix.group;
        head = matrix.group == 0 ? 0 : group * group_bytes(matrix);
        const int64_t in_group = column - group * matrix.group;
        block = head + (matrix.group == 0 ? 0 : HEAD_BYTES) + in_group / BLOCK_K * block_bytes(matrix.kind);
    }
};

uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

// 32 columns of one output, as they come, into its lane of a block.
void pack_lane(int32_t kind, const uint8_t* columns, uint8_t* lane) {
    for (int64_t j = 0; j < block_bytes(kind) / (4 * TILE_N); j++) {
        uint32_t word = word_at(columns + 4 * j);
        if (kind == INT8) word ^= 0x80808080;  // + INT8_ZERO
        if (kind == INT4) word = word_at(columns + 8 * j) | word_at(columns + 8 * j + 4) << 4;
        memcpy(lane + 4 * TILE_N * j, &word, 4);
    }
}

// Rows [panel * 16, ...) of weight [n, k], bytes or bfloat16; outputs and columns that are not there get zeros.
void pack_columns(const Matrix& matrix, uint8_t* panel_data, int64_t panel, const uint8_t* weight) {
    const int64_t width = matrix.kind == BF16 ? 2 : 1;
    for (int64_t lane = 0; lane < TILE_N; lane++) {
        const uint8_t* row = weight + (panel * TILE_N + lane) * matrix.k * width;
        for (int64_t column = 0; column < matrix.k; column += BLOCK_K) {
            uint8_t columns[2 * BLOCK_K] = {};
            if (lane < lanes_of(matrix, panel)) memcpy(columns, row + column * width, smaller(BLOCK_K, matrix.k - column) * width);
            pack_lane(matrix.kind, columns, panel_data + Place(matrix, column).block + 4 * lane);
        }
    }
}

// scale: [n, groups], float32 for INT8, float16 for INT4, which also has `offset` like it.
void pack_heads(const Matrix& matrix, uint8_t* panel_data, int64_t panel, const uint8_t* scale, const uint8_t* offset) {
    const int64_t groups = num_groups(matrix), width = matrix.kind == INT8 ? 4 : 2;
    for (int64_t group = 0; group < groups; group++) {
        uint8_t* head = panel_data + group * group_bytes(matrix);
        memset(head, 0, HEAD_BYTES);
        for (int64_t lane = 0; lane < lanes_of(matrix, panel); lane++) {
            const int64_t place = ((panel * TILE_N + lane) * groups + group) * width;
            memcpy(head + width * lane, scale + place, width);
            if (matrix.kind == INT4) memcpy(head + width * (TILE_N + lane), offset + place, width);
        }
    }
}

// ---- the portable path

// Steps of one row, and what they are.
struct Steps {
    float step, inverse;
    bool is_zero;  // or nothing that can be rounded
};

Steps find_steps(const float* x, int64_t count) {
    int32_t largest = 0;  // as bits: NaN is above all numbers
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFF);
        largest = bits > largest ? bits : largest;
    }
    if (largest >= NOT_FINITE) return {__builtin_nanf(""), 0.0f, true};
    const float most = from_bits(static_cast<uint32_t>(largest));
    return {most / MOST_STEPS, MOST_STEPS / most, largest < LEAST_ROUNDED};
}

}  // namespace

void prepare_rounded(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    for (int64_t row = row_begin; row < row_end; row++) {
        const float* from = x + row * stride;
        int8_t* q = inputs.q + 2 * row * inputs.k_padded;
        memset(q + inputs.k / 4 * 8, 0, 2 * inputs.k_padded - inputs.k / 4 * 8);
        const Steps found = find_steps(from, inputs.k);
        inputs.step[row] = found.step;
        for (int64_t group = 0; group < inputs.num_groups; group++) {
            const int64_t begin = group * inputs.group, end = smaller(inputs.k, begin + inputs.group);
            int32_t sum = 0;
            for (int64_t i = begin; i < end; i++) {
                const int32_t steps = found.is_zero ? 0 : static_cast<int32_t>(__builtin_rintf(from[i] * found.inverse));
                const int32_t high = (steps + LOW_STEPS / 2) >> LOW_BITS;
                q[i / 4 * 8 + i % 4] = static_cast<int8_t>(high);
                q[i / 4 * 8 + i % 4 + 4] = static_cast<int8_t>(steps - high * LOW_STEPS);
                sum += steps;
            }
            inputs.sum[row * inputs.num_groups + group] = static_cast<float>(sum);
        }
    }
}

void prepare_dense(const Inputs& inputs, const float* x, int64_t stride, int32_t row_begin, int32_t row_end) {
    for (int64_t row = row_begin; row < row_end; row++) {
        float* to = static_cast<float*>(inputs.dense) + row * inputs.k_padded;
        memcpy(to, x + row * stride, sizeof(float) * inputs.k);
        memset(to + inputs.k, 0, sizeof(float) * (inputs.k_padded - inputs.k));
    }
}

namespace {

int32_t steps_of(const int8_t* q, int64_t column) { return q[column / 4 * 8 + column % 4] * LOW_STEPS + q[column / 4 * 8 + column % 4 + 4]; }

}  // namespace

void multiply_rounded(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        for (int64_t row = 0; row < inputs.m; row++) {
            float sums[TILE_N] = {};
            const uint8_t* block = panel_of(matrix, panel);
            const int8_t* q = inputs.q + 2 * row * inputs.k_padded;
            for (int64_t group = 0; group < inputs.num_groups; group++) {
                Head head;
                read_head(matrix, block, head);
                block += HEAD_BYTES;
                int64_t dot[TILE_N] = {};
                for (int64_t left = num_blocks(matrix, group); left > 0; left--, block += block_bytes(matrix.kind), q += 2 * BLOCK_K)
                    for (int lane = 0; lane < TILE_N; lane++)
                        for (int column = 0; column < BLOCK_K; column++) dot[lane] += stored_q(matrix.kind, block, lane, column) * steps_of(q, column);
                const float sum = inputs.sum[row * inputs.num_groups + group];
                for (int lane = 0; lane < TILE_N; lane++) sums[lane] += static_cast<float>(dot[lane]) * head.scale[lane] + sum * head.offset[lane];
            }
            for (int lane = 0; lane < TILE_N; lane++) sums[lane] *= inputs.step[row];
            memcpy(out + row * out_stride + panel * TILE_N, sums, sizeof(float) * lanes_of(matrix, panel));
        }
    }
}

namespace {

// Columns [begin, begin + CHUNK_K) of a panel, as float32 [column][16].
void dequantize(const Matrix& matrix, int64_t panel, int64_t begin, int64_t end, float* to) {
    const uint8_t* data = panel_of(matrix, panel);
    Head head;
    int64_t known = -1;
    for (int64_t column = begin; column < end; column++, to += TILE_N) {
        const Place place(matrix, column);
        const uint8_t* block = data + place.block;
        if (matrix.kind == BF16) {
            for (int lane = 0; lane < TILE_N; lane++) {
                uint16_t value;
                memcpy(&value, block + ((column % BLOCK_K / 2 * TILE_N + lane) * 2 + column % 2) * 2, 2);
                to[lane] = from_bf16(value);
            }
            continue;
        }
        if (known != place.group) read_head(matrix, data + place.head, head);
        known = place.group;
        for (int lane = 0; lane < TILE_N; lane++)
            to[lane] = static_cast<float>(stored_q(matrix.kind, block, lane, column % BLOCK_K)) * head.scale[lane] + head.offset[lane];
    }
}

}  // namespace

void multiply_dense(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = 256;
    alignas(64) float weights[COLUMNS * TILE_N];
    for (int64_t panel = begin; panel < end; panel++) {
        for (int64_t start = 0; start < inputs.k; start += COLUMNS) {
            const int64_t stop = smaller(inputs.k, start + COLUMNS);
            dequantize(matrix, panel, start, stop, weights);
            for (int64_t row = 0; row < inputs.m; row++) {
                const float* x = static_cast<const float*>(inputs.dense) + row * inputs.k_padded;
                float* to = out + row * out_stride + panel * TILE_N;
                const int64_t bytes = sizeof(float) * lanes_of(matrix, panel);
                float sums[TILE_N] = {};
                if (start > 0) memcpy(sums, to, bytes);
                for (int64_t column = start; column < stop; column++)
                    for (int lane = 0; lane < TILE_N; lane++) sums[lane] += x[column] * weights[(column - start) * TILE_N + lane];
                memcpy(to, sums, bytes);
            }
        }
    }
}

int32_t level() {
    const int32_t set = __atomic_load_n(&set_level, __ATOMIC_RELAXED);
    return set < 0 ? best_level() : set;
}

int64_t inputs_bytes(int32_t m, int32_t k) {
    const Sizes sizes(m, k);
    return sizes.q + 2 * sizes.scale + sizes.dense;
}

void prepare(Inputs& inputs, void* scratch, const float* x, int64_t stride, int32_t m, const Matrix& matrix, int32_t row_begin, int32_t row_end,
             Rounding rounding) {
    const int32_t k = matrix.k, group = matrix.group;
    const Sizes sizes(m, k);
    uint8_t* base = static_cast<uint8_t*>(scratch);
    inputs.m = m, inputs.k = k, inputs.group = group, inputs.level = level();
    inputs.k_padded = static_cast<int32_t>(rounded_up(k, BLOCK_K));
    inputs.num_groups = group == 0 ? 0 : (k + group - 1) / group;
    inputs.terms = group == 0 ? 0 : terms_of(inputs.level, rounding, m);
    inputs.q = reinterpret_cast<int8_t*>(base);
    inputs.step = reinterpret_cast<float*>(base + sizes.q);
    inputs.sum = reinterpret_cast<float*>(base + sizes.q + sizes.scale);
    inputs.dense = base + sizes.q + 2 * sizes.scale;
    inputs.kind = matrix.kind;
    static_assert(OUTLIER_FIELDS <= BLOCK_K, "outliers fit where rows would be dense");
    inputs.has_outliers = rounding == OUTLIERS && inputs.terms > 0 && inputs.level >= VNNI;
    inputs.outliers = static_cast<int32_t*>(inputs.dense);
    const Path& path = PATHS[inputs.level];
    (inputs.terms > 0 ? path.prepare_rounded : path.prepare_dense)(inputs, x, stride, row_begin, row_end);
}

int64_t num_asking(const Inputs& inputs) {
    if (inputs.terms == 0 || inputs.level < AVX2) return 0;
    const int64_t last = last_tile(inputs), rest = inputs.m - last;
    return last / TILE_M + (inputs.terms == 1 && !inputs.has_outliers ? rest > 0 : rest > FEW_ROWS);
}

void multiply(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int32_t n_begin, int32_t n_end) {
    const Path& path = PATHS[inputs.level];
    (inputs.terms > 0 ? path.multiply_rounded : path.multiply_dense)(matrix, inputs, out - n_begin, out_stride, n_begin / TILE_N, (n_end + TILE_N - 1) / TILE_N);
}

void read_row(const Matrix& matrix, int32_t row, float* out) {
    const uint8_t* block = panel_of(matrix, row / TILE_N);
    const int64_t lane = row % TILE_N;
    for (int64_t begin = 0; begin < matrix.k; begin += matrix.group == 0 ? matrix.k : matrix.group) {
        float scale = 1.0f, offset = 0.0f;
        if (matrix.kind != BF16) {
            Head head;
            read_head(matrix, block, head);
            scale = head.scale[lane], offset = head.offset[lane];
            block += HEAD_BYTES;
        }
        const int64_t end = matrix.group == 0 ? matrix.k : smaller(matrix.k, begin + matrix.group);
        for (int64_t start = begin; start < end; start += BLOCK_K, block += block_bytes(matrix.kind)) {
            const int64_t count = smaller(BLOCK_K, end - start);
            for (int64_t i = 0; i < count; i++) {
                if (matrix.kind == BF16) {
                    uint16_t value;
                    memcpy(&value, block + ((i / 2 * TILE_N + lane) * 2 + i % 2) * 2, 2);
                    out[start + i] = from_bf16(value);
                } else {
                    out[start + i] = static_cast<float>(stored_q(matrix.kind, block, lane, i)) * scale + offset;
                }
            }
        }
    }
}

// A product that a team shares.
struct Product {
    const Matrix* matrix;
    const float* x;
    int64_t stride;
    int32_t m;
    float* out;
    Rounding rounding;
    void* scratch;
    int threads;
    Inputs inputs;
    Phase preparing, multiplying;
};

constexpr int32_t PIECE_ROWS = 2 * TILE_M, PIECE_N = 4 * TILE_N;
constexpr double ONE_THREAD_WORK = 2e6;  // multiply-adds below which waking a helper costs more than it saves

static void take_part(void* context, int) {
    Product& product = *static_cast<Product*>(context);
    const Matrix& matrix = *product.matrix;
    share(product.preparing, (product.m + PIECE_ROWS - 1) / PIECE_ROWS, [&](int64_t piece) {
        const int32_t begin = static_cast<int32_t>(piece) * PIECE_ROWS, end = static_cast<int32_t>(smaller(product.m, begin + PIECE_ROWS));
        Inputs inputs;
        prepare(inputs, product.scratch, product.x, product.stride, product.m, matrix, begin, end, product.rounding);
    });
    const int64_t pieces = (matrix.n + PIECE_N - 1) / PIECE_N;
    share(product.multiplying, pieces, [&](int64_t i) {
        const int32_t begin = static_cast<int32_t>(piece_of(i, pieces, product.threads)) * PIECE_N, end = static_cast<int32_t>(smaller(matrix.n, begin + PIECE_N));
        multiply(matrix, product.inputs, product.out + begin, matrix.n, begin, end);
    });
}

}  // namespace penstock

extern "C" {

using penstock::Matrix;

int32_t penstock_level() { return penstock::level(); }

// Sets the level, -1 the best one; EMULATED_AMX is for tests. Returns 1, or 0 and changes nothing if this CPU does not have it.
int32_t penstock_set_level(int32_t wanted) {
    const int32_t best = penstock::best_level();
    if (wanted > best && (wanted != penstock::EMULATED_AMX || best < penstock::AVX512)) return 0;
    __atomic_store_n(&penstock::set_level, wanted, __ATOMIC_RELAXED);
    return 1;
}

// Bytes of a matrix's data; its `data` and `unit` are not read.
int64_t penstock_matrix_bytes(const Matrix* matrix) { return penstock::num_panels(*matrix) * penstock::panel_bytes(*matrix); }

// weight: INT4 and INT8: q [n, k]; BF16: [n, k]. scale, offset: [n, groups], float16 for INT4, for INT8 float32 and none. data: as `matrix` will hold.
void penstock_pack(const Matrix* matrix, void* data, const void* weight, const void* scale, const void* offset) {
    for (int64_t panel = 0; panel < penstock::num_panels(*matrix); panel++) {
        uint8_t* panel_data = static_cast<uint8_t*>(data) + panel * penstock::panel_bytes(*matrix);
        penstock::pack_heads(*matrix, panel_data, panel, static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(offset));
        penstock::pack_columns(*matrix, panel_data, panel, static_cast<const uint8_t*>(weight));
    }
}

// Rows of a matrix, dequantized, to out[num_rows, k].
void penstock_read_rows(const Matrix* matrix, const int64_t* rows, int64_t num_rows, float* out) {
    for (int64_t i = 0; i < num_rows; i++) penstock::read_row(*matrix, static_cast<int32_t>(rows[i]), out + i * matrix->k);
}

// x [m, k], out [m, n]: float32, `stride` floats from row to row of x. Returns 0, or 1 without memory.
int32_t penstock_multiply(const Matrix* matrix, const float* x, int64_t stride, int32_t m, float* out, int32_t rounding, int32_t threads) {
    penstock::Product product = {};
    product.matrix = matrix, product.x = x, product.stride = stride, product.m = m, product.out = out, product.rounding = static_cast<penstock::Rounding>(rounding);
    product.scratch = aligned_alloc(64, penstock::rounded_up(penstock::inputs_bytes(m, matrix->k) + 64, 64));
    if (product.scratch == nullptr) return 1;
    penstock::prepare(product.inputs, product.scratch, x, stride, m, *matrix, 0, 0, product.rounding);
    const double work = static_cast<double>(m) * matrix->n * matrix->k;
    product.threads = work < penstock::ONE_THREAD_WORK || threads < 1 ? 1 : threads;
    penstock::run_team(product.threads, penstock::take_part, &product);
    free(product.scratch);
    return 0;
}
}
