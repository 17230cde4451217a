// What the paths above AVX-512 share: weights as pairs of bfloat16.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "packed.hpp"

#define PENSTOCK_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")))

namespace penstock {

constexpr int64_t PAIR_BYTES = 64;  // 16 outputs, 2 columns
constexpr int64_t CHUNK_BYTES = CHUNK_K / 2 * PAIR_BYTES;

// Columns [begin, begin + CHUNK_K) of a panel, as far as there are any, [pair][16][2] of bfloat16: in `buffer`, or where they lie.
const uint8_t* pairs_of(const Matrix& matrix, int64_t panel, int64_t begin, uint8_t* buffer);

// The panels' products with rows [row_begin, row_end), of bfloat16.
void multiply_pairs(const Matrix& matrix, const Inputs& inputs, float* out, int64_t out_stride, int64_t begin, int64_t end);

}  // namespace penstock
#endif
