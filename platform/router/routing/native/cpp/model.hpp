// The performance model for one replica: penstock.perf.model, operation by operation in its order, so that both give the same numbers to
// the last bit. Amounts of tokens and rows are whole numbers below 2^53, in doubles.
#pragma once

#include <math.h>
#include <stdint.h>

namespace penstock {

constexpr double NOISE = 1.25;               // penstock.perf.blend
constexpr int64_t MAX_SCORED_TOKENS = 128;   // penstock.perf.model

constexpr double NUM_FOLLOWING = 4.0, FULL_BACKLOG_S = 3.0, LEAST_WEIGHT = 0.03;  // penstock.router.routing.policy

inline double larger(double one, double other) { return one > other ? one : other; }
inline double within(double least, double value, double most) { return value < least ? least : value > most ? most : value; }

// Step costs as ReplicaTable packs them: the coefficients, and behind them what is only there where steps are recorded.
struct Packed {
    double base_s, row_s, prefill_token_s, attention_s, kv_token_s, draft_token_s, draft_round_s, knee_s, sampled_row_s;
    double has_stairs, recorded_rows, recorded_tokens, eager_knee_s, num_cliffs;
    double cliffs[];  // places, and then their seconds
};

// What a replica has to do, and the tokens that a step of it takes.
struct Work {
    double running, waiting, prefill_tokens, kv_tokens, sampled, max_batched_tokens;

    double rows() const { return running + waiting; }
    double budget() const { return larger(1, max_batched_tokens - running); }
};

// Step costs, every coefficient times a factor.
class Costs {
public:
    Costs(const Packed& of, double factor) : packed(of), factor(factor) {
        base_s = of.base_s * factor;
        row_s = of.row_s * factor;
        prefill_token_s = of.prefill_token_s * factor;
        attention_s = of.attention_s * factor;
        kv_token_s = of.kv_token_s * factor;
        knee_s = of.knee_s * factor;
        sampled_row_s = of.sampled_row_s * factor;
        eager_knee_s = of.eager_knee_s * factor;
    }

    double step_s(double rows, double prefill_tokens, double query_context, double kv_tokens, double sampled_rows) const {
        const double linear = base_s + row_s * rows + prefill_token_s * prefill_tokens + attention_s * query_context + kv_token_s * kv_tokens + sampled_row_s * sampled_rows;
        if (packed.has_stairs == 0) return larger(knee_s, linear);
        const double num_tokens = rows + larger(0, prefill_tokens - 1);
        return larger(floor_s(rows, num_tokens), linear + cliffs_s(num_tokens));
    }

    // Seconds per output token, beside `waiting` sequences that decode by then.
    double tpot_s(const Work& work, double waiting, double context_tokens) const {
        return step_s(work.running + waiting + 1, 0, 0, work.kv_tokens + work.prefill_tokens + context_tokens, work.sampled);
    }

    // Seconds of prefill outstanding.
    double backlog_s(const Work& work) const { return work.prefill_tokens * prefill_token_s; }

    // Seconds until a prompt is computed behind `ahead` tokens of others.
    double prefill_s(const Work& work, double ahead, double uncached_tokens, double cached_tokens, int64_t scored_tokens) const {
        const double own = larger(1, uncached_tokens);
        const double query_context = own * (cached_tokens + own / 2) + ahead * (ahead / larger(1, work.waiting)) / 2;
        const double total = own + ahead, context = query_context / total, rows = work.running + 1;
        const auto budget = static_cast<int64_t>(work.budget()), tokens = static_cast<int64_t>(total);
        const int64_t full_steps = tokens < budget ? 0 : tokens / budget, rest = tokens - full_steps * budget;
        double seconds = 0;
        if (full_steps) seconds = static_cast<double>(full_steps) * prefill_step_s(work, rows, static_cast<double>(budget), context);
        if (rest) seconds += prefill_step_s(work, rows, static_cast<double>(rest), context);
        if (scored_tokens) seconds += scoring_s(work, scored_tokens, full_steps + (rest != 0));
        return seconds;
    }

