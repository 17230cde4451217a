// How numbers lie in a tiled store (attention.hpp), and 8 bits with a scale.

#pragma once

#include "attention/attention.hpp"

namespace penstock {

// Element of a tiled store's head, `together` of which belong to one lane of a product.
inline int64_t tiled_place(const Store& store, int64_t position, int64_t d, int64_t dim, int64_t together) {
    const int64_t tile = position / TILE * TILE * dim, in_tile = position % TILE;
    return tile + (store.is_values ? in_tile / together * together * dim + together * d + in_tile % together
                                   : d / together * together * TILE + together * in_tile + d % together);
}

constexpr int PAIR = 2, FOUR = 4;

// One head of a token: to `to`, and its scale.
inline void write_scaled(int8_t* to, float* scale, int64_t dim, const float* from) {
    float most = 0;
    for (int64_t d = 0; d < dim; d++) most = __builtin_fabsf(from[d]) > most || from[d] != from[d] ? __builtin_fabsf(from[d]) : most;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    *scale = most / 127.0f;
    for (int64_t d = 0; d < dim; d++) to[d] = static_cast<int8_t>(__builtin_rintf(from[d] * inverse));
}

}  // namespace penstock
