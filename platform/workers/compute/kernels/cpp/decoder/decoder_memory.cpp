// Where a step's intermediate results lie in the caller's memory.

#include "decoder/decoder.hpp"

namespace penstock {
namespace {

// Pieces of one block of memory; from a null base only their size is found.
struct Arena {
    char* base;
    int64_t size = 0;

    template <typename T>
    T* take(int64_t count) {
        char* found = base == nullptr ? nullptr : base + size;
        size += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(found);
    }
};

int64_t piece_floats(const Run& run) {
    const Model& model = *run.model;
    const int64_t tokens = run.step->num_tokens, rows = run.step->num_rows;
    const int64_t inner = model.inner % TILE_N == 0 ? widest(tokens) * TILE_N : model.inner;
    return 2 * larger(tokens * larger(inner, widest(tokens) * TILE_N), rows * larger(inner, widest(rows) * TILE_N));
}

// tokens: of each row; null: rows are tokens.
void group(const Step& step, const int64_t* tokens, int64_t num_rows, const Groups& groups) {
    groups.first[0] = 0;
    for (int64_t adapter = 0, count = 0; adapter < step.num_adapters; adapter++) {
        for (int64_t row = 0; row < num_rows; row++)
            if (step.adapter_of[tokens == nullptr ? row : tokens[row]] == adapter) groups.rows[count++] = row;
        groups.first[adapter + 1] = count;
    }
}

}  // namespace

// Everything of `run` that lies in the caller's memory; returns the bytes it takes.
int64_t lay_out(Run& run, char* memory) {
    const Model& model = *run.model;
    const Step& step = *run.step;
    const int64_t tokens = step.num_tokens, joined = step.features == nullptr ? 0 : (1 + step.num_parts) * model.hidden;
    const int64_t width = larger(larger(larger(model.hidden, model.inner), model.num_heads * model.dim), joined);
    Arena arena = {memory};
    run.phases = arena.take<Phase>(model.num_layers * PHASES_A_LAYER + OTHER_PHASES);
    run.workers = arena.take<Worker>(run.threads);
    run.attention.first_unit = arena.take<int64_t>(step.num_seqs + 1);
    run.attention.first_partial = arena.take<int64_t>(step.num_seqs + 1);
    // normed rows are prepared for qkv before attention has results, and for gate and up when o has them
    run.rows = arena.take<float>(larger(tokens * model.num_heads * model.dim, larger(tokens, step.num_rows) * model.hidden));
    const auto take_groups = [&](int64_t rows) {
        return Groups{arena.take<int64_t>(step.num_adapters + 1), arena.take<int64_t>(step.num_adapters > 0 ? rows : 0)};
    };
    run.all = {arena.take<float>(tokens * model.hidden), run.rows, tokens, take_groups(tokens)};
    run.last = {arena.take<float>(step.num_rows * model.hidden), arena.take<float>(step.num_rows * model.num_heads * model.dim), step.num_rows,
                take_groups(step.num_rows)};
    // what qkv gave is read no more once attention has it, and only then comes what gate and up give
    run.qkv = run.inner = arena.take<float>(larger(tokens * num_qkv_heads(model) * model.dim, larger(tokens, step.num_rows) * model.inner));
    run.attention.q = run.qkv, run.attention.out = run.all.heads;
    run.joined = arena.take<float>(tokens * joined);
    run.prepared = arena.take<char>(inputs_bytes(static_cast<int32_t>(larger(tokens, step.num_rows)), static_cast<int32_t>(width)));
    run.shrunk = arena.take<float>(larger(tokens, step.num_rows) * step.widest_rank);
    const int64_t num_draws = step.choices == nullptr ? 0 : step.num_rows;
    run.draws = arena.take<PartDraw>(run.threads * num_draws);
    for (int worker = 0; worker < run.threads; worker++) {
        Worker found = {};
        found.inputs.is_reused = model.first != nullptr;  // a draft head's, once for each token of a draft
        found.prepared = arena.take<char>(inputs_bytes(OWN_ROWS, static_cast<int32_t>(width)));
        found.rows = arena.take<float>(OWN_ROWS * model.hidden);
        found.out = arena.take<float>(piece_floats(run));
        found.attention = arena.take<char>(attention_scratch_bytes(static_cast<int>(model.dim)));
        found.best = arena.take<Best>(step.num_rows);
        found.draws = run.draws + worker * num_draws;
        found.choosing = arena.take<char>(has_draws_at_end(step) ? choice_scratch_bytes(model.vocab) : 0);
        found.stretches = arena.take<Stretch>(step.num_adapters * (MOST_PARTS + 1));
        if (memory != nullptr) run.workers[worker] = found;
    }
    return arena.size;
}

void group_rows(Run& run) {
    const Step& step = *run.step;
    group(step, nullptr, step.num_tokens, run.all.groups);
    group(step, step.rows, step.num_rows, run.last.groups);
}

}  // namespace penstock
