// A whole step of a decoder of the Llama family in one call: embedding, the layers over a paged KV cache, final norm, output head. Activations are
// float32 between the products. Plain C ABI; the memory to work in is the caller's.
//
// Every thread runs the same sequence of phases (team.hpp). A product is shared out by outputs, so that who computes some of them goes on with
// what follows elementwise: bias, norms of heads, RoPE and the KV write behind qkv; SwiGLU behind gate and up; the residual sum behind o and down.
// For few tokens every thread brings the inputs of a product into its form by itself, which is cheaper than waiting for another to do it.
//
// Behind the last layer's KV only the tokens whose logits are wanted go on.
//
// Invariant: a token's result is one fixed sequence of operations, whatever other tokens are in the step, as far as the products keep that too
// (linear.hpp) and attention does (attention.hpp).

#include "attention.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "team.hpp"

namespace penstock {
namespace {

constexpr int64_t OWN_ROWS = 4;      // up to so many tokens are prepared by each thread for itself
constexpr int64_t ROWS_A_PIECE = 8;  // tokens normed or prepared at a time
constexpr int64_t WIDEST = 16;       // panels of a product to a piece, at most; of a product with more than OWN_ROWS tokens a quarter of it
constexpr int64_t PIECES = 8;        // of a product to a thread, or somewhat more, where there are enough panels

}  // namespace

// Parameters as Python lays them out (kernels/decoder.py). Vectors are float32, null where the model has none.

struct Layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const Matrix *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
};

struct Model {
    int64_t num_layers, hidden, inner, num_heads, num_kv_heads, dim, vocab;
    const Layer* layers;
    const Matrix *embed, *head;
    const float* norm;
    const float *cos, *sin;  // [position, dim]
    float eps;
    int32_t is_exact;  // activations are not rounded to terms of 8 bits
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
    const int64_t* rows;  // [num_rows] tokens whose logits are wanted
    float* logits;        // [num_rows, vocab], or null
    int64_t* best;        // [num_rows]: where the largest of them stands first
    float* best_score;    // [num_rows]: itself; NaN if any of the row's is
};

namespace {

struct Worker {
    Inputs inputs;
    char* prepared;   // of OWN_ROWS
    float* rows;      // [OWN_ROWS, hidden]
    float* out;       // of a piece of a product: twice all tokens by a piece's outputs
    char* attention;
    Best* best;       // [num_rows]
};

// Tokens on their way through the layers.
struct Stream {
    float* x;      // [num_tokens, hidden], the residual stream
    float* heads;  // [num_tokens, num_heads, dim], attention's results
    int64_t num_tokens;
};

struct Run {
    const Model* model;
    const Step* step;
    const Cache* cache;
    int threads;
    Phase* phases;
    Worker* workers;
    Attention attention;  // of the first layer; each thread has its own copy
    RunUnit run_unit;
    Stream all;     // of all tokens
    Stream last;    // of the rows, in the last layer
    float* rows;    // [max(num_tokens, num_rows), hidden]
    float* qkv;     // [num_tokens, heads, dim]
    float* inner;   // [num_tokens, inner]
    char* prepared;
};

int64_t num_qkv_heads(const Model& model) { return model.num_heads + 2 * model.num_kv_heads; }

// ---- how a product is shared out

struct Split {
    int64_t width, count;  // outputs of a piece, and how many pieces
};

int64_t widest(int64_t num_rows) { return num_rows > OWN_ROWS ? WIDEST / 4 : WIDEST; }

// Of `n` outputs that belong together in units of `unit`, itself a multiple of TILE_N unless there is one unit only.
Split split(int64_t n, int64_t unit, int64_t num_rows, int threads) {
    const int64_t units = (n + unit - 1) / unit;
    int64_t each = smaller(larger(units / (threads * PIECES), 1), larger(widest(num_rows) * TILE_N / unit, 1));
    // a number of pieces that all threads can have the same of
    for (int64_t fewer = each; fewer > 0 && fewer * 2 >= each; fewer--) {
        if (units % (fewer * threads) == 0) {
            each = fewer;
            break;
        }
    }
    return {each * unit, (units + each - 1) / each};
}

int64_t common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t rest = x % y;
        x = y, y = rest;
    }
    return a / x * b;
}

Split split_qkv(const Run& run) {
    const Model& model = *run.model;
    return split(num_qkv_heads(model) * model.dim, common_multiple(model.dim, TILE_N), run.step->num_tokens, run.threads);
}

// ---- operands

// Rows of float32, perhaps to be normed on the way, that a product takes.
struct Operand {
    const float* x;
    const float* norm;  // null: as they are
    int64_t num_rows, width;
};

