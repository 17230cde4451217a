// Attention's units in float32, for every format and CPU: W dot products at once (vectors.hpp).

#include "attention/attention_store.hpp"
#include "attention/attention_unit.hpp"

namespace penstock {
namespace {

// ---- W dot products at once
// Lane t of the lower (upper) halves of the groups of S lanes, x's before y's.
template <int S>
constexpr int half_lane(int t, bool upper) {
    const int y = t >= W / 2, u = t % (W / 2);
    return y * W + u / (S / 2) * S + u % (S / 2) + (upper ? S / 2 : 0);
}

template <int S, int... I>
inline Vec add_halves(Vec x, Vec y, Integers<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, half_lane<S>(I, false)...) + __builtin_shufflevector(x, y, half_lane<S>(I, true)...);
#else
    return __builtin_shuffle(x, y, IVec{half_lane<S>(I, false)...}) + __builtin_shuffle(x, y, IVec{half_lane<S>(I, true)...});
#endif
}

// Sums the lanes of each of W vectors: W sums in one vector, in order.
template <int S>
inline Vec reduce(const Vec* x) {
    if constexpr (S == 1) {
        return x[0];
    } else {
        Vec half[S / 2];
#pragma GCC unroll 16
        for (int i = 0; i < S / 2; i++) half[i] = add_halves<S>(x[2 * i], x[2 * i + 1], Lanes());
        return reduce<S / 2>(half);
    }
}

// Scores of one query against W keys that lie side by side.
template <int D>
inline Vec score(const float* q, const float* keys) {
    Vec sums[W] = {};
    for (int d = 0; d < D; d += W) {
        const Vec x = load(q + d);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) sums[j] += x * load(keys + j * D + d);
    }
    return reduce<W>(sums);
}

// ---- a chunk

// W positions to a tile, each tile's keys (values) side by side.
struct Chunk {
    const float* keys[CHUNK / W];
    const float* values[CHUNK / W];
};

// N vectors of the weighted sum; even and odd positions are summed apart, for the latency of the multiply-add.
template <int D, int N>
inline void accumulate(float* sum, const float* weights, const Chunk& chunk, int first, int num_positions, float factor) {
    Vec even[N], odd[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) even[i] = load(sum + first + i * W) * factor, odd[i] = splat(0.0f);
    for (int start = 0; start < num_positions; start += W) {
        const float* values = chunk.values[start / W] + first;
        const float* weight = weights + start;
        const int count = num_positions - start < W ? num_positions - start : W;
        int j = 0;
        for (; j + 1 < count; j += 2) {
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                even[i] += load(values + j * D + i * W) * weight[j];
                odd[i] += load(values + (j + 1) * D + i * W) * weight[j + 1];
            }
        }
        if (j < count) {
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) even[i] += load(values + j * D + i * W) * weight[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) store(sum + first + i * W, even[i] + odd[i]);
}

// One (query, head) takes in the first num_positions (>= 1) of a chunk.
template <int D>
__attribute__((noinline)) void absorb(Row& row, const float* q, const Chunk& chunk, int num_positions) {
    alignas(64) float weights[CHUNK];
    const IVec lane = make_lanes(Lanes());
    Vec best = splat(-__builtin_inff());
    for (int start = 0; start < num_positions; start += W) {
        Vec x = score<D>(q, chunk.keys[start / W]);
        x = lane < num_positions - start ? x : splat(-__builtin_inff());
        best = x > best ? x : best;
        store(weights + start, x);
    }
    const float peak = largest(best) > row.peak ? largest(best) : row.peak;
    const float factor = exp2_nonpositive(splat(row.peak - peak))[0];
    Vec weight = splat(0.0f);
    for (int start = 0; start < num_positions; start += W) {
        Vec x = exp2_nonpositive(load(weights + start) - peak);
        x = lane < num_positions - start ? x : splat(0.0f);
        weight += x;
        store(weights + start, x);
    }
    row.peak = peak;
    row.weight = row.weight * factor + weight;
    constexpr int VECTORS = D / W, BLOCK = 4;
    for (int i = 0; i + BLOCK <= VECTORS; i += BLOCK) accumulate<D, BLOCK>(row.weighted_sum, weights, chunk, i * W, num_positions, factor);
    if constexpr (VECTORS % BLOCK != 0)
        accumulate<D, VECTORS % BLOCK>(row.weighted_sum, weights, chunk, VECTORS / BLOCK * BLOCK * W, num_positions, factor);
}

// ---- where keys and values are

void read_scaled(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int8_t* data = static_cast<const int8_t*>(from.data) + offset_of(job, from, unit, position);
    const float* scales = scales_of(job, from, unit, position);
    for (int64_t i = 0; i < count; i++) {
        const float scale = scales[i];
        for (int d = 0; d < job.dim; d++) to[i * job.dim + d] = static_cast<float>(data[i * job.dim + d]) * scale;
    }
}

void read_tiled_bf16(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int64_t first = position % job.block_size;
    const uint16_t* head = static_cast<const uint16_t*>(from.data) + offset_of(job, from, unit, position - first);
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < job.dim; d++) to[i * job.dim + d] = from_bf16(head[tiled_place(from, first + i, d, job.dim, PAIR)]);
}

