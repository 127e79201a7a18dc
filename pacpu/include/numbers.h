// Scalar conversions between float and the 16-bit types, without branches so that the compiler can vectorise loops.
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

// Without a branch, whatever the compiler thinks of it.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) { return no ^ ((no ^ yes) & -uint32_t{condition}); }

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return from_bits(uint32_t{x.bits} << 16); }

inline float widen(Half x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
    const uint32_t normal = magnitude + (112u << 23), special = magnitude + (224u << 23);  // special: infinity, NaN
    const uint32_t subnormal = bits_of(from_bits(magnitude + (113u << 23)) - from_bits(113u << 23));
    const uint32_t finite = select(magnitude < 1u << 23, subnormal, normal);
    return from_bits(sign | select(magnitude >= 31u << 23, special, finite));
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
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14. Adding 0.5 aligns the sum's last mantissa bit with the smallest subnormal, 2^-24.
    const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t result = select(magnitude < 113u << 23, subnormal, normal);
    result = select(magnitude >= 0x477ff000u, 0x7c00, result);  // 65520 and above round to infinity
    result = select(magnitude > 0x7f800000u, 0x7e00, result);   // NaN
    y.bits = static_cast<uint16_t>(sign | result);
}

}  // namespace pacpu