void norm_rows(const Run& run, const Operand& operand, int64_t begin, int64_t end, float* to) {
    for (int64_t r = begin; r < end; r++) {
        rms_norm(operand.x + r * operand.width, operand.norm, operand.width, run.model->eps, to + r * operand.width);
    }
}

void prepare_rows(Run& run, Worker& me, const Operand& operand, const Matrix& matrix, bool is_own, int64_t begin, int64_t end) {
    const float* x = operand.x;
    if (operand.norm != nullptr) {
        float* normed = is_own ? me.rows : run.rows;
        norm_rows(run, operand, begin, end, normed);
        x = normed;
    }
    prepare(me.inputs, is_own ? me.prepared : run.prepared, x, operand.width, static_cast<int32_t>(operand.num_rows), static_cast<int32_t>(operand.width),
            matrix.group, static_cast<int32_t>(begin), static_cast<int32_t>(end), run.model->is_exact != 0);
}

// Shares out `count` pieces of products of the operand with the matrix, its rows prepared before; `piece` takes the inputs and a piece's number.
template <typename Piece>
void share_product(Run& run, Worker& me, Phase*& phase, const Operand& operand, const Matrix& matrix, int64_t count, Piece piece) {
    const bool is_own = operand.num_rows <= OWN_ROWS;
    if (!is_own) {
        const int64_t pieces = (operand.num_rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
        share(*phase++, pieces, [&](int64_t i) {
            prepare_rows(run, me, operand, matrix, false, i * ROWS_A_PIECE, smaller((i + 1) * ROWS_A_PIECE, operand.num_rows));
        });
    }
    bool is_ready = false;
    share(*phase++, count, [&](int64_t i) {
        if (!is_ready) prepare_rows(run, me, operand, matrix, is_own, 0, is_own ? operand.num_rows : 0);
        is_ready = true;
        piece(i);
    });
}

void add_bias(float* rows, const float* bias, int64_t num_rows, int64_t width, int64_t stride) {
    if (bias == nullptr) return;
    for (int64_t r = 0; r < num_rows; r++) add(rows + r * stride, bias, width);
}

// ---- phases

void embed(Run& run, Phase*& phase) {
    const Step& step = *run.step;
    const int64_t hidden = run.model->hidden;
    share(*phase++, (step.num_tokens + ROWS_A_PIECE - 1) / ROWS_A_PIECE, [&](int64_t i) {
        for (int64_t token = i * ROWS_A_PIECE; token < smaller((i + 1) * ROWS_A_PIECE, step.num_tokens); token++)
            read_row(*run.model->embed, static_cast<int32_t>(step.token_ids[token]), run.all.x + token * hidden);
    });
}

// Norm and RoPE of a head that qkv has just computed, and its way into the cache.
void finish_head(Run& run, const Layer& layer, const Store* stores, int64_t token, int64_t head) {
    const Model& model = *run.model;
    const int64_t position = run.step->positions[token], shared = head - model.num_heads;
    float* x = run.qkv + (token * num_qkv_heads(model) + head) * model.dim;
    if (shared < model.num_kv_heads) {
        const float* norm = shared < 0 ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) rms_norm(x, norm, model.dim, model.eps, x);
        rotate(x, model.cos + position * model.dim, model.sin + position * model.dim, model.dim);
    }
    if (shared < 0) return;
    const bool is_value = shared >= model.num_kv_heads;
    write_slot(stores[is_value], static_cast<DType>(run.cache->dtype), run.step->slots[token], model.num_kv_heads, run.cache->block_size, model.dim,
               is_value ? shared - model.num_kv_heads : shared, 1, x);
}

void compute_qkv(Run& run, Worker& me, Phase*& phase, const Layer& layer, const Store* stores) {
    const Model& model = *run.model;
    const int64_t tokens = run.step->num_tokens, width = num_qkv_heads(model) * model.dim;
    const Split pieces = split_qkv(run);
    share_product(run, me, phase, {run.all.x, layer.input_norm, tokens, model.hidden}, *layer.qkv, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, end = smaller(begin + pieces.width, width);
        multiply(*layer.qkv, me.inputs, run.qkv + begin, width, static_cast<int32_t>(begin), static_cast<int32_t>(end));
        add_bias(run.qkv + begin, layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + begin, tokens, end - begin, width);
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t head = begin / model.dim; head < end / model.dim; head++) finish_head(run, layer, stores, token, head);
    });
}

void attend(Run& run, Worker& me, Phase*& phase, const Store* stores) {
    Attention job = run.attention;
    job.keys = stores[0], job.values = stores[1];
    share(*phase++, job.num_units(), [&](int64_t unit) { run.run_unit(job, unit, me.attention); });
    if (job.is_split) share(*phase++, job.num_tokens(), [&](int64_t token) { merge_query(job, token); });
}

