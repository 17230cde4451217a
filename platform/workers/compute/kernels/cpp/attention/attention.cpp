// Attention's plan: its units for a batch, and what merges those of a split context.

#include "attention/attention_unit.hpp"

namespace penstock {

bool is_attention_supported(int64_t head_dim, int64_t group) { return float_unit(static_cast<int>(head_dim)) != nullptr && group <= MAX_GROUP; }

int64_t attention_scratch_bytes(int) { return UNIT_SCRATCH_BYTES; }

RunUnit attention_unit(int dim, DType kv_dtype) {
    RunUnit fast = avx512_unit(dim, kv_dtype);
    if (fast == nullptr) fast = avx2_unit(dim, kv_dtype);
    return fast != nullptr ? fast : float_unit(dim);
}

int64_t choose_split(Attention& job, int threads) {
    int64_t units = 0, partials = 0;
    job.is_split = false;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) units += num_tiles(job, seq) * job.num_kv_heads;
    job.is_split = units < 4 * threads && threads > 1;
    if (!job.is_split) return 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) partials += num_spans(job, seq) * job.num_queries(seq) * job.num_heads;
    return partials * (job.dim + W + 1);
}

void plan_attention(Attention& job) {
    int64_t units = 0, partials = 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) {
        job.first_unit[seq] = units;
        job.first_partial[seq] = partials;
        units += num_tiles(job, seq) * job.num_kv_heads * num_spans(job, seq);
        partials += num_spans(job, seq) * job.num_queries(seq) * job.num_heads;
    }
    job.first_unit[job.num_seqs] = units;
    job.first_partial[job.num_seqs] = partials;
}

void merge_query(const Attention& job, int64_t token) {
    int64_t seq = 0;
    while (job.query_start[seq + 1] <= token) seq++;
    const int64_t query = token - job.query_start[seq];
    const int64_t visible = job.context_len[seq] - job.num_queries(seq) + query + 1;
    for (int64_t head = 0; head < job.num_heads; head++) {
        Row row = read_partial(job, partial_of(job, seq, 0, query, head));
        for (int64_t segment = 1; segment * SEGMENT < visible; segment++)
            merge(row, read_partial(job, partial_of(job, seq, segment, query, head)), job.dim);
        finish(job, row, token, head);
    }
}

}  // namespace penstock
