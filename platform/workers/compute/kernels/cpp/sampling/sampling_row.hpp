// A row's choice in vectors of PENSTOCK_LANES doubles (sampling_vectors.hpp); each level's file includes this once.

#include "base/numbers.hpp"
#include "sampling/sampling.hpp"
#include "sampling/sampling_vectors.hpp"

namespace penstock {
namespace PENSTOCK_LEVEL {

constexpr float NOTHING = -__builtin_inff();

// Elements [begin, begin + BLOCK) of a row that has `size`, padded behind its end by what is never chosen.
PENSTOCK_ALWAYS const float* block_at(const float* row, int64_t begin, int64_t size, float* padded) {
    if (begin + BLOCK <= size) return row + begin;
    for (int64_t i = 0; i < BLOCK; i++) padded[i] = begin + i < size ? row[begin + i] : NOTHING;
    return padded;
}

PENSTOCK_ALWAYS bool has_at_least(const float* block, float least) {
    I32 found = {};
    for (int64_t i = 0; i < BLOCK; i += N) found |= load(block + i) >= F{} + least;
    return is_any(found);
}

// The largest of a row; NaN where one is NaN.
inline float largest(const float* row, int64_t size) {
    constexpr int CHAINS = 4;
    F best[CHAINS];
    I32 is_nan = {};
    for (F& part : best) part = F{} + NOTHING;
    float padded[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const float* block = block_at(row, begin, size, padded);
        for (int64_t i = 0; i < BLOCK; i += CHAINS * N)
            for (int c = 0; c < CHAINS; c++) {
                const F x = load(block + i + c * N);
                best[c] = x > best[c] ? x : best[c];
                is_nan |= x != x;
            }
    }
    if (is_any(is_nan)) return __builtin_nanf("");
    float result = NOTHING;
    for (const F& part : best)
        for (int i = 0; i < N; i++) result = part[i] > result ? part[i] : result;
    return result;
}

// The first place of a value, which is the largest that is there.
inline int64_t place_of(const float* row, int64_t size, float value) {
    float padded[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const float* block = block_at(row, begin, size, padded);
        if (!has_at_least(block, value)) continue;
        for (int64_t i = 0; i < BLOCK; i++)
            if (block[i] == value) return begin + i;
    }
    return -1;
}

// A row's scores, relative to the best, by the temperature; padded.
struct Scaled {
    float* scores;
    float* most;   // the largest of each block
    int64_t size;  // a multiple of BLOCK
};

PENSTOCK_ALWAYS float largest_lane(F x) {
    float result = NOTHING;
    for (int i = 0; i < N; i++) result = x[i] > result ? x[i] : result;
    return result;
}

inline void scale(const float* row, int64_t vocab, float best, float temperature, const Scaled& scaled) {
    float padded[BLOCK];
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        const float* block = block_at(row, begin, vocab, padded);
        F most = F{} + NOTHING;
        for (int64_t i = 0; i < BLOCK; i += N) {
            const F x = (load(block + i) - best) / (F{} + temperature);
            store(scaled.scores + begin + i, x);
            most = x > most ? x : most;
        }
        scaled.most[begin / BLOCK] = largest_lane(most);
    }
}

inline float larger_of(float a, float b) { return a > b ? a : b; }

// ---- what top_k and top_p leave

// Scores above `least`, and those that equal it up to id `last`.
struct Cut {
    float least;
    int64_t last;
};

constexpr int BUCKETS_OF_ONE = 64, NUM_BUCKETS = 32 * BUCKETS_OF_ONE + 1;  // of scores from 0 down to -32, and one for all below
constexpr int ROUND_BITS = 8;

constexpr float NEARBY = -8.0f;  // where the likely tokens are in few blocks, buckets down to it are filled first, and mostly suffice
constexpr int64_t NEAR_BUCKETS = 8 * BUCKETS_OF_ONE;
constexpr float WEIGHTLESS = -32.0f;  // weights are 0 from exp(-31.2) on

// Weights of N scores; those below `least` weigh nothing. IS_COUNT: all others weigh 1.
template <bool IS_COUNT>
PENSTOCK_ALWAYS I64 weigh_scores(F x, float least) {
    const I64 is_kept = __builtin_convertvector(x >= F{} + least, I64);
    return (IS_COUNT ? I64{} + 1 : weigh(widen(x))) & is_kept;
}

// Adds the weights of a row to the buckets of their scores, and returns their sum; is_all: else only of blocks that have a score nearby, and a count's sum is
// of these.
template <bool IS_COUNT>
inline int64_t fill_buckets(const Scaled& scaled, float least, bool is_all, int64_t* sums) {
    I64 all = {};
    for (int64_t begin = 0; begin < scaled.size; begin += BLOCK) {
        const float *block = scaled.scores + begin, most = scaled.most[begin / BLOCK];
        const bool is_filled = is_all || most >= NEARBY;
        if (most < least || (!is_filled && (IS_COUNT || most < WEIGHTLESS))) continue;
        int64_t weights[BLOCK];
        for (int64_t i = 0; i < BLOCK; i += N) {
            const I64 own = weigh_scores<IS_COUNT>(load(block + i), least);
            *reinterpret_cast<UnalignedI64*>(weights + i) = own;
            all += own;
        }
        if (!is_filled) continue;
        int32_t buckets[BLOCK];
        for (int64_t i = 0; i < BLOCK; i += N) {
            const F x = load(block + i), bounded = x > F{} - 32.0f ? x : F{} - 32.0f;
            *reinterpret_cast<UnalignedI32*>(buckets + i) = __builtin_convertvector(bounded * -static_cast<float>(BUCKETS_OF_ONE), I32);
        }
        for (int64_t i = 0; i < BLOCK; i++) sums[buckets[i]] += weights[i];
    }
    int64_t total = 0;
    for (int i = 0; i < N; i++) total += all[i];
    return total;
}

inline bool is_spread(const Scaled& scaled) {
    int64_t nearby = 0;
    for (int64_t block = 0; block < scaled.size / BLOCK; block++) nearby += scaled.most[block] >= NEARBY;
    return 4 * nearby > scaled.size / BLOCK;
}

struct Sums {
    int64_t before;  // of what comes first
    int64_t bucket;
};

// The bucket where the sum, `before` at first, reaches the target.
inline Sums reach(const int64_t* sums, int64_t before, int64_t target) {
    int64_t bucket = 0;
    while (before + sums[bucket] < target) before += sums[bucket++];
    return {before, bucket};
}

// Where the sum over entries, which are by id and at least target - before together, reaches the target in the order of scores.
inline Cut reach_among(Entry* entries, int64_t count, int64_t before, int64_t target) {
    for (;;) {
        uint32_t low = UINT32_MAX, high = 0;
        for (int64_t i = 0; i < count; i++) {
            low = entries[i].key < low ? entries[i].key : low;
            high = entries[i].key > high ? entries[i].key : high;
        }
        if (low == high) break;
        int shift = 0;
        while ((high - low) >> shift >= 1u << ROUND_BITS) shift++;
        int64_t sums[1 << ROUND_BITS] = {};
        for (int64_t i = 0; i < count; i++) sums[(entries[i].key - low) >> shift] += entries[i].weight;
        const Sums found = reach(sums, before, target);
        int64_t num_left = 0;
        for (int64_t i = 0; i < count; i++)
            if ((entries[i].key - low) >> shift == static_cast<uint32_t>(found.bucket)) entries[num_left++] = entries[i];
        before = found.before, count = num_left;
    }
    int64_t place = 0;
    while (before + entries[place].weight < target) before += entries[place++].weight;
    return {-from_bits(entries[place].key), entries[place].id};
}

inline int64_t nucleus_weight(int64_t total, double top_p) {
    const double wanted = static_cast<double>(total) * top_p;
    const int64_t whole = static_cast<int64_t>(wanted);
    return larger(1, smaller(total, whole + (static_cast<double>(whole) < wanted)));
}

// Bounds of a bucket's scores, both in it.
inline float highest_of(int64_t bucket) { return -static_cast<float>(bucket) / BUCKETS_OF_ONE; }
inline float lowest_of(int64_t bucket) {
    if (bucket == NUM_BUCKETS - 1) return NOTHING;
    return -from_bits(bits_of(-highest_of(bucket + 1)) - 1);  // the number next to it, towards 0
}

// Entries of the scores from `low` to `high`, by id; returns how many.
template <bool IS_COUNT>
inline int64_t collect(const Scaled& scaled, float low, float high, Entry* entries) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < scaled.size; begin += BLOCK) {
        if (scaled.most[begin / BLOCK] < low) continue;
        for (int64_t i = begin; i < begin + BLOCK; i += N) {
            const F x = load(scaled.scores + i);
            const I32 found = (x >= F{} + low) & (x <= F{} + high);
            if (!is_any(found)) continue;
            const I64 weights = IS_COUNT ? I64{} + 1 : weigh(widen(x));
            for (int lane = 0; lane < N; lane++) {
                entries[count] = {bits_of(x[lane]) & 0x7FFFFFFF, static_cast<uint32_t>(i + lane), weights[lane]};
                count += found[lane] != 0;
            }
        }
    }
    return count;
}

