// A step's phases, in the order in which every thread goes through them.
//
// Every thread runs the same sequence of phases (team.hpp). A product is shared out by outputs, so that who computes some of them goes on with
// what follows elementwise: what adapters add, bias, norms of heads, RoPE and the KV write behind qkv; SwiGLU behind gate and up; the residual sum behind o and down.
// For few tokens every thread brings the inputs of a product into its form by itself, which is cheaper than waiting for another to do it.
//
// Behind the last layer's KV only the tokens whose logits are wanted go on.
//
// Invariant: a token's result is one fixed sequence of operations, whatever other tokens are in the step, as far as the products keep that too
// (linear.hpp) and attention does (attention.hpp).

#include "decoder/decoder_matmul.hpp"

namespace penstock {
namespace {

constexpr int64_t QUERIES_A_THREAD = 4;  // fewer, and threads would wait for the one that has the longest context

void embed(Run& run, Phase*& phase) {
    const Step& step = *run.step;
    const int64_t hidden = run.model->hidden;
    share(*phase++, (step.num_tokens + ROWS_A_PIECE - 1) / ROWS_A_PIECE, [&](int64_t i) {
        for (int64_t token = i * ROWS_A_PIECE; token < smaller((i + 1) * ROWS_A_PIECE, step.num_tokens); token++)
            read_row(*run.model->embed, static_cast<int32_t>(step.token_ids[token]), run.all.x + token * hidden);
    });
}

// A draft head's input: a token's row of the embedding and its features, each of unit size, side by side, times a matrix.
void join(Run& run, Worker& me, Phase*& phase) {
    const Step& step = *run.step;
    const int64_t hidden = run.model->hidden, parts = step.num_parts, width = (1 + parts) * hidden;
    share(*phase++, (step.num_tokens + ROWS_A_PIECE - 1) / ROWS_A_PIECE, [&](int64_t i) {
        for (int64_t token = i * ROWS_A_PIECE; token < smaller((i + 1) * ROWS_A_PIECE, step.num_tokens); token++) {
            float* joined = run.joined + token * width;
            read_row(*run.model->embed, static_cast<int32_t>(step.token_ids[token]), joined);
            unit_norm(joined, hidden, joined);
            for (int64_t part = 0; part < parts; part++)
                unit_norm(step.features + (token * parts + part) * hidden, hidden, joined + (1 + part) * hidden);
        }
    });
    const Matrix& matrix = parts == 1 ? *run.model->chained : *run.model->first;
    const Split pieces = split(hidden, TILE_N, step.num_tokens, run.threads);
    share_matmul(run, me, phase, {run.joined, nullptr, step.num_tokens, width}, matrix, {}, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, end = smaller(begin + pieces.width, hidden);
        multiply(matrix, me.inputs, run.all.x + begin, hidden, static_cast<int32_t>(begin), static_cast<int32_t>(end));
    });
}

// What is wanted of the residual stream behind a layer; `next`: the taps that are left.
void tap(Run& run, Phase*& phase, int64_t layer, int64_t& next) {
    const Step& step = *run.step;
    if (next == step.num_taps || step.taps[next] != layer) return;
    const int64_t hidden = run.model->hidden, place = next++;
    share(*phase++, (step.num_tokens + ROWS_A_PIECE - 1) / ROWS_A_PIECE, [&](int64_t i) {
        for (int64_t token = i * ROWS_A_PIECE; token < smaller((i + 1) * ROWS_A_PIECE, step.num_tokens); token++)
            memcpy(step.tapped + (token * step.num_taps + place) * hidden, run.all.x + token * hidden, sizeof(float) * hidden);
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

void compute_qkv(Run& run, Worker& me, Phase*& phase, const Layer& layer, const Store* stores, int64_t index) {
    const Model& model = *run.model;
    const Adapted adapters = adapted(run.all, index, QKV);
    const Following following = {adapted(run.all, index, O), model.num_heads * model.dim};
    const int64_t tokens = run.step->num_tokens, width = num_qkv_heads(model) * model.dim;
    const Split pieces = split_qkv(run);
    share_matmul(run, me, phase, {run.all.x, layer.input_norm, tokens, model.hidden}, *layer.qkv, adapters, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, end = smaller(begin + pieces.width, width);
        multiply_adapted(run, me, adapters, following, *layer.qkv, run.qkv + begin, width, begin, end);
        add_bias(run.qkv + begin, layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + begin, tokens, end - begin, width);
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t head = begin / model.dim; head < end / model.dim; head++) finish_head(run, layer, stores, token, head);
    });
}

void attend(Run& run, Worker& me, Phase*& phase, const Store* stores) {
    Attention job = run.attention;
    job.keys = stores[0], job.values = stores[1];
    // all heads of a query by one thread, where there are enough for everybody: what they read lies side by side
    const int64_t units = job.num_units() / job.num_kv_heads >= QUERIES_A_THREAD * run.threads ? job.num_kv_heads : 1;
    // the few of a short context, of which the last segment is shorter than the others, are taken in turn
    job.is_in_order = !job.is_split || units > 1;
    const int64_t pieces = job.num_units() / units;
    share(*phase++, pieces, [&](int64_t i) {
        const int64_t piece = job.is_in_order ? piece_of(i, pieces, run.threads) : i;
        for (int64_t unit = piece * units; unit < (piece + 1) * units; unit++) run.run_unit(job, unit, me.attention);
    });
    if (job.is_split) share(*phase++, job.num_tokens(), [&](int64_t token) { merge_query(job, token); });
}

// stream.x += operand * matrix + bias, with what adapters add
void add_product(Run& run, Worker& me, Phase*& phase, const Stream& stream, const Operand& operand, const Matrix& matrix, const Adapted& adapters,
                 const Following& following, const float* bias) {
    const int64_t hidden = run.model->hidden;
    const Split pieces = split(hidden, TILE_N, operand.num_rows, run.threads);
    share_matmul(run, me, phase, operand, matrix, adapters, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, hidden - begin);
        multiply_adapted(run, me, adapters, following, matrix, me.out, width, begin, begin + width);
        add_bias(me.out, bias == nullptr ? nullptr : bias + begin, operand.num_rows, width, width);
        for (int64_t token = 0; token < operand.num_rows; token++) add(stream.x + token * hidden + begin, me.out + token * width, width);
    });
}

