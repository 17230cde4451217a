// A decoder's step: its parameters as Python lays them out, and what its threads share while they compute it.

#pragma once

#include "attention/attention.hpp"
#include "decoder/elementwise.hpp"
#include "decoder/low_rank.hpp"
#include "linear/linear.hpp"
#include "base/team.hpp"
#include "sampling/choice_row.hpp"

namespace penstock {

constexpr int64_t OWN_ROWS = 12;  // up to so many tokens are prepared by each thread for itself
constexpr int64_t WIDEST = 16;   // panels of a product to a piece, at most; of a product with more than WIDE_ROWS tokens a quarter of it
constexpr int64_t WIDE_ROWS = 16;
constexpr int64_t PHASES_A_LAYER = 15, OTHER_PHASES = 9;  // at most

// Parameters as Python lays them out (kernels/decoder.py). Vectors are float32, null where the model has none.

struct Layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const Matrix *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
};

// What activations of quantized matrices become; which of the two and bfloat16 a product then takes, see linear.hpp. MIXED: one term, with outliers for few rows
// and where an answer's first token hangs on every one of few tokens, which is in steps with short prompts (two tokens of one or more).
enum Activations : int32_t { MIXED = 0, NEVER_ROUNDED = 1, ALWAYS_ONE_TERM = 2, ALWAYS_TWO_TERMS = 3 };

struct Model {
    int64_t num_layers, hidden, inner, num_heads, num_kv_heads, dim, vocab;
    const Layer* layers;
    const Matrix *embed, *head;
    const float* norm;
    const float *cos, *sin;  // [position, dim]
    float eps;
    int32_t activations;
    const Matrix *first, *chained;  // of a draft head, else null: [hidden, (1 + parts) * hidden], of the target's features and of its own output
};

struct Cache {
    const Store* stores;  // keys and values of each layer
    int64_t block_size;
    int32_t dtype;
};

struct Step {
    int64_t num_tokens, num_seqs, num_rows;
    const int64_t *token_ids, *positions, *slots;  // [num_tokens]
    const int32_t *query_start, *context_len, *block_tables;
    int64_t table_stride;
    const int64_t* rows;  // [num_rows] tokens whose logits are wanted, in order
    float* logits;        // [rows that have places, vocab], or null
    const int64_t* places;  // [num_rows] where in `logits` each goes, negative: nowhere; null: all, in order
    // [num_rows] how each row's token is drawn, its logits apart, which have a place if it is not drawn from all; null, or a temperature of 0: the largest
    ChoiceRow* choices;
    int64_t* best;        // [num_rows]: the token: drawn, or where the largest logit stands first
    float* best_score;    // [num_rows]: the largest logit; NaN if any of the row's is
    // Of a drafter and for one, each null where it is not wanted:
    const float* features;  // [num_tokens, num_parts, hidden]: a draft head's input besides the tokens; one part: its own output
    int64_t num_parts;
    const int32_t* taps;  // [num_taps] numbers of layers below the last, ascending, and behind each the residual stream goes
    int64_t num_taps;
    float* tapped;        // to [num_tokens, num_taps, hidden]
    float* states;        // [num_rows, hidden]: the rows' residual stream behind the last layer
    int64_t num_adapters;
    const LowRank* const* adapters;  // of each: [num_layers, MATRICES]
    const int32_t* adapter_of;       // [num_tokens]: its place in `adapters`, negative: none
    int64_t widest_rank;             // the largest of any LowRank
};

