// A row of logits and how a token is chosen from it, for other kernels to call the choice: of a whole row, or in parts as a product gives them.

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

int64_t choice_scratch_bytes(int64_t vocab);

// ---- a draw from a row that comes in parts

// Whether a row's token is drawn, and from all of it.
inline bool is_drawn_from_all(const ChoiceRow& row) { return row.temperature > 0 && row.top_k == 0 && row.top_p >= 1 && row.least == -__builtin_inff(); }

// A token that may have the largest score with its noise: which has it can't be told before the largest logit is known, by which scores are rounded.
struct NearBest {
    double sum;    // of score and noise, in units of ln 2, by the logit as it is
    double noise;
    float logit;
    int64_t place;
};

constexpr int64_t MOST_NEAR = 16;  // of 50,000 tokens two are as near once in ten thousand rows, 17 never, unless somebody makes them so

// What one thread has found in its parts.
struct PartDraw {
    uint64_t stream;
    const int64_t* ids;  // as those of ChoiceRow
    float temperature;
    double scale;  // of a logit, to units of ln 2
    double bound;  // of a sum that may be the largest one
    int64_t count;
    NearBest near[MOST_NEAR];
};

inline void begin_draw(PartDraw& draw, const ChoiceRow& row) {
    draw.stream = row.stream, draw.ids = row.ids, draw.temperature = row.temperature;
    draw.scale = 1.4426950408889634 / static_cast<double>(row.temperature), draw.bound = -__DBL_MAX__, draw.count = 0;
}

// Takes logits of the places from `first` on into the draw, in any order of parts.
typedef void TakePart(PartDraw& draw, const float* logits, int64_t size, int64_t first);

// The one of this CPU.
TakePart* part_taker();

// The place that choose_row gives, of draws, of which those from one row are `stride` apart, that have taken in all parts among them. best: the largest logit; a number.
int64_t end_draw(const PartDraw* draws, int64_t count, int64_t stride, float best);

}  // namespace penstock
