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

// Relative to the best, by the temperature; padded.
inline void scale(const float* row, int64_t size, float best, float temperature, float* scaled) {
    float padded[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const float* block = block_at(row, begin, size, padded);
        for (int64_t i = 0; i < BLOCK; i += N) store(scaled + begin + i, (load(block + i) - best) / (F{} + temperature));
    }
}

// ---- what top_k and top_p leave

// Scores above `least`, and those that equal it up to id `last`.
struct Cut {
    float least;
    int64_t last;
};

constexpr int BUCKETS_OF_ONE = 64, NUM_BUCKETS = 32 * BUCKETS_OF_ONE + 1;  // of scores from 0 down to -32, and one for all below
constexpr int ROUND_BITS = 8;

// Buckets and weights of a block; elements below `least` weigh nothing. IS_COUNT: all others weigh 1.
template <bool IS_COUNT>
PENSTOCK_ALWAYS void weigh_block(const float* block, float least, int32_t* buckets, int64_t* weights) {
    for (int64_t i = 0; i < BLOCK; i += N) {
        const F x = load(block + i), bounded = x > F{} - 32.0f ? x : F{} - 32.0f;
        *reinterpret_cast<UnalignedI32*>(buckets + i) = __builtin_convertvector(bounded * -static_cast<float>(BUCKETS_OF_ONE), I32);
        const I64 is_kept = __builtin_convertvector(x >= F{} + least, I64);
        *reinterpret_cast<UnalignedI64*>(weights + i) = (IS_COUNT ? I64{} + 1 : weigh(widen(x))) & is_kept;
    }
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

inline float larger_of(float a, float b) { return a > b ? a : b; }

// Bounds of a bucket's scores, both in it.
inline float highest_of(int64_t bucket) { return -static_cast<float>(bucket) / BUCKETS_OF_ONE; }
inline float lowest_of(int64_t bucket) {
    if (bucket == NUM_BUCKETS - 1) return NOTHING;
    return -from_bits(bits_of(-highest_of(bucket + 1)) - 1);  // the number next to it, towards 0
}

// Entries of the scores from `low` to `high`, by id; returns how many.
template <bool IS_COUNT>
inline int64_t collect(const float* scaled, int64_t size, float low, float high, Entry* entries) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        I32 found[BLOCK / N], all = {};
        for (int i = 0; i < BLOCK / N; i++) {
            const F x = load(scaled + begin + i * N);
            all |= found[i] = (x >= F{} + low) & (x <= F{} + high);
        }
        if (!is_any(all)) continue;
        for (int i = 0; i < BLOCK / N; i++) {
            if (!is_any(found[i])) continue;
            const F x = load(scaled + begin + i * N);
            const I64 weights = IS_COUNT ? I64{} + 1 : weigh(widen(x));
            for (int lane = 0; lane < N; lane++) {
                entries[count] = {bits_of(x[lane]) & 0x7FFFFFFF, static_cast<uint32_t>(begin + i * N + lane), weights[lane]};
                count += found[i][lane] != 0;
            }
        }
    }
    return count;
}

// The cut behind which the count, or the weight, of the scores from `least` on reaches its target: top_k, or the share top_p of all weight.
template <bool IS_COUNT>
inline Cut find_cut(const float* scaled, int64_t size, float least, int64_t top_k, double top_p, Entry* entries) {
    int64_t sums[NUM_BUCKETS] = {}, weights[BLOCK], total = 0;
    int32_t buckets[BLOCK];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        if (!has_at_least(scaled + begin, least)) continue;
        weigh_block<IS_COUNT>(scaled + begin, least, buckets, weights);
        for (int64_t i = 0; i < BLOCK; i++) sums[buckets[i]] += weights[i];
    }
    for (int64_t sum : sums) total += sum;
    const int64_t target = IS_COUNT ? top_k : nucleus_weight(total, top_p);
    const Sums found = reach(sums, 0, target);

    const int64_t count = collect<IS_COUNT>(scaled, size, larger_of(least, lowest_of(found.bucket)), highest_of(found.bucket), entries);
    return reach_among(entries, count, found.before, target);
}

inline Cut find_kept(const ChoiceRow& row, const float* scaled, int64_t vocab, Entry* entries) {
    const int64_t size = padded_vocab(vocab);
    Cut cut = {NOTHING, INT64_MAX};
    if (0 < row.top_k && row.top_k < vocab) cut.least = find_cut<true>(scaled, size, NOTHING, row.top_k, 0, entries).least;
    if (row.top_p < 1) cut = find_cut<false>(scaled, size, cut.least, 0, row.top_p, entries);
    if (row.least > cut.least) cut = {row.least, INT64_MAX};
    return cut;
}

// ---- the best of score and noise

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

// N ids, or the `count` that are left.
PENSTOCK_ALWAYS U64 load_ids(const int64_t* ids, int64_t count) {
    U64 found = {};
    if (count >= N)
        memcpy(&found, ids, sizeof found);
    else
        memcpy(&found, ids, static_cast<size_t>(count) * sizeof(int64_t));
    return found;
}

// HAS_IDS: whether the row has some tokens alone, and says which.
template <bool HAS_IDS>
inline int64_t draw(const ChoiceRow& row, const float* scaled, int64_t vocab, Cut cut) {
    constexpr double MOST_NOISE = 38.0;  // -log(2**-53) is 36.8
    Best best = {-__builtin_inf(), 0, -__builtin_inf()};
    take_if_better<HAS_IDS>(best, row, 0.0f, place_of(scaled, vocab, 0.0f));
    U64 step;
    for (int i = 0; i < N; i++) step[i] = static_cast<uint64_t>(i) * GAMMA;
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        const float* block = scaled + begin;
        const float least = static_cast<float>(best.score - MOST_NOISE);
        if (!has_at_least(block, larger_of(cut.least, least))) continue;
        const int64_t size = HAS_IDS ? smaller(BLOCK, vocab - begin) : BLOCK;
        I64 found = {};
        for (int64_t i = 0; i < size; i += N) {
            const U64 bits = HAS_IDS ? mix(load_ids(row.ids + begin + i, size - i) * GAMMA + row.stream)
                                     : mix(step + (row.stream + static_cast<uint64_t>(begin + i) * GAMMA));
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
    float* scaled = static_cast<float*>(scratch);
    Entry* entries = reinterpret_cast<Entry*>(scaled + padded_vocab(vocab));
    row.token = -1;
    const float best = largest(row.logits, vocab);
    row.raw_best = row.num_top < 0 || row.raw == row.logits ? best : largest(row.raw, vocab);
    if (!(__builtin_isfinite(best) && __builtin_isfinite(row.raw_best))) return;
    if (row.temperature == 0) {
        row.token = place_of(row.logits, vocab, best);
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
