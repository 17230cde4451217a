// Numbers by their bits, the formats that they are stored in, and the smaller and the larger of two.

#pragma once

#include <stdint.h>
#include <string.h>

namespace penstock {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline float from_bits(uint32_t bits) {
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float from_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    const uint32_t bits = bits_of(x);
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, magnitude = x & 0x7FFF;
    if (magnitude >= 0x7C00) return from_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    // the exponent's bias differs by 112; the multiplication makes subnormals normal
    return from_bits(sign | bits_of(from_bits(magnitude << 13) * from_bits((254 - 15) << 23)));
}

}  // namespace penstock
