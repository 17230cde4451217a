// Paged attention on CPUs: plain C ABI over raw pointers; needs pthreads and the C library, nothing of C++'s run-time library.
//
// A cache layer is [num_blocks, num_kv_heads, block_size, head_dim]. One unit of work is (sequence, kv head, tile of queries, span of the
// context): keys and values are read once for all query heads of the group and all queries of the tile. Softmax is the online one
// (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention), in float32.
//
// Invariants. Exactness: what one (query, head) gets is one fixed sequence of operations that depends on its own context only: the walk
// goes through chunks of CHUNK positions from 0, segments of SEGMENT positions are merged in order, and rows are never mixed in one
// vector. Tiles, threads and splits decide who computes and when, not what. Safety: scores behind the context are replaced, never
// multiplied, and values behind it are not touched, so whatever lies there (NaN) cannot leak.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // float lanes of a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

constexpr int CHUNK = 64;         // positions between two rescalings; multiple of W
constexpr int SEGMENT = 1024;     // positions merged at a time; multiple of CHUNK
constexpr int MAX_ROWS = 32;      // (query, head) pairs of a unit, but at least one query of all heads of its group
constexpr int MAX_GROUP = 64;     // query heads to a kv head
constexpr int MAX_DIM = 256;      // head_dim
constexpr int MAX_THREADS = 256;  // helpers of the pool
constexpr double ONE_THREAD_WORK = 4e5;  // multiply-adds below which waking a helper costs more than it saves

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef float UnalignedVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
inline Vec splat(float x) { return Vec{} + x; }

// 0 .. W - 1 as template arguments; the compilers' own builtins, so that no C++ library is needed, not even its headers
template <typename T, T... I>
struct Integers {};
template <int N>
struct Counting {
#if defined(__clang__)
    using Type = __make_integer_seq<Integers, int, N>;
#else
    using Type = Integers<int, __integer_pack(N)...>;
#endif
};
using Lanes = Counting<W>::Type;

template <int... I>
inline IVec make_lanes(Integers<int, I...>) {
    return IVec{I...};
}

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

// ---- softmax

// 2**x for x <= 0, relative error below 2e-7; at least 2**-126. Cody-Waite: 2**x = 2**n * 2**f, |f| <= 1/2, series of exp(f ln 2).
inline Vec exp2_nonpositive(Vec x) {
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to the nearest integer
    const Vec shifted = x + magic;
    const Vec f = x - (shifted - magic);
    Vec p = splat(1.5403530393381608e-4f);
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910071e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    IVec bits, power;
    memcpy(&power, &shifted, sizeof power);
    memcpy(&bits, &p, sizeof bits);
    bits += power << 23;  // the low 9 bits of `shifted` are n modulo 512, the others are shifted out
    Vec result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

inline float largest(Vec x) {
    float best = x[0];
    for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
    return best;
}

inline float total(Vec x) {
    float sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
}

// The running softmax of one (query, head): weights are relative to 2**peak.
struct Row {
    float peak;
    Vec weight;          // sum of the weights, by lane
    float* weighted_sum;  // [D]
};

inline void clear(Row& row, int dim) {
    row.peak = -__builtin_inff();
    row.weight = splat(0.0f);
    memset(row.weighted_sum, 0, sizeof(float) * dim);
}

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

// Adds a later segment's softmax to an earlier one's.
__attribute__((noinline)) void merge(Row& into, const Row& from, int dim) {
    const float peak = from.peak > into.peak ? from.peak : into.peak;
    const float old_factor = exp2_nonpositive(splat(into.peak - peak))[0], new_factor = exp2_nonpositive(splat(from.peak - peak))[0];
    into.peak = peak;
    into.weight = into.weight * old_factor + from.weight * new_factor;
    for (int d = 0; d < dim; d += W) {
        const Vec old_part = load(into.weighted_sum + d) * old_factor;
        store(into.weighted_sum + d, load(from.weighted_sum + d) * new_factor + old_part);
    }
}

// ---- formats

inline float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

inline uint16_t narrow(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);  // NaN stays NaN
}

inline void read(float* to, const void* from, DType dtype, int64_t offset, int64_t count) {
    if (dtype == FLOAT32) {
        memcpy(to, static_cast<const float*>(from) + offset, sizeof(float) * count);
    } else {
        const uint16_t* half = static_cast<const uint16_t*>(from) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = widen(half[i]);
    }
}

inline void write(void* to, DType dtype, int64_t offset, const float* from, int64_t count) {
    if (dtype == FLOAT32) {
        memcpy(static_cast<float*>(to) + offset, from, sizeof(float) * count);
    } else {
        uint16_t* half = static_cast<uint16_t*>(to) + offset;
        for (int64_t i = 0; i < count; i++) half[i] = narrow(from[i]);
    }
}