void compute_inner(Run& run, Worker& me, Phase*& phase, const Stream& stream, const Layer& layer, int64_t index) {
    const int64_t tokens = stream.num_tokens, inner = run.model->inner;
    const Adapted adapters = adapted(stream, index, GATE_UP);
    const Following following = {adapted(stream, index, DOWN), inner};
    // a piece takes the gates and the ups of the same places; panels must not straddle the two
    const Split pieces = inner % TILE_N == 0 ? split(inner, TILE_N, tokens, run.threads) : Split{inner, 1};
    share_matmul(run, me, phase, {stream.x, layer.post_norm, tokens, run.model->hidden}, *layer.gate_up, adapters, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, inner - begin);
        float *gates = me.out, *ups = me.out + tokens * width;
        int64_t stride = width;
        if (pieces.count == 1) {
            ups = gates + inner, stride = 2 * inner;
            multiply_adapted(run, me, adapters, following, *layer.gate_up, gates, stride, 0, 2 * inner);
        } else {
            multiply_adapted(run, me, adapters, following, *layer.gate_up, gates, stride, begin, begin + width);
            multiply_adapted(run, me, adapters, following, *layer.gate_up, ups, stride, inner + begin, inner + begin + width);
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
    if (step.states != nullptr) {
        share(*phase++, 1, [&](int64_t) { memcpy(step.states, run.last.x, sizeof(float) * step.num_rows * model.hidden); });
    }
    const Split pieces = split(model.vocab, TILE_N, step.num_rows, run.threads);
    share_matmul(run, me, phase, {run.last.x, model.norm, step.num_rows, model.hidden}, *model.head, {}, pieces.count, [&](int64_t i) {
        const int64_t begin = i * pieces.width, width = smaller(pieces.width, model.vocab - begin);
        multiply(*model.head, me.inputs, me.out, width, static_cast<int32_t>(begin), static_cast<int32_t>(begin + width));
        for (int64_t row = 0; row < step.num_rows; row++) {
            const float* out = me.out + row * width;
            find_best(me.best[row], out, width, begin);
            if (is_drawn_in_parts(step, row)) part_taker()(me.draws[row], out, width, begin);
            // written once and in a piece: rows of a vocabulary's length often lie in the same sets of the cache
            if (step.logits == nullptr) continue;
            const int64_t place = step.places == nullptr ? row : step.places[row];
            if (place >= 0) memcpy(step.logits + place * model.vocab + begin, out, sizeof(float) * width);
        }
    });
    if (!has_draws_at_end(step)) return;
    share(*phase++, step.num_rows, [&](int64_t row) {
        if (!is_drawn_at_end(step, row)) return;
        ChoiceRow& choice = step.choices[row];
        choice.logits = choice.raw = step.logits + (step.places == nullptr ? row : step.places[row]) * model.vocab;
        row_chooser()(choice, model.vocab, me.choosing);
    });
}

}  // namespace

void run_step(void* context, int worker) {
    Run& run = *static_cast<Run*>(context);
    Worker& me = run.workers[worker];
    const Model& model = *run.model;
    Phase* phase = run.phases;
    int64_t next_tap = 0;
    if (run.step->features == nullptr)
        embed(run, phase);
    else
        join(run, me, phase);
    for (int64_t index = 0; index < model.num_layers; index++) {
        const Layer& layer = model.layers[index];
        const Store* stores = run.cache->stores + 2 * index;
        compute_qkv(run, me, phase, layer, stores, index);
        const bool is_last = index == model.num_layers - 1;
        if (is_last && run.step->num_rows == 0) return;
        attend(run, me, phase, stores);
        if (is_last) keep_rows(run, phase);
        const Stream& stream = is_last ? run.last : run.all;
        add_product(run, me, phase, stream, {stream.heads, nullptr, stream.num_tokens, model.num_heads * model.dim}, *layer.o, adapted(stream, index, O),
                    {adapted(stream, index, GATE_UP), model.hidden}, layer.o_bias);
        compute_inner(run, me, phase, stream, layer, index);
        const Following following = {is_last ? Adapted{} : adapted(run.all, index + 1, QKV), model.hidden};
        add_product(run, me, phase, stream, {run.inner, nullptr, stream.num_tokens, model.inner}, *layer.down, adapted(stream, index, DOWN), following,
                    layer.down_bias);
        tap(run, phase, index, next_tap);
    }
    compute_head(run, me, phase);
}

}  // namespace penstock
