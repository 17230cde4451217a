// Keys and values into their slots, in every format.

#include "attention/attention_store.hpp"

namespace penstock {
namespace {

// To the head that begins at `head`.
void write_tiled_bf16(const Store& store, uint16_t* head, int64_t position, int64_t dim, const float* from) {
    for (int64_t d = 0; d < dim; d++) head[tiled_place(store, position, d, dim, PAIR)] = to_bf16(from[d]);
}

void write_tiled_int8(const Store& store, uint8_t* head, float* scale, int64_t position, int64_t dim, const float* from) {
    int8_t rounded[MAX_DIM];
    write_scaled(rounded, scale, dim, from);
    const uint8_t flip = store.is_values ? 0 : 128;
    for (int64_t d = 0; d < dim; d++) head[tiled_place(store, position, d, dim, FOUR)] = static_cast<uint8_t>(rounded[d]) ^ flip;
}

}  // namespace

void write_slot(const Store& store, DType dtype, int64_t slot, int64_t num_kv_heads, int64_t block_size, int64_t dim, int64_t first_head, int64_t num_heads,
                const float* heads) {
    const int64_t block = slot / block_size, position = slot % block_size;
    for (int64_t i = 0; i < num_heads; i++) {
        const int64_t head = first_head + i, begin = block * store.block_stride + head * block_size * dim, place = begin + position * dim;
        const float* from = heads + i * dim;
        float* scale = store.scales == nullptr ? nullptr : store.scales + (block * num_kv_heads + head) * block_size + position;
        if (dtype == SCALED_INT8)
            write_scaled(static_cast<int8_t*>(store.data) + place, scale, dim, from);
        else if (dtype == TILED_INT8)
            write_tiled_int8(store, static_cast<uint8_t*>(store.data) + begin, scale, position, dim, from);
        else if (dtype == TILED_BFLOAT16)
            write_tiled_bf16(store, static_cast<uint16_t*>(store.data) + begin, position, dim, from);
        else
            write(store.data, dtype, place, from, dim);
    }
}

}  // namespace penstock