// ---- units of work

struct Job {
    const void *q, *k_cache, *v_cache;
    void* out;
    DType q_dtype, kv_dtype;
    int64_t q_stride;  // elements between two tokens of q; out is contiguous
    const int32_t *query_start, *context_len, *block_tables;
    int64_t table_stride;
    int64_t num_seqs, num_heads, num_kv_heads, block_size;
    int dim;
    float scale;

    bool is_split;            // segments are units of their own, and `partials` takes what they find
    int64_t* first_unit;      // [num_seqs + 1]
    int64_t* first_partial;   // [num_seqs + 1]
    float* partials;          // per (sequence, segment, query, head): D sums, W weights, the peak
    int64_t next;             // the next unit to be taken, atomically
    int64_t next_merge;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t tile_queries() const { return MAX_ROWS / group() > 1 ? MAX_ROWS / group() : 1; }
    int64_t num_queries(int64_t seq) const { return query_start[seq + 1] - query_start[seq]; }
    int64_t num_tiles(int64_t seq) const { return (num_queries(seq) + tile_queries() - 1) / tile_queries(); }
    int64_t num_segments(int64_t seq) const { return (context_len[seq] + SEGMENT - 1) / SEGMENT; }
    int64_t num_spans(int64_t seq) const { return is_split ? num_segments(seq) : 1; }
    int64_t partial_size() const { return dim + W + 1; }
    float* partial(int64_t seq, int64_t segment, int64_t query, int64_t head) const {
        return partials + (first_partial[seq] + (segment * num_queries(seq) + query) * num_heads + head) * partial_size();
    }
};

// Where the keys (values) of a chunk are: in the cache itself where its layout allows, else copied to `scratch` as float32.
template <int D>
void locate(const Job& job, const void* cache, int64_t seq, int64_t kv_head, int64_t start, int64_t end, float* scratch, const float** tiles) {
    const int32_t* table = job.block_tables + seq * job.table_stride;
    const int64_t size = job.block_size;
    const auto offset = [&](int64_t position) { return ((table[position / size] * job.num_kv_heads + kv_head) * size + position % size) * D; };
    if (job.kv_dtype == FLOAT32 && size % W == 0) {
        for (int64_t position = start; position < end; position += W) tiles[(position - start) / W] = static_cast<const float*>(cache) + offset(position);
        return;
    }
    for (int64_t position = start; position < end;) {
        const int64_t in_block = size - position % size, count = in_block < end - position ? in_block : end - position;
        read(scratch + (position - start) * D, cache, job.kv_dtype, offset(position), count * D);
        position += count;
    }
    // the last tile is scored as a whole
    const int64_t rest = (W - (end - start) % W) % W;
    memset(scratch + (end - start) * D, 0, sizeof(float) * rest * D);
    for (int64_t i = 0; i * W < end - start; i++) tiles[i] = scratch + i * W * D;
}

void finish(const Job& job, const Row& row, int64_t token, int64_t head) {
    alignas(64) float result[MAX_DIM];
    const float inverse = 1.0f / total(row.weight);
    for (int d = 0; d < job.dim; d += W) store(result + d, load(row.weighted_sum + d) * inverse);
    write(job.out, job.q_dtype, (token * job.num_heads + head) * job.dim, result, job.dim);
}

void keep_partial(const Job& job, const Row& row, float* partial) {
    memcpy(partial, row.weighted_sum, sizeof(float) * job.dim);
    store(partial + job.dim, row.weight);
    partial[job.dim + W] = row.peak;
}

Row read_partial(const Job& job, float* partial) { return Row{partial[job.dim + W], load(partial + job.dim), partial}; }

template <int D>
struct Scratch {
    alignas(64) float q[MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS][D];
    alignas(64) float sums[MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS][D];
    alignas(64) float segment_sum[MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS][D];
    alignas(64) float keys[CHUNK * D], values[CHUNK * D];
    Row rows[MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS];
    Row segment_rows[MAX_GROUP > MAX_ROWS ? MAX_GROUP : MAX_ROWS];
};