    double ttft_s(const Work& work, double uncached_tokens, double cached_tokens, int64_t scored_tokens) const {
        const double seconds = prefill_s(work, work.prefill_tokens, uncached_tokens, cached_tokens, scored_tokens);
        if (work.running == 0 && work.prefill_tokens == 0) return seconds;
        const double under_way = work.prefill_tokens < work.budget() ? work.prefill_tokens : work.budget();
        return seconds + step_s(work.running, under_way, 0, work.kv_tokens, work.sampled) / 2;
    }

private:
    const Packed& packed;
    double factor;
    double base_s, row_s, prefill_token_s, attention_s, kv_token_s, knee_s, sampled_row_s, eager_knee_s;

    double prefill_step_s(const Work& work, double rows, double tokens, double context) const {
        return step_s(rows, tokens, context * tokens, work.kv_tokens, work.sampled);
    }

    double scoring_s(const Work& work, int64_t scored_tokens, int64_t num_steps) const {
        const int64_t more_steps = (scored_tokens + MAX_SCORED_TOKENS - 1) / MAX_SCORED_TOKENS - num_steps;
        const double beside_s = step_s(work.running, 0, 0, work.kv_tokens, work.sampled);
        return static_cast<double>(scored_tokens) * (row_s + sampled_row_s) + (more_steps > 0 ? static_cast<double>(more_steps) : 0) * beside_s;
    }

    double floor_s(double rows, double num_tokens) const {
        const bool is_recorded = rows <= packed.recorded_rows && (num_tokens <= rows || num_tokens <= packed.recorded_tokens);
        return is_recorded ? knee_s : larger(knee_s, eager_knee_s);
    }

    double cliffs_s(double num_tokens) const {
        const auto num = static_cast<int64_t>(packed.num_cliffs);
        double seconds = 0;
        for (int64_t index = 0; index < num; index++) {
            if (num_tokens > packed.cliffs[index]) seconds += packed.cliffs[num + index] * factor;
        }
        return seconds;
    }
};

// How much slower a replica is than its pool, beyond noise, either way; own_tpot_s: seconds per output token by its own costs.
inline double excess(const Costs& pool, const Work& work, double own_tpot_s) {
    const double common_s = pool.tpot_s(work, work.waiting, 0);
    if (own_tpot_s > common_s * NOISE) return own_tpot_s / (common_s * NOISE);
    if (own_tpot_s * NOISE < common_s) return own_tpot_s * NOISE / common_s;
    return 1;
}

struct Score {
    double cost_s, ttft_s;
    bool operator<(const Score& other) const { return cost_s < other.cost_s || (cost_s == other.cost_s && ttft_s < other.ttft_s); }
};

// The cost of a request as penstock.router.routing.policy defines it; mean_backlog_s: of the candidates.
inline Score score(const Costs& costs, const Work& work, double num_tokens, double cached_tokens, double start_wait_s, double expected_output_tokens, int64_t scored_tokens, double mean_backlog_s) {
    const double uncached_tokens = num_tokens - cached_tokens;
    const double begun_s = costs.ttft_s(work, uncached_tokens, cached_tokens, scored_tokens), ttft_s = start_wait_s + begun_s;
    const bool is_idle = work.running == 0 && work.prefill_tokens == 0;
    const double own_prefill_s = is_idle ? begun_s : costs.prefill_s(work, 0, uncached_tokens, cached_tokens, scored_tokens);
    const double tpot_s = costs.tpot_s(work, work.waiting, num_tokens);
    double cost_s = ttft_s + expected_output_tokens * tpot_s + NUM_FOLLOWING * own_prefill_s;
    if (work.rows() != 0) {
        const double tpot_before_s = costs.tpot_s(work, work.waiting - 1, 0);
        const double weight = within(LEAST_WEIGHT, sqrt(costs.backlog_s(work) * mean_backlog_s) / FULL_BACKLOG_S, 1);
        cost_s += weight * (work.rows() * (own_prefill_s + expected_output_tokens / 2 * (tpot_s - tpot_before_s)));
    }
    return {cost_s, ttft_s};
}

}  // namespace penstock
