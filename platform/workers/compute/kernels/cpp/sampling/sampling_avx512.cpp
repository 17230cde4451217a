// The choice of tokens in vectors of AVX-512.

#if defined(__x86_64__)
#include "base/numbers.hpp"

#define PENSTOCK_LANES 8
#define PENSTOCK_LEVEL avx512

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "sampling/sampling_row.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