template <int D>
void run_unit(const Job& job, int64_t unit, Scratch<D>& scratch) {
    // which
    int64_t seq = 0;
    while (job.first_unit[seq + 1] <= unit) seq++;
    int64_t index = unit - job.first_unit[seq];
    const int64_t kv_head = index % job.num_kv_heads;
    index /= job.num_kv_heads;
    const int64_t tile = index % job.num_tiles(seq), span = index / job.num_tiles(seq);

    // queries of the tile, in the base-2 softmax's units
    const int64_t group = job.group(), first_query = tile * job.tile_queries();
    const int64_t left = job.num_queries(seq) - first_query, num_queries = left < job.tile_queries() ? left : job.tile_queries();
    const int64_t num_rows = num_queries * group, first_token = job.query_start[seq] + first_query;
    const float scale = job.scale * 1.4426950408889634f;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t token = first_token + r / group, head = kv_head * group + r % group;
        read(scratch.q[r], job.q, job.q_dtype, token * job.q_stride + head * D, D);
        for (int d = 0; d < D; d++) scratch.q[r][d] *= scale;
        scratch.rows[r].weighted_sum = scratch.sums[r];
        scratch.segment_rows[r].weighted_sum = scratch.segment_sum[r];
    }

    // the walk
    const int64_t first_visible = job.context_len[seq] - job.num_queries(seq) + first_query + 1;  // positions the first query sees
    const int64_t longest = first_visible + num_queries - 1;
    const int64_t begin = job.is_split ? span * SEGMENT : 0;
    const int64_t end = job.is_split && begin + SEGMENT < longest ? begin + SEGMENT : longest;
    for (int64_t segment = begin; segment < end; segment += SEGMENT) {
        Row* rows = segment == begin ? scratch.rows : scratch.segment_rows;
        const int64_t segment_end = segment + SEGMENT < end ? segment + SEGMENT : end;
        for (int64_t r = 0; r < num_rows; r++) clear(rows[r], D);
        for (int64_t start = segment; start < segment_end; start += CHUNK) {
            const int64_t stop = start + CHUNK < segment_end ? start + CHUNK : segment_end;
            Chunk chunk;
            locate<D>(job, job.k_cache, seq, kv_head, start, stop, scratch.keys, chunk.keys);
            locate<D>(job, job.v_cache, seq, kv_head, start, stop, scratch.values, chunk.values);
            for (int64_t r = 0; r < num_rows; r++) {
                const int64_t visible = first_visible + r / group - start;
                if (visible > 0) absorb<D>(rows[r], scratch.q[r], chunk, static_cast<int>(visible < stop - start ? visible : stop - start));
            }
        }
        if (segment == begin) continue;
        for (int64_t r = 0; r < num_rows; r++)
            if (first_visible + r / group > segment) merge(scratch.rows[r], scratch.segment_rows[r], D);
    }

    // the result
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t query = r / group, head = kv_head * group + r % group;
        if (!job.is_split)
            finish(job, scratch.rows[r], first_token + query, head);
        else if (first_visible + query > begin)
            keep_partial(job, scratch.rows[r], job.partial(seq, span, first_query + query, head));
    }
}

void merge_query(const Job& job, int64_t token) {
    int64_t seq = 0;
    while (job.query_start[seq + 1] <= token) seq++;
    const int64_t query = token - job.query_start[seq];
    const int64_t visible = job.context_len[seq] - job.num_queries(seq) + query + 1;
    for (int64_t head = 0; head < job.num_heads; head++) {
        Row row = read_partial(job, job.partial(seq, 0, query, head));
        for (int64_t segment = 1; segment * SEGMENT < visible; segment++)
            merge(row, read_partial(job, job.partial(seq, segment, query, head)), job.dim);
        finish(job, row, token, head);
    }
}

template <int D>
void take_units(Job& job) {
    Scratch<D> scratch;
    const int64_t num_units = job.first_unit[job.num_seqs];
    for (int64_t unit; (unit = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < num_units;) run_unit<D>(job, unit, scratch);
}

using Work = void (*)(Job&);

Work work_for(int dim) {
    switch (dim) {
        case 16: return take_units<16>;
        case 32: return take_units<32>;
        case 48: return take_units<48>;
        case 64: return take_units<64>;
        case 80: return take_units<80>;
        case 96: return take_units<96>;
        case 128: return take_units<128>;
        case 192: return take_units<192>;
        case 256: return take_units<256>;
        default: return nullptr;
    }
}

// ---- threads: helpers sleep on a condition and join a job that still wants them; the caller works too and waits only for those who joined,
// so a job never depends on a helper (after a fork there are none).

struct Pool {
    pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;  // held by the caller whose job it is
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    Job* job = nullptr;
    Work work = nullptr;
    int wanted = 0, active = 0, num_helpers = 0;
};

Pool pool;

void* help(void*) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        pool.active++;
        Job* job = pool.job;
        const Work work = pool.work;
        pthread_mutex_unlock(&pool.lock);
        work(*job);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0) pthread_cond_signal(&pool.done);
    }
    return nullptr;
}

void start_helpers(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 2 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.num_helpers < count && pthread_create(&thread, &attributes, help, nullptr) == 0) pool.num_helpers++;
    pthread_attr_destroy(&attributes);
}

