// Rows of float32 between the products of a decoder: norms, RoPE, SwiGLU, the largest element. Each row by itself, in a fixed order.

#pragma once

#include "base/vectors.hpp"

namespace penstock {

// Root mean square norm (Zhang and Sennrich 2019).
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * W) * load(x + i + j * W);
    for (; i + W <= n; i += W) sums[0] += load(x + i) * load(x + i);
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

// Divided by the root of their mean square.
inline void unit_norm(const float* x, int64_t n, float* out) {
    Vec sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int j = 0; j < 2; j++) sums[j] += load(x + i + j * W) * load(x + i + j * W);
    float sum = total(sums[0] + sums[1]);
    for (; i < n; i++) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + 1e-6f);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * factor);
    for (; i < n; i++) out[i] = x[i] * factor;
}

// RoPE (Su et al. 2021), halves form, of one head in place; cos and sin: [dim], the sine's first half negative.
inline void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const Vec low = load(x + i), high = load(x + half + i);
        store(x + i, low * load(cos + i) + high * load(sin + i));
        store(x + half + i, high * load(cos + half + i) + low * load(sin + half + i));
    }
    for (; i < half; i++) {
        const float low = x[i], high = x[half + i];
        x[i] = low * cos[i] + high * sin[i];
        x[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

inline void add(float* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(to + i) + load(from + i));
    for (; i < n; i++) to[i] += from[i];
}

// 1 / (1 + exp(-x)) times x.
inline Vec silu(Vec x) {
    Vec power = x * -1.4426950408889634f;
    power = power < splat(-126.0f) ? splat(-126.0f) : power;
    power = power > splat(126.0f) ? splat(126.0f) : power;
    return x / (exp2_between(power) + 1.0f);
}

// SwiGLU (Shazeer 2020): silu(gate) * up.
inline void gate(const float* gates, const float* ups, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, silu(load(gates + i)) * load(ups + i));
    if (i < n) {
        float rest[2 * W] = {};
        memcpy(rest, gates + i, sizeof(float) * (n - i));
        memcpy(rest + W, ups + i, sizeof(float) * (n - i));
        store(rest, silu(load(rest)) * load(rest + W));
        memcpy(out + i, rest, sizeof(float) * (n - i));
    }
}

// The largest score and where it stands first; NaN if any score was.
struct Best {
    float score;
    int64_t index;
};

inline void keep_better(Best& best, float score, int64_t index) {
    if (best.score != best.score) return;
    if (score != score || score > best.score || (score == best.score && index < best.index)) best = {score, index};
}

// Takes in scores[0 .. n), which stand from `first` on.
inline void find_best(Best& best, const float* scores, int64_t n, int64_t first) {
    Vec most = splat(-__builtin_inff());
    IVec where = {}, index = make_lanes(Lanes()), is_nan = {};
    int64_t i = 0;
    for (; i + W <= n; i += W, index += W) {
        const Vec x = load(scores + i);
        const IVec is_more = x > most;
        most = is_more ? x : most;
        where = is_more ? index : where;
        is_nan |= x != x;
    }
    for (int lane = 0; lane < W && i > 0; lane++) {
        keep_better(best, most[lane], first + where[lane]);
        if (is_nan[lane]) best.score = __builtin_nanf("");
    }
    for (; i < n; i++) keep_better(best, scores[i], first + i);
}

}  // namespace penstock