void read_tiled_int8(const Attention& job, const Unit& unit, const Store& from, int64_t position, int64_t count, float* to) {
    const int64_t first = position % job.block_size;
    const uint8_t* head = static_cast<const uint8_t*>(from.data) + offset_of(job, from, unit, position - first);
    const float* scales = scales_of(job, from, unit, position);
    const uint8_t flip = from.is_values ? 0 : 128;
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < job.dim; d++)
            to[i * job.dim + d] = static_cast<float>(static_cast<int8_t>(head[tiled_place(from, first + i, d, job.dim, FOUR)] ^ flip)) * scales[i];
}

// Where the keys (values) of a chunk are: in the cache itself where its layout allows, else copied to `scratch` as float32.
template <int D>
void locate(const Attention& job, const Unit& unit, const Store& from, int64_t start, int64_t end, float* scratch, const float** tiles) {
    const int64_t size = job.block_size;
    if (job.kv_dtype == FLOAT32 && size % W == 0) {
        for (int64_t position = start; position < end; position += W)
            tiles[(position - start) / W] = static_cast<const float*>(from.data) + offset_of(job, from, unit, position);
        return;
    }
    for (int64_t position = start; position < end;) {
        const int64_t count = smaller(size - position % size, end - position), offset = offset_of(job, from, unit, position);
        float* to = scratch + (position - start) * D;
        if (job.kv_dtype == SCALED_INT8)
            read_scaled(job, unit, from, position, count, to);
        else if (job.kv_dtype == TILED_BFLOAT16)
            read_tiled_bf16(job, unit, from, position, count, to);
        else if (job.kv_dtype == TILED_INT8)
            read_tiled_int8(job, unit, from, position, count, to);
        else
            read(to, from.data, job.kv_dtype, offset, count * D);
        position += count;
    }
    // the last tile is scored as a whole
    const int64_t rest = (W - (end - start) % W) % W;
    memset(scratch + (end - start) * D, 0, sizeof(float) * rest * D);
    for (int64_t i = 0; i * W < end - start; i++) tiles[i] = scratch + i * W * D;
}

// ---- a unit

template <int D>
struct Scratch {
    alignas(64) float q[UNIT_ROWS][D];
    alignas(64) float sums[UNIT_ROWS][D];
    alignas(64) float segment_sum[UNIT_ROWS][D];
    alignas(64) float keys[CHUNK * D], values[CHUNK * D];
    Row rows[UNIT_ROWS];
    Row segment_rows[UNIT_ROWS];
};

static_assert(sizeof(Scratch<MAX_DIM>) <= UNIT_SCRATCH_BYTES, "scratch is for every unit");

template <int D>
void run_unit(const Attention& job, int64_t index, void* memory) {
    Scratch<D>& scratch = *static_cast<Scratch<D>*>(memory);
    const Unit unit = find_unit(job, index);
    const float scale = job.scale * 1.4426950408889634f;  // the softmax's base is 2
    for (int64_t r = 0; r < unit.num_rows; r++) {
        read_query(job, unit, r, scratch.q[r]);
        for (int d = 0; d < D; d++) scratch.q[r][d] *= scale;
        scratch.rows[r].weighted_sum = scratch.sums[r];
        scratch.segment_rows[r].weighted_sum = scratch.segment_sum[r];
    }
    for (int64_t segment = unit.begin; segment < unit.end; segment += SEGMENT) {
        Row* rows = segment == unit.begin ? scratch.rows : scratch.segment_rows;
        const int64_t segment_end = smaller(segment + SEGMENT, unit.end);
        for (int64_t r = 0; r < unit.num_rows; r++) clear(rows[r], D);
        for (int64_t start = segment; start < segment_end; start += CHUNK) {
            const int64_t stop = smaller(start + CHUNK, segment_end);
            Chunk chunk;
            locate<D>(job, unit, job.keys, start, stop, scratch.keys, chunk.keys);
            locate<D>(job, unit, job.values, start, stop, scratch.values, chunk.values);
            for (int64_t r = 0; r < unit.num_rows; r++) {
                const int64_t visible = unit.first_visible + query_of(job, r) - start;
                if (visible > 0) absorb<D>(rows[r], scratch.q[r], chunk, static_cast<int>(smaller(visible, stop - start)));
            }
        }
        if (segment == unit.begin) continue;
        for (int64_t r = 0; r < unit.num_rows; r++)
            if (unit.first_visible + query_of(job, r) > segment) merge(scratch.rows[r], scratch.segment_rows[r], D);
    }
    for (int64_t r = 0; r < unit.num_rows; r++) hand_over(job, unit, scratch.rows[r], r);
}

}  // namespace

RunUnit float_unit(int dim) {
    switch (dim) {
        case 16: return run_unit<16>;
        case 32: return run_unit<32>;
        case 48: return run_unit<48>;
        case 64: return run_unit<64>;
        case 80: return run_unit<80>;
        case 96: return run_unit<96>;
        case 128: return run_unit<128>;
        case 192: return run_unit<192>;
        case 256: return run_unit<256>;
        default: return nullptr;
    }
}

}  // namespace penstock