// The cut behind which the count, or the weight, of the scores from `least` on reaches its target: top_k, or the share top_p of all weight.
template <bool IS_COUNT>
inline Cut find_cut(const Scaled& scaled, float least, int64_t top_k, double top_p, Entry* entries) {
    const bool is_all = is_spread(scaled);
    int64_t sums[NUM_BUCKETS] = {}, nearby = 0;
    const int64_t total = fill_buckets<IS_COUNT>(scaled, least, is_all, sums), target = IS_COUNT ? top_k : nucleus_weight(total, top_p);
    for (int64_t bucket = 0; bucket < NEAR_BUCKETS; bucket++) nearby += sums[bucket];
    if (nearby < target && !is_all) {
        memset(sums, 0, sizeof sums);
        fill_buckets<IS_COUNT>(scaled, least, true, sums);
    }
    const Sums found = reach(sums, 0, target);

    const int64_t count = collect<IS_COUNT>(scaled, larger_of(least, lowest_of(found.bucket)), highest_of(found.bucket), entries);
    return reach_among(entries, count, found.before, target);
}

inline Cut find_kept(const ChoiceRow& row, const Scaled& scaled, int64_t vocab, Entry* entries) {
    Cut cut = {NOTHING, INT64_MAX};
    if (0 < row.top_k && row.top_k < vocab) cut.least = find_cut<true>(scaled, NOTHING, row.top_k, 0, entries).least;
    if (row.top_p < 1) cut = find_cut<false>(scaled, cut.least, 0, row.top_p, entries);
    if (row.least > cut.least) cut = {row.least, INT64_MAX};
    return cut;
}