void run(Job& job, Work work, int threads) {
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        work(job);
        return;
    }
    start_helpers(threads - 1 < MAX_THREADS ? threads - 1 : MAX_THREADS);
    pthread_mutex_lock(&pool.lock);
    pool.job = &job;
    pool.work = work;
    pool.wanted = threads - 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(job);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0;
    while (pool.active > 0) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}

// Fills in the units; returns the multiply-adds of the whole job.
double plan(Job& job, int threads) {
    double work = 0;
    int64_t units = 0, partials = 0;
    job.is_split = false;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) {
        units += job.num_tiles(seq) * job.num_kv_heads;
        work += 2.0 * job.num_queries(seq) * job.context_len[seq] * job.num_heads * job.dim;
    }
    job.is_split = units < 4 * threads && threads > 1;
    units = 0;
    for (int64_t seq = 0; seq < job.num_seqs; seq++) {
        job.first_unit[seq] = units;
        job.first_partial[seq] = partials;
        units += job.num_tiles(seq) * job.num_kv_heads * job.num_spans(seq);
        partials += job.num_spans(seq) * job.num_queries(seq) * job.num_heads;
    }
    job.first_unit[job.num_seqs] = units;
    job.first_partial[job.num_seqs] = partials;
    return work;
}

}  // namespace

extern "C" {

// Changes with every signature below.
int32_t penstock_kernels_abi() { return 1; }

int32_t penstock_supports(int64_t head_dim, int64_t group) { return work_for(static_cast<int>(head_dim)) != nullptr && group <= MAX_GROUP; }

// k, v: [num_tokens, num_kv_heads, head_dim], `stride` elements from token to token. slots: [num_tokens] block * block_size + offset.
void penstock_write_kv(const void* k, const void* v, int32_t dtype, int64_t k_stride, int64_t v_stride, void* k_cache, void* v_cache,
                       int32_t kv_dtype, const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, int64_t dim) {
    float row[MAX_DIM];
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t to = ((block * num_kv_heads + head) * block_size + offset) * dim;
            for (int64_t d = 0; d < dim; d += MAX_DIM) {
                const int64_t count = dim - d < MAX_DIM ? dim - d : MAX_DIM;
                read(row, k, static_cast<DType>(dtype), token * k_stride + head * dim + d, count);
                write(k_cache, static_cast<DType>(kv_dtype), to + d, row, count);
                read(row, v, static_cast<DType>(dtype), token * v_stride + head * dim + d, count);
                write(v_cache, static_cast<DType>(kv_dtype), to + d, row, count);
            }
        }
    }
}

// q, out: [num_tokens, num_heads, head_dim]; q with `q_stride` elements from token to token, out contiguous. Returns 0, or 1 without memory,
// 2 for a head_dim or group that penstock_supports denies.
int32_t penstock_attend(const void* q, int32_t q_dtype, int64_t q_stride, void* out, const void* k_cache, const void* v_cache, int32_t kv_dtype,
                        const int32_t* query_start, const int32_t* context_len, const int32_t* block_tables, int64_t table_stride,
                        int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_dim, float scale,
                        int32_t threads) {
    if (!penstock_supports(head_dim, num_heads / num_kv_heads)) return 2;
    Job job = {};
    job.q = q, job.k_cache = k_cache, job.v_cache = v_cache, job.out = out;
    job.q_dtype = static_cast<DType>(q_dtype), job.kv_dtype = static_cast<DType>(kv_dtype), job.q_stride = q_stride;
    job.query_start = query_start, job.context_len = context_len, job.block_tables = block_tables, job.table_stride = table_stride;
    job.num_seqs = num_seqs, job.num_heads = num_heads, job.num_kv_heads = num_kv_heads, job.block_size = block_size;
    job.dim = static_cast<int>(head_dim), job.scale = scale;
    job.first_unit = static_cast<int64_t*>(malloc(sizeof(int64_t) * 2 * (num_seqs + 1)));
    if (job.first_unit == nullptr) return 1;
    job.first_partial = job.first_unit + num_seqs + 1;

    const double work = plan(job, threads);
    if (job.is_split) {
        job.partials = static_cast<float*>(malloc(sizeof(float) * job.first_partial[num_seqs] * job.partial_size()));
        if (job.partials == nullptr) {
            free(job.first_unit);
            return 1;
        }
    }
    run(job, work_for(job.dim), work < ONE_THREAD_WORK ? 1 : threads);
    if (job.is_split)
        for (int64_t token = 0; token < query_start[num_seqs]; token++) merge_query(job, token);
    free(job.partials);
    free(job.first_unit);
    return 0;
}
}
