// Products of bytes by AVX-512 VNNI, whose unsigned side are the weights as they are stored.
//
// A panel meets a tile of rows at once: a vector of weights is unpacked and multiplied by as many broadcast activations; where these have high and low
// bytes, once for each, but for a single row. Where a block has outliers the vector with their weights is read again, at a place that each row has of its
// own; a single row has high bytes of all columns instead, which takes no longer than its weights' way from memory. Every row has its own sums, whole
// numbers, the same however many rows go with it. What is read of rows that go side by side lies side by side, so that one pointer is enough for all: with a
// pointer to each row there are not registers enough; a group took a third longer, seen once.

#include "linear/linear_avx512.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

constexpr int MOST_SPLIT_ROWS = 4;  // whose sums have two chains each: with fewer chains under way each would wait for itself
static_assert(TILE_M == 8 && WIDEST_TILE == 11, "with_tile and the preparation of rows count on it");

PENSTOCK_INLINE __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
PENSTOCK_INLINE __m512i high_nibbles(__m512i x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
PENSTOCK_INLINE __m512i four(const int8_t* q) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }

// Four columns of R rows, of one term.
template <int R>
PENSTOCK_INLINE void add_products(__m512i weights, const int8_t* q, __m512i (&sums)[R]) {
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) sums[r] = _mm512_dpbusd_epi32(sums[r], weights, four(q + 4 * r));
}

// A block of 32 columns, high or low bytes where there are two terms, in two chains of sums that belong together.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_INLINE void add_block_split(const uint8_t* block, const int8_t* q, __m512i (&sums)[R], __m512i (&others)[R]) {
#pragma GCC unroll 8
    for (int j = 0; j < (KIND == INT4 ? 4 : 8); j++) {
        const __m512i weights = _mm512_load_si512(block + 64 * j);
        if (KIND == INT4) {
            add_products<R>(low_nibbles(weights), q + TERMS * R * 8 * j, sums);
            add_products<R>(high_nibbles(weights), q + TERMS * R * (8 * j + 4), others);
        } else if (j % 2 == 0) {
            add_products<R>(weights, q + TERMS * R * 4 * j, sums);
        } else {
            add_products<R>(weights, q + TERMS * R * 4 * j, others);
        }
    }
}

// The same, in one chain.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_INLINE void add_block(const uint8_t* block, const int8_t* q, __m512i (&sums)[R]) {
    add_block_split<KIND, TERMS, R>(block, q, sums, sums);
}

// For what follows of the matrix, and for what else is wanted soon.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_INLINE void ask_ahead(const uint8_t* data, const Inputs& inputs) {
    const bool is_read_once = inputs.m <= (TERMS == 1 ? WIDEST_TILE : TILE_M) && !inputs.is_reused;
    for (int64_t line = 0; line < block_bytes(KIND); line += LINE) fetch(data + AHEAD + line, is_read_once);
    if (ASKS<TERMS, R>) ask_for(inputs.ahead);
}

// The high or the low bytes of `blocks` blocks, added to dot.
template <int32_t KIND, int R>
PENSTOCK_INLINE void add_one_of_two_terms(const uint8_t* data, int64_t blocks, const int8_t* q, const Inputs& inputs, bool is_first, __m512i (&dot)[R]) {
    __m512i others[R];
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) others[r] = _mm512_setzero_si512();
    for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += 2 * R * BLOCK_K) {
        if (is_first) ask_ahead<KIND, 2, R>(data, inputs);
        if (R <= MOST_SPLIT_ROWS)
            add_block_split<KIND, 2, R>(data, q, dot, others);
        else
            add_block<KIND, 2, R>(data, q, dot);
    }
    if (R > MOST_SPLIT_ROWS) return;
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) dot[r] = _mm512_add_epi32(dot[r], others[r]);
}

