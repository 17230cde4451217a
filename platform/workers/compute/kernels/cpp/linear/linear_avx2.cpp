// Products of bytes by AVX2, whose unsigned side are the weights of 4 bits as they are stored, and the magnitudes of those of 8.
//
// As by AVX-512 (linear_vnni.cpp), but half a panel at a time, and products are summed in 16 bits first: with weights of 4 bits those of half a block fit,
// with weights of 8 those of 2 columns.

#include "linear/linear_avx2.hpp"

#if defined(__x86_64__)

namespace penstock {
namespace {

static_assert(TILE_M == 8, "multiply_all_rows and the preparation of rows count on it");
static_assert(15 * 128 * BLOCK_K / 2 <= INT16_MAX, "a lane of 16 bits sums half a block");

constexpr int64_t AHEAD = 4096;  // bytes of a panel that are prefetched before they are needed

PENSTOCK_AVX2_INLINE __m256i four(const int8_t* q) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t __attribute__((may_alias))*>(q)); }

// A sum that the compiler computes here: GCC reorders additions of whole numbers, and then there are not registers enough.
PENSTOCK_AVX2_INLINE __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

// A block of 32 columns with one term of R rows, which counts `factor` times.
template <int TERMS, int R>
PENSTOCK_AVX2_INLINE void add_block_int4(const uint8_t* half_block, const int8_t* q, __m256i factor, __m256i (&dot)[R]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i sums[R];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(half_block + 64 * j));
        const __m256i left = _mm256_and_si256(weights, mask), right = _mm256_and_si256(_mm256_srli_epi16(weights, 4), mask);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i products = _mm256_maddubs_epi16(left, four(q + TERMS * R * 8 * j + 4 * r));
            sums[r] = j == 0 ? products : in_order(_mm256_add_epi16(sums[r], products));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i products = _mm256_maddubs_epi16(right, four(q + TERMS * R * (8 * j + 4) + 4 * r));
            sums[r] = in_order(_mm256_add_epi16(sums[r], products));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(sums[r], factor));
}

// Signed bytes: the weight's sign goes to the activation, so that sums of 2 products fit 16 bits.
template <int TERMS, int R>
PENSTOCK_AVX2_INLINE void add_block_int8(const uint8_t* half_block, const int8_t* q, __m256i factor, __m256i (&dot)[R]) {
    const __m256i zero = _mm256_set1_epi8(static_cast<char>(INT8_ZERO));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i weights = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(half_block + 64 * j)), zero);
        const __m256i size = _mm256_abs_epi8(weights);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(q + TERMS * R * 4 * j + 4 * r), weights));
            dot[r] = in_order(_mm256_add_epi32(dot[r], _mm256_madd_epi16(pairs, factor)));
        }
    }
}

template <int32_t KIND>
PENSTOCK_AVX2_INLINE void ask_ahead(const uint8_t* data) {
    for (int64_t line = 0; line < block_bytes(KIND); line += 64) _mm_prefetch(reinterpret_cast<const char*>(data + AHEAD + line), _MM_HINT_T0);
}

// Adds the products of a block, in steps.
template <int32_t KIND, int TERMS, int R>
PENSTOCK_AVX2_INLINE void add_block(const uint8_t* half_block, const int8_t* q, __m256i (&dot)[R]) {
#pragma GCC unroll 2
    for (int term = 0; term < TERMS; term++) {
        const __m256i factor = _mm256_set1_epi16(term + 1 < TERMS ? LOW_STEPS : 1);
        if (KIND == INT4)
            add_block_int4<TERMS, R>(half_block, q + term * 4 * R, factor, dot);
        else
            add_block_int8<TERMS, R>(half_block, q + term * 4 * R, factor, dot);
    }
}

// R rows from `row` on with half a panel. IS_BLOCK: groups are blocks, and a block's sums are at once a group's.
template <int32_t KIND, int TERMS, int R, bool IS_BLOCK>
PENSTOCK_AVX2 __attribute__((noinline)) void multiply_half(const Matrix& matrix, const Inputs& inputs, int64_t panel, int half, int64_t row, float* out,
                                                           int64_t out_stride) {
    const uint8_t* data = panel_of(matrix, panel);
    const int64_t groups = inputs.num_groups;
    const int8_t* q = inputs.q + TERMS * row * inputs.k_padded;
    const float *step = inputs.step + row * (TERMS == 1 ? groups : 1), *sum = inputs.sum + row * groups;
    __m256 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; group++, step += TERMS == 1 ? R : 0, sum += R) {
        const HalfScales head = load_half_head(matrix, data, half);
        data += HEAD_BYTES;
        for (int64_t left = IS_BLOCK ? 1 : num_blocks(matrix, group); left > 0;) {
            const int64_t blocks = IS_BLOCK ? 1 : smaller(left, MOST_BLOCKS);
            __m256i dot[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) dot[r] = _mm256_setzero_si256();
            for (int64_t block = 0; block < blocks; block++, data += block_bytes(KIND), q += TERMS * R * BLOCK_K) {
                if (half == 0)
                    ask_ahead<KIND>(data);
                else if (ASKS<TERMS, R>)
                    ask_for(inputs.ahead);
                add_block<KIND, TERMS, R>(data + 32 * half, q, dot);
            }
            left -= blocks;
            __asm__("" : "+r"(step));  // steps of one term are read here, not kept in registers while the sums need those
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256 sums = _mm256_cvtepi32_ps(dot[r]);
                total[r] = _mm256_fmadd_ps(TERMS == 1 ? _mm256_mul_ps(sums, _mm256_set1_ps(step[r])) : sums, head.scale, total[r]);
            }
        }
        if (KIND == INT8) continue;  // `add_block_int8` takes q without its zero
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = _mm256_fmadd_ps(_mm256_set1_ps(sum[r]), head.offset, total[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m256 unit = _mm256_set1_ps(TERMS == 1 ? matrix.unit : matrix.unit * step[r]);
        store_half(matrix, panel, half, out + (row + r) * out_stride, _mm256_mul_ps(total[r], unit));
    }
}

template <int32_t KIND, int TERMS, int R>
void multiply_rows(const Matrix& matrix, const Inputs& inputs, int64_t panel, int64_t row, float* out, int64_t out_stride) {
    const auto multiply = matrix.group == BLOCK_K ? multiply_half<KIND, TERMS, R, true> : multiply_half<KIND, TERMS, R, false>;
    for (int half = 0; half < 2; half++) multiply(matrix, inputs, panel, half, row, out, out_stride);
}

template <int32_t KIND, int TERMS>
void multiply_all_rows(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t row = 0;
        for (; row + 8 <= inputs.m; row += 8) multiply_rows<KIND, TERMS, 8>(matrix, inputs, panel, row, out, out_stride);
        with_rest(inputs.m - row, [&](auto rest) { multiply_rows<KIND, TERMS, rest>(matrix, inputs, panel, row, out, out_stride); });
    }
}

template <int TERMS>
Multiply* multiply_of(int32_t kind) {
    return kind == INT4 ? multiply_all_rows<INT4, TERMS> : multiply_all_rows<INT8, TERMS>;
}

}  // namespace

void multiply_rounded_avx2(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end) {
    (inputs.terms == 1 ? multiply_of<1>(matrix.kind) : multiply_of<2>(matrix.kind))(matrix, inputs, out, out_stride, begin, end);
}

}  // namespace penstock
#endif
