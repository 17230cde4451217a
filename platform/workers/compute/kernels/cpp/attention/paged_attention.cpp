// Paged attention's plain C ABI over raw pointers, for callers without threads of their own.

#include <stdlib.h>

#include "attention/attention_unit.hpp"
#include "base/team.hpp"

namespace penstock {
namespace {

constexpr double ONE_THREAD_WORK = 4e5;  // multiply-adds below which waking a helper costs more than it saves

double multiply_adds(const Attention& job) {
    double sum = 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) sum += 2.0 * job.num_queries(seq) * job.context_len[seq] * job.num_heads * job.dim;
    return sum;
}

struct Call {
    const Attention* job;
    RunUnit run;
    int threads;
    Phase units, merges;
};

void work(void* context, int) {
    Call& call = *static_cast<Call*>(context);
    const Attention& job = *call.job;
    alignas(64) char scratch[UNIT_SCRATCH_BYTES];
    share(call.units, job.num_units(), [&](int64_t i) {
        call.run(job, job.is_in_order ? piece_of(i, job.num_units(), call.threads) : i, scratch);
    });
    if (job.is_split) share(call.merges, job.num_tokens(), [&](int64_t token) { merge_query(job, token); });
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// Changes with every signature below.
int32_t penstock_kernels_abi() { return 12; }

int32_t penstock_supports(int64_t head_dim, int64_t group) { return is_attention_supported(head_dim, group); }

// k, v: [num_tokens, num_kv_heads, head_dim], `stride` elements from token to token. slots: [num_tokens] block * block_size + offset. Scales only of
// SCALED_INT8.
void penstock_write_kv(const void* k, const void* v, int32_t dtype, int64_t k_stride, int64_t v_stride, void* k_cache, void* v_cache, float* k_scales,
                       float* v_scales, int64_t block_stride, int32_t kv_dtype, const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, int64_t dim) {
    alignas(64) float row[MAX_DIM];
    const Store keys = {k_cache, k_scales, block_stride, false}, values = {v_cache, v_scales, block_stride, true};
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t head = 0; head < num_kv_heads; head++) {
            read(row, k, static_cast<DType>(dtype), token * k_stride + head * dim, dim);
            write_slot(keys, static_cast<DType>(kv_dtype), slots[token], num_kv_heads, block_size, dim, head, 1, row);
            read(row, v, static_cast<DType>(dtype), token * v_stride + head * dim, dim);
            write_slot(values, static_cast<DType>(kv_dtype), slots[token], num_kv_heads, block_size, dim, head, 1, row);
        }
    }
}

// q, out: [num_tokens, num_heads, head_dim]; q with `q_stride` elements from token to token, out contiguous. Returns 0, or 1 without memory,
// 2 for a head_dim or group that penstock_supports denies.
int32_t penstock_attend(const void* q, int32_t q_dtype, int64_t q_stride, void* out, void* k_cache, void* v_cache, float* k_scales, float* v_scales,
                        int64_t block_stride, int32_t kv_dtype, const int32_t* query_start, const int32_t* context_len, const int32_t* block_tables, int64_t table_stride,
                        int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_dim, float scale, int32_t threads) {
    if (!is_attention_supported(head_dim, num_heads / num_kv_heads)) return 2;
    Attention job = {};
    job.q = q, job.out = out, job.q_dtype = static_cast<DType>(q_dtype), job.kv_dtype = static_cast<DType>(kv_dtype), job.q_stride = q_stride;
    job.keys = {k_cache, k_scales, block_stride, false}, job.values = {v_cache, v_scales, block_stride, true};
    job.query_start = query_start, job.context_len = context_len, job.block_tables = block_tables, job.table_stride = table_stride;
    job.num_seqs = num_seqs, job.num_heads = num_heads, job.num_kv_heads = num_kv_heads, job.block_size = block_size;
    job.dim = static_cast<int>(head_dim), job.scale = scale;
    job.first_unit = static_cast<int64_t*>(malloc(sizeof(int64_t) * 2 * (num_seqs + 1)));
    if (job.first_unit == nullptr) return 1;
    job.first_partial = job.first_unit + num_seqs + 1;

    const int64_t num_floats = choose_split(job, threads);
    plan_attention(job);
    job.is_in_order = !job.is_split;
    if (job.is_split) {
        job.partials = static_cast<float*>(malloc(sizeof(float) * num_floats));
        if (job.partials == nullptr) {
            free(job.first_unit);
            return 1;
        }
    }
    Call call = {&job, attention_unit(job.dim, job.kv_dtype), multiply_adds(job) < ONE_THREAD_WORK || threads < 1 ? 1 : threads, {}, {}};
    run_team(call.threads, work, &call);
    free(job.partials);
    free(job.first_unit);
    return 0;
}
}
