// Scalar conversions between float and the 16-bit types, for code that is not worth vectorising.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernel.h"

namespace pacpu {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return from_bits(uint32_t{x.bits} << 16); }

inline float widen(Half x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
    if (magnitude >= 31u << 23) return from_bits(sign | (magnitude + (224u << 23)));  // infinity or NaN
    if (magnitude >= 1u << 23) return from_bits(sign | (magnitude + (112u << 23)));
    return from_bits(sign | bits_of(from_bits(magnitude + (113u << 23)) - from_bits(113u << 23)));  // subnormal
}

// Narrowing rounds to nearest, ties to even.
inline void narrow(float x, float& y) { y = x; }

inline void narrow(float x, BFloat16& y) {
    const uint32_t bits = bits_of(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void narrow(float x, Half& y) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
        result = 0x7e00;  // NaN
    } else if (magnitude >= 0x477ff000u) {
        result = 0x7c00;  // 65520 and above round to infinity
    } else if (magnitude < 113u << 23) {
        // Below 2^-14. Adding 0.5 aligns the sum's last mantissa bit with the smallest subnormal, 2^-24.
        result = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
    } else {
        result = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    y.bits = static_cast<uint16_t>(sign | result);
}

}  // namespace pacpu