// stream.x += operand * matrix + bias
void add_product(Run& run, Worker& me, Phase*& phase, const Stream& stream, const Operand& operand, const Matrix& matrix, const float* bias) {
    const int64_t hidden = run.model->hidden;
    const Split pieces = split(hidden, TILE_N, operand.num_rows, run.threads);
    share_product(run, me, phase, operand, matrix, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, hidden - begin);
        multiply(matrix, me.inputs, me.out, width, static_cast<int32_t>(begin), static_cast<int32_t>(begin + width));
        add_bias(me.out, bias == nullptr ? nullptr : bias + begin, operand.num_rows, width, width);
        for (int64_t token = 0; token < operand.num_rows; token++) add(stream.x + token * hidden + begin, me.out + token * width, width);
    });
}

void compute_inner(Run& run, Worker& me, Phase*& phase, const Stream& stream, const Layer& layer) {
    const int64_t tokens = stream.num_tokens, inner = run.model->inner;
    // a piece takes the gates and the ups of the same places; panels must not straddle the two
    const Split pieces = inner % TILE_N == 0 ? split(inner, TILE_N, tokens, run.threads) : Split{inner, 1};
    share_product(run, me, phase, {stream.x, layer.post_norm, tokens, run.model->hidden}, *layer.gate_up, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, inner - begin);
        float *gates = me.out, *ups = me.out + tokens * width;
        int64_t stride = width;
        if (pieces.count == 1) {
            ups = gates + inner, stride = 2 * inner;
            multiply(*layer.gate_up, me.inputs, gates, stride, 0, static_cast<int32_t>(2 * inner));
        } else {
            multiply(*layer.gate_up, me.inputs, gates, stride, static_cast<int32_t>(begin), static_cast<int32_t>(begin + width));
            multiply(*layer.gate_up, me.inputs, ups, stride, static_cast<int32_t>(inner + begin), static_cast<int32_t>(inner + begin + width));
        }
        if (layer.gate_up_bias != nullptr) {
            add_bias(gates, layer.gate_up_bias + begin, tokens, width, stride);
            add_bias(ups, layer.gate_up_bias + inner + begin, tokens, width, stride);
        }
        for (int64_t token = 0; token < tokens; token++)
            gate(gates + token * stride, ups + token * stride, width, run.inner + token * inner + begin);
    });
}

// The rows' part of the stream, for which there is memory in `last`.
void keep_rows(Run& run, Phase*& phase) {
    const int64_t hidden = run.model->hidden, width = run.model->num_heads * run.model->dim;
    share(*phase++, run.step->num_rows, [&](int64_t row) {
        const int64_t token = run.step->rows[row];
        memcpy(run.last.x + row * hidden, run.all.x + token * hidden, sizeof(float) * hidden);
        memcpy(run.last.heads + row * width, run.all.heads + token * width, sizeof(float) * width);
    });
}

void compute_head(Run& run, Worker& me, Phase*& phase) {
    const Model& model = *run.model;
    const Step& step = *run.step;
    const Split pieces = split(model.vocab, TILE_N, step.num_rows, run.threads);
    share_product(run, me, phase, {run.last.x, model.norm, step.num_rows, model.hidden}, *model.head, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, model.vocab - begin);
        float* out = step.logits == nullptr ? me.out : step.logits + begin;
        const int64_t stride = step.logits == nullptr ? width : model.vocab;
        multiply(*model.head, me.inputs, out, stride, static_cast<int32_t>(begin), static_cast<int32_t>(begin + width));
        for (int64_t row = 0; row < step.num_rows; row++) find_best(me.best[row], out + row * stride, width, begin);
    });
}

void run_step(void* context, int worker) {
    Run& run = *static_cast<Run*>(context);
    Worker& me = run.workers[worker];
    const Model& model = *run.model;
    Phase* phase = run.phases;
    embed(run, phase);
    for (int64_t index = 0; index < model.num_layers; index++) {
        const Layer& layer = model.layers[index];
        const Store* stores = run.cache->stores + 2 * index;
        compute_qkv(run, me, phase, layer, stores);
        const bool is_last = index == model.num_layers - 1;
        if (is_last && run.step->num_rows == 0) return;
        attend(run, me, phase, stores);
        if (is_last) keep_rows(run, phase);
        const Stream& stream = is_last ? run.last : run.all;
        add_product(run, me, phase, stream, {stream.heads, nullptr, stream.num_tokens, model.num_heads * model.dim}, *layer.o, layer.o_bias);
        compute_inner(run, me, phase, stream, layer);
        add_product(run, me, phase, stream, {run.inner, nullptr, stream.num_tokens, model.inner}, *layer.down, layer.down_bias);
    }
    compute_head(run, me, phase);
}

