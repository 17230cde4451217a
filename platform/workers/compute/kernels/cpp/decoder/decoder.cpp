// A whole step of a decoder of the Llama family in one call: embedding, the layers over a paged KV cache, final norm, output head. Activations are
// float32 between the products. Plain C ABI; the memory to work in is the caller's.

#include "decoder/decoder.hpp"

namespace penstock {
namespace {

void describe_attention(Run& run) {
    const Model& model = *run.model;
    const Step& step = *run.step;
    Attention& job = run.attention;
    job.q_dtype = FLOAT32, job.kv_dtype = static_cast<DType>(run.cache->dtype);
    job.q_stride = num_qkv_heads(model) * model.dim;
    job.query_start = step.query_start, job.context_len = step.context_len, job.block_tables = step.block_tables, job.table_stride = step.table_stride;
    job.num_seqs = step.num_seqs, job.num_heads = model.num_heads, job.num_kv_heads = model.num_kv_heads, job.block_size = run.cache->block_size;
    job.dim = static_cast<int>(model.dim), job.scale = 1.0f / __builtin_sqrtf(static_cast<float>(model.dim));
}

constexpr int64_t SHORT_PROMPT_TOKENS = 128;  // a prompt with fewer, those from the prefix cache counted too

// Whether the step reads two tokens or more of a short prompt to its end, whatever else is in it: the prompt's part in an answer must not depend on other
// requests at the same time. A sequence without a row is a piece of a prompt, as a rule of a long one; one with a row for each of its tokens decodes, with a
// draft. Where only a prompt's last token is left, behind what was cached, nothing tells it from a decoding one.
bool has_short_prompt(const Step& step) {
    int64_t row = 0;
    for (int64_t seq = 0; seq < step.num_seqs; seq++) {
        const int64_t begin = step.query_start[seq], end = step.query_start[seq + 1], first = row;
        while (row < step.num_rows && step.rows[row] < end) row++;
        if (end - begin > 1 && row - first == 1 && step.context_len[seq] < SHORT_PROMPT_TOKENS) return true;
    }
    return false;
}

Run make_run(const Model* model, const Cache* cache, const Step* step, int threads) {
    Run run = {};
    run.model = model, run.cache = cache, run.step = step, run.threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    run.has_short_prompt = has_short_prompt(*step);
    describe_attention(run);
    return run;
}

// A row's token and its largest logit, of what each thread has found.
void end_row(const Run& run, int64_t row) {
    const Step& step = *run.step;
    const int64_t vocab = run.model->vocab;
    Best best = run.workers[0].best[row];
    for (int worker = 1; worker < run.threads; worker++) keep_better(best, run.workers[worker].best[row].score, run.workers[worker].best[row].index);
    step.best[row] = best.index < vocab ? best.index : 0;
    step.best_score[row] = best.score;
    if (!__builtin_isfinite(best.score) || !is_drawn(step, row)) return;
    step.best[row] = is_drawn_at_end(step, row) ? larger(0, step.choices[row].token) : end_draw(run.draws + row, run.threads, step.num_rows, best.score);
}

// A step alone; see penstock_step.
int64_t compute(const Model* model, const Cache* cache, const Step* step, int32_t threads, char* memory, int64_t size) {
    Run run = make_run(model, cache, step, threads);
    const int64_t num_floats = choose_split(run.attention, run.threads), fixed = lay_out(run, nullptr);
    const int64_t needed = fixed + num_floats * static_cast<int64_t>(sizeof(float));
    if (needed > size) return needed;
    lay_out(run, memory);
    group_rows(run);
    run.attention.partials = reinterpret_cast<float*>(memory + fixed);
    plan_attention(run.attention);
    run.run_unit = attention_unit(static_cast<int>(model->dim), static_cast<DType>(cache->dtype));
    memset(static_cast<void*>(run.phases), 0, sizeof(Phase) * static_cast<size_t>(model->num_layers * PHASES_A_LAYER + OTHER_PHASES));
    for (int worker = 0; worker < run.threads; worker++)
        for (int64_t row = 0; row < step->num_rows; row++) {
            run.workers[worker].best[row] = {-__builtin_inff(), model->vocab};
            if (is_drawn_in_parts(*step, row)) begin_draw(run.workers[worker].draws[row], step->choices[row]);
        }
    run_team(run.threads, run_step, &run);
    for (int64_t row = 0; row < step->num_rows; row++) end_row(run, row);
    return 0;
}

// Lays out the step behind one whose rows have given `count` drafts another token. `places`: of Drafts.
Step next_of(const Step& step, const Cache& cache, const Drafts& drafts, int64_t count, int64_t round) {
    const int64_t room = drafts.num_rows;
    int64_t *token_ids = drafts.places, *positions = token_ids + room, *slots = positions + room, *rows = slots + room;
    int32_t *query_start = reinterpret_cast<int32_t*>(rows + room), *context_len = query_start + room + 1;
    for (int64_t row = 0; row < count; row++) {
        const int64_t place = step.context_len[row], block = step.block_tables[row * step.table_stride + place / cache.block_size];
        token_ids[row] = drafts.tokens[row * drafts.most + round - 1];
        positions[row] = place, slots[row] = block * cache.block_size + place % cache.block_size;
        rows[row] = row, query_start[row] = static_cast<int32_t>(row), context_len[row] = static_cast<int32_t>(place + 1);
    }
    query_start[count] = static_cast<int32_t>(count);
    Step next = step;
    next.num_tokens = next.num_seqs = next.num_rows = count;
    next.token_ids = token_ids, next.positions = positions, next.slots = slots, next.rows = rows;
    next.query_start = query_start, next.context_len = context_len;
    next.features = drafts.behind, next.num_parts = 1;
    return next;
}

// The share of one of `n` scores in their softmax at a temperature, of which `scale` is the inverse.
float share_of(float score, const float* scores, int64_t n, float best, float scale) {
    constexpr float LOG2_E = 1.44269504f;
    const float factor = LOG2_E * scale;
    Vec sum = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) sum += exp2_nonpositive((load(scores + i) - splat(best)) * splat(factor));
    float all = total(sum);
    for (; i < n; i++) all += exp2_nonpositive(splat((scores[i] - best) * factor))[0];
    return exp2_nonpositive(splat((score - best) * factor))[0] / all;
}

// The share of a row's token by the head's scores, at the temperature that the target draws at.
float chance_of(const Step& step, const Drafts& drafts, int64_t vocab, int64_t row) {
    const float* scores = step.logits + row * vocab;
    const float scale = is_drawn(step, row) ? 1.0f / (step.choices[row].temperature * drafts.sharpness) : 1.0f;
    return share_of(scores[step.best[row]], scores, vocab, step.best_score[row], scale);
}

// Takes the round's tokens into the drafts. Returns whether any goes on; `count`: how many of the leading ones want another.
bool take_round(const Step& step, Drafts& drafts, int64_t vocab, int64_t round, int64_t& count) {
    bool goes_on = false;
    count = 0;
    for (int64_t row = 0; row < step.num_rows; row++) {
        drafts.tokens[row * drafts.most + round - 1] = drafts.vocabulary[step.best[row]];
        float& chance = drafts.chances[row];
        if (chance >= drafts.go_from) {  // else it is computed beside those that go on
            chance *= chance_of(step, drafts, vocab, row);
            if (drafts.kept[row] == round - 1 && chance > 0 && chance >= drafts.keep_from) drafts.kept[row] = round;
        }
        if (drafts.wanted[row] > round) count++, goes_on |= chance >= drafts.go_from;
    }
    drafts.made = round;
    return goes_on;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// Computes the step: the KV of all tokens goes into the cache, the rows' tokens, their largest logits and, where they are wanted, all to where `step` says. With drafts, which only a draft head makes,
// it goes on from each row, with the likeliest or drawn, for as many tokens as are wanted and have a chance; `drafts->made` says how many came of the longest
// draft: fewer than wanted where none has a chance or a score is NaN. Works in `memory` of `size` bytes, aligned to 64. Returns 0, or the bytes that it needs, if
// those are more: then it is to be called again; or -1, and nothing is computed: a token has no row in the embedding.
int64_t penstock_step(const Model* model, const Cache* cache, const Step* first, Drafts* drafts, int32_t threads, char* memory, int64_t size) {
    for (int64_t token = 0; token < first->num_tokens; token++)
        if (first->token_ids[token] < 0 || first->token_ids[token] >= model->embed->n) return -1;
    Step step = *first;
    if (drafts != nullptr) {
        drafts->made = 0;
        for (int64_t row = 0; row < drafts->num_rows; row++) drafts->chances[row] = 1.0f, drafts->kept[row] = 0;
    }
    for (int64_t round = 1;; round++) {
        if (drafts != nullptr && drafts->choices != nullptr) step.choices = drafts->choices + (round - 1) * drafts->num_rows;
        const int64_t needed = compute(model, cache, &step, threads, memory, size);
        if (needed != 0 || drafts == nullptr) return needed;
        for (int64_t row = 0; row < step.num_rows; row++)
            if (step.best_score[row] != step.best_score[row]) return 0;
        int64_t count;
        if (!take_round(step, *drafts, model->vocab, round, count)) return 0;
        memcpy(drafts->behind, step.states, sizeof(float) * static_cast<size_t>(count * model->hidden));
        step = next_of(step, *cache, *drafts, count, round);
    }
}
}