// The products of `blocks` blocks, no more than MOST_BLOCKS, in steps. One row takes high and low bytes side by side, so that there are two chains of sums;
// several, one after the other: on a Zen 4 a step of two or three rows takes 4 % less than with both side by side.
template <int32_t KIND, int R>
PENSTOCK_INLINE void multiply_two_terms(const uint8_t* data, int64_t blocks, const int8_t* q, const Inputs& inputs, __m512i (&dot)[R]) {
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) dot[r] = _mm512_setzero_si512();
    if (R == 1) {
        __m512i low[R] = {_mm512_setzero_si512()};
        for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += 2 * R * BLOCK_K) {
            ask_ahead<KIND, 2, R>(data, inputs);
            add_block<KIND, 2, R>(data, q, dot);
            add_block<KIND, 2, R>(data, q + 4 * R, low);
        }
        dot[0] = _mm512_add_epi32(_mm512_slli_epi32(dot[0], LOW_BITS), low[0]);
        return;
    }
    add_one_of_two_terms<KIND, R>(data, blocks, q, inputs, true, dot);
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) dot[r] = _mm512_slli_epi32(dot[r], LOW_BITS);
    add_one_of_two_terms<KIND, R>(data, blocks, q + 4 * R, inputs, false, dot);
}

// The same, in one term.
template <int32_t KIND, int R>
PENSTOCK_INLINE void multiply_one_term(const uint8_t* data, int64_t blocks, const int8_t* q, const Inputs& inputs, __m512i (&dot)[R]) {
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) dot[r] = _mm512_setzero_si512();
    for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += R * BLOCK_K) {
        ask_ahead<KIND, 1, R>(data, inputs);
        add_block<KIND, 1, R>(data, q, dot);
    }
}

// The same, with outliers, which come last: their line may not have arrived when the block's first one has. Two rows have two chains of sums each.
template <int32_t KIND, int R>
PENSTOCK_INLINE void multiply_with_outliers(const uint8_t* data, int64_t blocks, const int8_t* q, const int32_t* outliers, const Inputs& inputs,
                                            __m512i (&dot)[R]) {
    constexpr int64_t PLACES = outlier_places(R);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r] = _mm512_setzero_si512();
    for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += R * BLOCK_K, outliers += OUTLIER_FIELDS * PLACES) {
        ask_ahead<KIND, 2, R>(data, inputs);  // as with two terms
        __m512i others[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) others[r] = _mm512_setzero_si512();
        if (R <= 2)
            add_block_split<KIND, 1, R>(data, q, dot, others);
        else
            add_block<KIND, 1, R>(data, q, dot);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            __m512i weights = _mm512_load_si512(data + outliers[PLACE * PLACES + r]);
            if (KIND == INT4) weights = _mm512_and_si512(weights, _mm512_set1_epi32(outliers[MASK * PLACES + r]));
            const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, _mm512_set1_epi32(outliers[HIGH * PLACES + r]));
            const __m512i shift = KIND == INT4 ? _mm512_set1_epi32(outliers[SHIFT * PLACES + r]) : _mm512_set1_epi32(LOW_BITS);
            const __m512i steps = _mm512_sllv_epi32(sums, shift);
            dot[r] = _mm512_add_epi32(dot[r], R <= 2 ? _mm512_add_epi32(others[r], steps) : steps);
        }
    }
}