// ---- memory

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

constexpr int64_t PHASES_A_LAYER = 10, OTHER_PHASES = 5;

int64_t piece_floats(const Run& run) {
    const Model& model = *run.model;
    const int64_t tokens = run.step->num_tokens, rows = run.step->num_rows;
    const int64_t inner = model.inner % TILE_N == 0 ? widest(tokens) * TILE_N : model.inner;
    return 2 * larger(tokens * larger(inner, widest(tokens) * TILE_N), rows * larger(inner, widest(rows) * TILE_N));
}

// Everything of `run` that lies in the caller's memory; returns the bytes it takes.
int64_t lay_out(Run& run, char* memory) {
    const Model& model = *run.model;
    const Step& step = *run.step;
    const int64_t tokens = step.num_tokens, width = larger(larger(model.hidden, model.inner), model.num_heads * model.dim);
    Arena arena = {memory};
    run.phases = arena.take<Phase>(model.num_layers * PHASES_A_LAYER + OTHER_PHASES);
    run.workers = arena.take<Worker>(run.threads);
    run.attention.first_unit = arena.take<int64_t>(step.num_seqs + 1);
    run.attention.first_partial = arena.take<int64_t>(step.num_seqs + 1);
    run.all = {arena.take<float>(tokens * model.hidden), arena.take<float>(tokens * model.num_heads * model.dim), tokens};
    run.last = {arena.take<float>(step.num_rows * model.hidden), arena.take<float>(step.num_rows * model.num_heads * model.dim), step.num_rows};
    run.rows = arena.take<float>(larger(tokens, step.num_rows) * model.hidden);
    run.qkv = arena.take<float>(tokens * num_qkv_heads(model) * model.dim);
    run.inner = arena.take<float>(larger(tokens, step.num_rows) * model.inner);
    run.attention.q = run.qkv, run.attention.out = run.all.heads;
    run.prepared = arena.take<char>(inputs_bytes(static_cast<int32_t>(larger(tokens, step.num_rows)), static_cast<int32_t>(width)));
    for (int worker = 0; worker < run.threads; worker++) {
        Worker found = {};
        found.prepared = arena.take<char>(inputs_bytes(OWN_ROWS, static_cast<int32_t>(width)));
        found.rows = arena.take<float>(OWN_ROWS * model.hidden);
        found.out = arena.take<float>(piece_floats(run));
        found.attention = arena.take<char>(attention_scratch_bytes(static_cast<int>(model.dim)));
        found.best = arena.take<Best>(step.num_rows);
        if (memory != nullptr) run.workers[worker] = found;
    }
    return arena.size;
}

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

Run make_run(const Model* model, const Cache* cache, const Step* step, int threads) {
    Run run = {};
    run.model = model, run.cache = cache, run.step = step, run.threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    describe_attention(run);
    return run;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// Computes the step: the KV of all tokens goes into the cache, the rows' logits and their best to where `step` says. Works in `memory` of `size`
// bytes, aligned to 64. Returns 0, or the bytes it needs, if those are more, and then nothing is computed.
int64_t penstock_step(const Model* model, const Cache* cache, const Step* step, int32_t threads, char* memory, int64_t size) {
    Run run = make_run(model, cache, step, threads);
    const int64_t num_floats = choose_split(run.attention, run.threads), fixed = lay_out(run, nullptr);
    const int64_t needed = fixed + num_floats * static_cast<int64_t>(sizeof(float));
    if (needed > size) return needed;
    lay_out(run, memory);
    run.attention.partials = reinterpret_cast<float*>(memory + fixed);
    plan_attention(run.attention);
    run.run_unit = attention_unit(static_cast<int>(model->dim), static_cast<DType>(cache->dtype));
    memset(static_cast<void*>(run.phases), 0, sizeof(Phase) * static_cast<size_t>(model->num_layers * PHASES_A_LAYER + OTHER_PHASES));
    for (int worker = 0; worker < run.threads; worker++)
        for (int64_t row = 0; row < step->num_rows; row++) run.workers[worker].best[row] = {-__builtin_inff(), model->vocab};
    run_team(run.threads, run_step, &run);
    for (int64_t row = 0; row < step->num_rows; row++) {
        Best best = run.workers[0].best[row];
        for (int worker = 1; worker < run.threads; worker++) keep_better(best, run.workers[worker].best[row].score, run.workers[worker].best[row].index);
        step->best[row] = best.index < model->vocab ? best.index : 0;
        step->best_score[row] = best.score;
    }
    return 0;
}
}
