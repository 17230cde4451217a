// A row of logits and how a token is chosen from it, for other kernels to call the choice.

#pragma once

#include <stdint.h>

namespace penstock {

struct ChoiceRow {
    const float* logits;  // [vocab], after bias, penalties and masks
    const float* raw;     // [vocab], as the model gave them: log probabilities are of these
    const int64_t* ids;   // [vocab] ascending: the tokens whose noise the places have, of a row that has some of them; null: a place is a token
    int64_t* top_ids;     // [num_top], out: the likeliest tokens by `raw`, best first, of equals the lower id
    uint64_t stream;      // where the noise of the position begins
    double top_p;         // 1 and above: all
    int64_t top_k;        // 0: all
    int64_t num_top;      // likeliest tokens wanted, up to vocab; -1: no log probabilities at all
    float temperature;    // 0: the largest logit, without noise
    float least;          // of the scaled logits, those that min_p leaves
    // out
    int64_t token;   // its place in the row; -1: the scores are not numbers, or leave no token to choose
    int64_t weight;  // sum of the weights of `raw`
    float raw_best;  // the largest of `raw`
};

// Chooses in one row; scratch as `choice_scratch_bytes` says, aligned to 64 bytes, its content of no account.
typedef void ChooseRow(ChoiceRow& row, int64_t vocab, void* scratch);

// The one of this CPU.
ChooseRow* row_chooser();

}  // namespace penstock
