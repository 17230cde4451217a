// The choice of tokens in vectors of AVX2.

#if defined(__x86_64__)
#include "base/numbers.hpp"

#define PENSTOCK_LANES 4
#define PENSTOCK_LEVEL avx2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#include "sampling/sampling_row.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