// ---- the best of score and noise, part by part

// N ids, or the `count` that are left.
PENSTOCK_ALWAYS U64 load_ids(const int64_t* ids, int64_t count) {
    U64 found = {};
    if (count >= N)
        memcpy(&found, ids, sizeof found);
    else
        memcpy(&found, ids, static_cast<size_t>(count) * sizeof(int64_t));
    return found;
}

// Where the noise of N places from `place` on begins, `count` of them or more being left. step: [0, N) times GAMMA.
template <bool HAS_IDS>
PENSTOCK_ALWAYS U64 counters(U64 step, uint64_t stream, const int64_t* ids, int64_t place, int64_t count) {
    if (HAS_IDS) return load_ids(ids + place, count) * GAMMA + stream;
    return step + (stream + static_cast<uint64_t>(place) * GAMMA);
}

PENSTOCK_ALWAYS U64 first_steps() {
    U64 step;
    for (int i = 0; i < N; i++) step[i] = static_cast<uint64_t>(i) * GAMMA;
    return step;
}

// Far above what rounding does to a sum whose token is chosen: its score is above -41, which float32 rounds by 5e-6 at the most. Beyond 2**36, where the sums
// of doubles are rounded by more, a logit that is less by its last bit is less by more than all noise, and among equal ones noise decides.
constexpr double NEAR = 2e-4;