// What a draft head proposes behind the rows of a step, one for each sequence, those of the longest drafts first.
struct Drafts {
    const int64_t* vocabulary;  // [model.vocab] ids of the target
    const int64_t* wanted;      // [num_rows] tokens, 1 or more, falling
    int64_t* tokens;            // to [num_rows, most]
    int64_t most;
    int64_t num_rows;
    int64_t* places;            // working memory: [5 * num_rows + 1]
    float* behind;              // the same: [num_rows, hidden]
    int64_t made;               // of a draft that goes on, so many
    float keep_from;            // what a draft's tokens, up to one and with it, must have of a chance by the head's own scores, that it is kept
    float go_from;              // and that the draft goes on behind it
    float* chances;             // to [num_rows]: of the tokens so far; working memory
    int64_t* kept;              // to [num_rows]: leading tokens that are kept
    // Where tokens are drawn as the target draws them, else null: how, [most, num_rows], at temperatures that are divided by `sharpness`
    ChoiceRow* choices;
    float sharpness;
};

inline bool is_drawn(const Step& step, int64_t row) { return step.choices != nullptr && step.choices[row].temperature > 0; }
inline bool is_drawn_in_parts(const Step& step, int64_t row) { return is_drawn(step, row) && is_drawn_from_all(step.choices[row]); }
inline bool is_drawn_at_end(const Step& step, int64_t row) { return is_drawn(step, row) && !is_drawn_from_all(step.choices[row]); }
inline bool has_draws_at_end(const Step& step) {
    for (int64_t row = 0; row < step.num_rows; row++)
        if (is_drawn_at_end(step, row)) return true;
    return false;
}

enum AdaptedMatrix : int64_t { QKV = 0, O = 1, GATE_UP = 2, DOWN = 3, MATRICES = 4 };

// ---- one step

struct Worker {
    Inputs inputs;
    char* prepared;   // of OWN_ROWS
    float* rows;      // [OWN_ROWS, hidden]
    float* out;       // of a piece of a product: twice all tokens by a piece's outputs
    char* attention;
    Best* best;       // [num_rows]
    PartDraw* draws;  // [num_rows], its part of those of the run
    char* choosing;   // where rows are drawn at the end: scratch of a choice
    const Phase* shrinking;  // what adapters make of the operand of the product that is shared out, in so many pieces, perhaps not done yet; null: nothing
    int64_t num_shrinks;
    Stretch* stretches;  // of adapters' matrices that are needed soon: [num_adapters * (MOST_PARTS + 1)]
};

// Rows by adapter: those of the i-th are rows[first[i]] to rows[first[i + 1] - 1].
struct Groups {
    int64_t *first, *rows;
};

// Tokens on their way through the layers.
struct Stream {
    float* x;      // [num_tokens, hidden], the residual stream
    float* heads;  // [num_tokens, num_heads, dim], attention's results
    int64_t num_tokens;
    Groups groups;
};

struct Run {
    const Model* model;
    const Step* step;
    const Cache* cache;
    int threads;
    bool has_short_prompt;
    Phase* phases;
    Worker* workers;
    PartDraw* draws;      // [threads, num_rows], where rows have choices
    Attention attention;  // of the first layer; each thread has its own copy
    RunUnit run_unit;
    Stream all;     // of all tokens
    Stream last;    // of the rows, in the last layer
    float* rows;    // [max(num_tokens, num_rows), hidden], in the same memory as all.heads
    float* qkv;     // [num_tokens, heads, dim]
    float* inner;   // [num_tokens, inner], in the same memory as qkv
    char* prepared;
    float* joined;  // [num_tokens, 1 + num_parts, hidden], where a step has features
    float* shrunk;  // [max(num_tokens, num_rows), widest_rank], what adapters make of a product's operand
};

inline int64_t num_qkv_heads(const Model& model) { return model.num_heads + 2 * model.num_kv_heads; }

inline int64_t widest(int64_t num_rows) { return num_rows > WIDE_ROWS ? WIDEST / 4 : WIDEST; }

// Lays everything of `run` out in the caller's memory, from a null base nothing; returns the bytes that it takes.
int64_t lay_out(Run& run, char* memory);

// Finds the rows of each adapter, for whose lists `lay_out` has found memory.
void group_rows(Run& run);

// A thread's part of the step; context: its Run.
void run_step(void* context, int worker);

}  // namespace penstock
