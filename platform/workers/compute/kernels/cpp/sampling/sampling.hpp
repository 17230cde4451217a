// The choice of tokens from rows of logits, and log probabilities: what workers/compute/sampling.py, truncation.py and noise.py define, bit for bit.
//
// Invariant: a row's result depends on that row alone, and is the same at every level: sums are of integers, and of everything rounded each operation is
// an IEEE one, in the order that those modules give. So these files are compiled without fused multiply-adds (build.py).

#pragma once

#include <stdint.h>

namespace penstock {

struct ChoiceRow {
    const float* logits;  // [vocab], after bias, penalties and masks
    const float* raw;     // [vocab], as the model gave them: log probabilities are of these
    int64_t* top_ids;     // [num_top], out: the likeliest tokens by `raw`, best first, of equals the lower id
    uint64_t stream;      // where the noise of the position begins
    double top_p;         // 1 and above: all
    int64_t top_k;        // 0: all
    int64_t num_top;      // likeliest tokens wanted, up to vocab; -1: no log probabilities at all
    float temperature;    // 0: the largest logit, without noise
    float least;          // of the scaled logits, those that min_p leaves
    // out
    int64_t token;   // -1: the scores are not numbers, or leave no token to choose
    int64_t weight;  // sum of the weights of `raw`
    float raw_best;  // the largest of `raw`
};

// Chooses in one row; scratch as `choice_scratch_bytes` says, aligned to 64 bytes, its content of no account.
typedef void ChooseRow(ChoiceRow& row, int64_t vocab, void* scratch);

namespace portable {
ChooseRow choose_row;
}
#if defined(__x86_64__)
namespace avx2 {
ChooseRow choose_row;
}
namespace avx512 {
ChooseRow choose_row;
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
inline int64_t choice_scratch_bytes(int64_t vocab) { return padded_vocab(vocab) * static_cast<int64_t>(sizeof(float) + sizeof(Entry)); }

}  // namespace penstock