inline void take_near(PartDraw& draw, const NearBest& found) {
    if (found.sum - NEAR > draw.bound) {
        draw.bound = found.sum - NEAR;
        int64_t left = 0;
        for (int64_t i = 0; i < draw.count; i++)
            if (draw.near[i].sum >= draw.bound) draw.near[left++] = draw.near[i];
        draw.count = left;
    }
    if (draw.count < MOST_NEAR) {
        draw.near[draw.count++] = found;
        return;
    }
    const auto is_less = [](const NearBest& a, const NearBest& b) { return a.sum < b.sum || (a.sum == b.sum && a.noise < b.noise); };
    NearBest* least = draw.near;
    for (NearBest& near : draw.near) least = is_less(near, *least) ? &near : least;
    if (is_less(*least, found)) *least = found;
}

PENSTOCK_ALWAYS float largest_of_block(const float* block) {
    F most = load(block);
    for (int64_t i = N; i < BLOCK; i += N) {
        const F x = load(block + i);
        most = x > most ? x : most;
    }
    return largest_lane(most);
}

// Hashes, as far as begin_mix makes them, below which noise is too little for a sum to reach the bound, of logits up to `most`: 1 - uniform must be below a power
// of two. NaN: none is.
inline uint64_t least_hash(const PartDraw& draw, float most) {
    constexpr double CHORDS = 0.1, ROUNDED = 0x1p36;  // see least_log2, and NEAR
    const double room = static_cast<double>(most) * draw.scale - draw.bound + CHORDS;
    if (!(room < 0 && -ROUNDED < draw.bound && draw.bound < ROUNDED)) return 0;
    const int64_t shift = room > -LAST_SHIFT + 1 ? 64 + static_cast<int64_t>(room) : 64 - LAST_SHIFT + 1;
    return shift == 64 ? 0 : ~0ULL << shift;
}

template <bool HAS_IDS>
inline void take_part_of(PartDraw& draw, const float* logits, int64_t size, int64_t first) {
    const U64 step = first_steps();
    float padded[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const float* block = block_at(logits, begin, size, padded);
        const int64_t count = smaller(BLOCK, size - begin), vectors = HAS_IDS ? (count + N - 1) / N : BLOCK / N;
        const uint64_t least = least_hash(draw, largest_of_block(block));
        U64 hashes[BLOCK / N];
        I64 any = {};
        for (int64_t i = 0; i < vectors; i++) {
            hashes[i] = begin_mix(counters<HAS_IDS>(step, draw.stream, draw.ids, first + begin + i * N, count - i * N));
            any |= hashes[i] >= U64{} + least;
        }
        if (!is_any(any)) continue;
        for (int64_t i = 0; i < vectors; i++) {
            const I64 found = widen(load(block + i * N)) * draw.scale - least_log2<D>(end_mix(hashes[i])) >= D{} + draw.bound;
            if (!is_any(found)) continue;
            for (int64_t lane = 0; lane < N; lane++) {
                if (!found[lane]) continue;
                const float logit = block[i * N + lane];
                const double noise = gumbel(end_mix(hashes[i][lane])), sum = static_cast<double>(logit) * draw.scale + noise * LOG2_E;
                if (sum >= draw.bound) take_near(draw, {sum, noise, logit, first + begin + i * N + lane});
            }
        }
    }
}

void take_part(PartDraw& draw, const float* logits, int64_t size, int64_t first) {
    draw.ids == nullptr ? take_part_of<false>(draw, logits, size, first) : take_part_of<true>(draw, logits, size, first);
}

// ---- the best of score and noise among what a cut leaves

// Score and noise of the best place so far, and the least upper bound, in units of ln 2, of one that may be better.
struct Best {
    double score;
    int64_t place;
    double bound;
};

constexpr double SLACK = 1e-6;  // far above what rounding does to a bound

template <bool HAS_IDS>
inline void take_if_better(Best& best, const ChoiceRow& row, float scaled, int64_t place) {
    const uint64_t bits = mix(row.stream + static_cast<uint64_t>(HAS_IDS ? row.ids[place] : place) * GAMMA);
    if (static_cast<double>(scaled) * LOG2_E - least_log2<double>(bits) < best.bound) return;
    const double score = static_cast<double>(scaled) + gumbel(bits);
    if (score > best.score || (score == best.score && place < best.place)) best = {score, place, score * LOG2_E - SLACK};
}

