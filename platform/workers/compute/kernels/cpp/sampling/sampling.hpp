// The choice of tokens from rows of logits, and log probabilities: what workers/compute/choice.py, truncation.py and noise.py define, bit for bit.
//
// Invariant: a row's result depends on that row alone, and is the same at every level: sums are of integers, and of everything rounded each operation is
// an IEEE one, in the order that those modules give. So these files are compiled without fused multiply-adds (build.py).

#pragma once

#include "sampling/choice_row.hpp"

namespace penstock {

namespace portable {
ChooseRow choose_row;
TakePart take_part;
}
#if defined(__x86_64__)
namespace avx2 {
ChooseRow choose_row;
TakePart take_part;
}
namespace avx512 {
ChooseRow choose_row;
TakePart take_part;
}
#endif

// Elements of a row that are looked at together; rows in scratch are padded to a multiple of it.
constexpr int64_t BLOCK = 64;

// A token that may be where a sum reaches its target.
struct Entry {
    uint32_t key;  // grows as the score falls
    uint32_t id;
    int64_t weight;
};

inline int64_t padded_vocab(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK * BLOCK; }

}  // namespace penstock