// R rows from `row` on with one panel.
template <int32_t KIND, int TERMS, bool HAS_OUTLIERS, int R>
PENSTOCK_AVX512 __attribute__((noinline)) void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int64_t row, float* out,
                                                             int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int64_t groups = inputs.num_groups;
    const int8_t* q = inputs.q + TERMS * row * inputs.k_padded;
    constexpr bool IS_BY_GROUP = TERMS == 1 || HAS_OUTLIERS;
    const float *step = inputs.step + row * (IS_BY_GROUP ? groups : 1), *sum = inputs.sum + row * groups;
    const int32_t* outliers = inputs.outliers + row * (inputs.k_padded / BLOCK_K) * OUTLIER_FIELDS;
    __m512 total[R];
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, sum += R) {
        const Scales head = load_head<KIND>(matrix, data);
        data += HEAD_BYTES;
        for (int64_t left = num_blocks(matrix, group); left > 0;) {
            const int64_t blocks = smaller(left, MOST_BLOCKS);
            __m512i dot[R];
            if (HAS_OUTLIERS && TERMS == 1)
                multiply_with_outliers<KIND, R>(data, blocks, q, outliers, inputs, dot), outliers += blocks * OUTLIER_FIELDS * outlier_places(R);
            else if (TERMS == 1)
                multiply_one_term<KIND, R>(data, blocks, q, inputs, dot);
            else
                multiply_two_terms<KIND, R>(data, blocks, q, inputs, dot);
            left -= blocks, data += blocks * block_bytes(KIND), q += blocks * TERMS * R * BLOCK_K;
            __asm__("" : "+r"(step));  // steps of groups are read here, not kept in registers while the sums need those
#pragma GCC unroll 11
            for (int r = 0; r < R; r++) {
                const __m512 sums = _mm512_cvtepi32_ps(dot[r]);
                total[r] = _mm512_fmadd_ps(IS_BY_GROUP ? _mm512_mul_ps(sums, _mm512_set1_ps(step[r])) : sums, head.scale, total[r]);
            }
        }
        if (IS_BY_GROUP) step += R;
#pragma GCC unroll 11
        for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum[r]), head.offset, total[r]);
    }
    const __mmask16 mask = mask_of(lanes_of(matrix, panel));
#pragma GCC unroll 11
    for (int r = 0; r < R; r++) {
        const __m512 unit = _mm512_set1_ps(IS_BY_GROUP ? matrix.unit : matrix.unit * step[r]);
        _mm512_mask_storeu_ps(out + (row + r) * out_stride + panel * TILE_N, mask, _mm512_mul_ps(total[r], unit));
    }
}

template <int32_t KIND, int TERMS>
void multiply_all_rows(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    const int64_t last = last_tile(inputs);
    for (int64_t panel = begin; panel < end; panel++) {
        for (int64_t row = 0; row < last; row += TILE_M) multiply_rows<KIND, TERMS, false, TILE_M>(matrix, inputs, panel, row, out, out_stride);
        with_tile(inputs.m - last, [&](auto rows) {
            if constexpr (TERMS == 1 || rows <= TILE_M) multiply_rows<KIND, TERMS, false, rows>(matrix, inputs, panel, last, out, out_stride);
        });
    }
}

// With outliers; a row by itself has two terms.
template <int32_t KIND>
void multiply_all_with_outliers(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    const int64_t last = last_tile(inputs);
    for (int64_t panel = begin; panel < end; panel++) {
        if (inputs.m == 1) {
            multiply_rows<KIND, 2, true, 1>(matrix, inputs, panel, 0, out, out_stride);
            continue;
        }
        for (int64_t row = 0; row < last; row += TILE_M) multiply_rows<KIND, 1, true, TILE_M>(matrix, inputs, panel, row, out, out_stride);
        with_tile(inputs.m - last, [&](auto rows) {
            if constexpr (rows <= TILE_M) multiply_rows<KIND, 1, true, rows>(matrix, inputs, panel, last, out, out_stride);
        });
    }
}

template <int TERMS>
Multiply* multiply_of(int32_t kind) {
    return kind == INT4 ? multiply_all_rows<INT4, TERMS> : multiply_all_rows<INT8, TERMS>;
}

}  // namespace

void multiply_rounded_vnni(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    if (inputs.has_outliers)
        (matrix.kind == INT4 ? multiply_all_with_outliers<INT4> : multiply_all_with_outliers<INT8>)(matrix, inputs, out, out_stride, begin, end);
    else
        (inputs.terms == 1 ? multiply_of<1>(matrix.kind) : multiply_of<2>(matrix.kind))(matrix, inputs, out, out_stride, begin, end);
}

}  // namespace penstock
#endif