// HAS_IDS: whether the row has some tokens alone, and says which.
template <bool HAS_IDS>
inline int64_t draw(const ChoiceRow& row, const Scaled& scaled, int64_t vocab, Cut cut) {
    constexpr double MOST_NOISE = 38.0;  // -log(2**-53) is 36.8
    Best best = {-__builtin_inf(), 0, -__builtin_inf()};
    int64_t block_of_best = 0;
    while (scaled.most[block_of_best] != 0) block_of_best++;
    take_if_better<HAS_IDS>(best, row, 0.0f, block_of_best * BLOCK + place_of(scaled.scores + block_of_best * BLOCK, BLOCK, 0.0f));
    const U64 step = first_steps();
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        const float* block = scaled.scores + begin;
        const float least = static_cast<float>(best.score - MOST_NOISE);
        if (scaled.most[begin / BLOCK] < larger_of(cut.least, least)) continue;
        const int64_t size = HAS_IDS ? smaller(BLOCK, vocab - begin) : BLOCK;
        I64 found = {};
        for (int64_t i = 0; i < size; i += N) {
            const U64 bits = mix(counters<HAS_IDS>(step, row.stream, row.ids, begin + i, size - i));
            const F x = load(block + i);
            found |= (widen(x) * LOG2_E - least_log2<D>(bits) >= D{} + best.bound) & __builtin_convertvector(x >= F{} + cut.least, I64);
        }
        if (!is_any(found)) continue;
        for (int64_t i = 0; i < size; i++)
            if (block[i] > cut.least || (block[i] == cut.least && begin + i <= cut.last)) take_if_better<HAS_IDS>(best, row, block[i], begin + i);
    }
    return best.place;
}

// ---- log probabilities

inline int64_t total_weight(const float* raw, int64_t vocab, float best) {
    I64 total = {};
    float padded[BLOCK];
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        const float* block = block_at(raw, begin, vocab, padded);
        for (int64_t i = 0; i < BLOCK; i += N) total += weigh(widen(load(block + i)) - static_cast<double>(best));
    }
    int64_t sum = 0;
    for (int i = 0; i < N; i++) sum += total[i];
    return sum;
}

inline void find_likeliest(const float* raw, int64_t vocab, int64_t num_top, int64_t* ids) {
    int64_t count = 0;
    float padded[BLOCK];
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        const float* block = block_at(raw, begin, vocab, padded);
        if (count == num_top && !has_at_least(block, raw[ids[count - 1]])) continue;
        for (int64_t token = begin; token < smaller(vocab, begin + BLOCK); token++) {
            if (count == num_top && !(raw[token] > raw[ids[count - 1]])) continue;
            int64_t place = count < num_top ? count++ : count - 1;
            for (; place > 0 && raw[token] > raw[ids[place - 1]]; place--) ids[place] = ids[place - 1];
            ids[place] = token;
        }
    }
}

void choose_row(ChoiceRow& row, int64_t vocab, void* scratch) {
    const int64_t size = padded_vocab(vocab);
    Entry* entries = static_cast<Entry*>(scratch);
    const Scaled scaled = {reinterpret_cast<float*>(entries + size), reinterpret_cast<float*>(entries + size) + size, size};
    row.token = -1;
    const float best = largest(row.logits, vocab);
    row.raw_best = row.num_top < 0 || row.raw == row.logits ? best : largest(row.raw, vocab);
    if (!(__builtin_isfinite(best) && __builtin_isfinite(row.raw_best))) return;
    if (row.temperature == 0) {
        row.token = place_of(row.logits, vocab, best);
    } else if (is_drawn_from_all(row)) {
        PartDraw drawn;
        begin_draw(drawn, row);
        take_part(drawn, row.logits, vocab, 0);
        row.token = end_draw(&drawn, 1, 1, best);
    } else {
        scale(row.logits, vocab, best, row.temperature, scaled);
        const Cut cut = find_kept(row, scaled, vocab, entries);
        row.token = row.ids == nullptr ? draw<false>(row, scaled, vocab, cut) : draw<true>(row, scaled, vocab, cut);
    }
    if (row.num_top < 0) return;
    row.weight = total_weight(row.raw, vocab, row.raw_best);
    if (row.num_top > 0) find_likeliest(row.raw, vocab, row.num_top, row.top_ids);
}

}  // namespace PENSTOCK_LEVEL
}  // namespace penstock
