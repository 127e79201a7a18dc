// Vectors of floats for the native kernel. Each file that includes this is compiled for one instruction set.
//
// Vectors are GCC's generic ones; only the fp16 conversion needs intrinsics. Everything is in an unnamed namespace
// so that no function of one instruction set can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernel.h"

namespace pacpu {
namespace {

#if defined(__AVX512F__)
constexpr int width = 16;
#elif defined(__AVX2__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * width)));
typedef int32_t Ints __attribute__((vector_size(4 * width)));
typedef uint32_t Words __attribute__((vector_size(4 * width)));
typedef uint16_t Shorts __attribute__((vector_size(2 * width)));

#define PACPU_INLINE inline __attribute__((always_inline))

PACPU_INLINE Floats splat(float x) { return x - Floats{}; }

template <typename Vector>
PACPU_INLINE Vector load_bits(const void* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// Keeps GCC from trading a register that several operations share for a memory operand of each.
template <typename Vector>
PACPU_INLINE void pin(Vector& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    (void)x;
#endif
}

PACPU_INLINE void store(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }

PACPU_INLINE Floats load(const float* p) { return load_bits<Floats>(p); }

PACPU_INLINE Floats load(const BFloat16* p) {
    return (Floats)(__builtin_convertvector(load_bits<Shorts>(p), Words) << 16);
}

PACPU_INLINE Floats load(const Half* p) {
#if defined(__AVX512F__)
    // The form with a mask, since GCC 12 warns about its own header in the plain one; the code is the same.
    return _mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
    const Words bits = __builtin_convertvector(load_bits<Shorts>(p), Words);
    const Words sign = (bits & 0x8000) << 16;
    const Words magnitude = (bits & 0x7fff) << 13;
    const Words normal = magnitude + (112u << 23);  // exponent bias 15 becomes 127
    // A subnormal's mantissa, put under the exponent of 2^-14, is 2^-14 too large.
    const Floats smallest = (Floats)(Words{} + (113u << 23));
    const Words subnormal = (Words)((Floats)(magnitude + (113u << 23)) - smallest);
    const Words special = magnitude + (224u << 23);  // infinities and NaN have all exponent bits set
    Words result = (Ints)magnitude < (1 << 23) ? subnormal : normal;
    result = (Ints)magnitude >= (31 << 23) ? special : result;
    return (Floats)(result | sign);
#endif
}

// The last 8 elements of a row whose length is no multiple of the width; the other lanes are zero.
template <typename T>
PACPU_INLINE Floats load_last_8(const T* p) {
    T padded[width > 8 ? width : 8] = {};
    __builtin_memcpy(padded, p, 8 * sizeof(T));
    return load(padded);
}

PACPU_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x <= 0 within 2 ulp; zero below -87, where floats run out; NaN stays NaN.
PACPU_INLINE Floats exp_nonpositive(Floats x) {
    const Floats lowest = splat(-87.0f);
    const Floats y = x < lowest ? lowest : x;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats shifted = y * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // y - n ln 2, with ln 2 in two pieces
    Floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Floats power = (Floats)(((Ints)shifted - (Ints)magic + 127) << 23);
    return x < lowest ? Floats{} : p * power;
}

// Lane i of the result is made of a[i] and a[i ^ bit] or, where i has the bit, of b[i] and b[i ^ bit].
template <int bit, typename Function, int... lane>
PACPU_INLINE Floats fold(Floats a, Floats b, Function function, std::integer_sequence<int, lane...>) {
    const Ints straight = {(lane + (lane & bit ? width : 0))...};
    const Ints crossed = {((lane ^ bit) + (lane & bit ? width : 0))...};
    return function(__builtin_shuffle(a, b, straight), __builtin_shuffle(a, b, crossed));
}

// Lane i of the result is the sum of all lanes of sums[i].
template <int bit = 1, int first = 0>
PACPU_INLINE Floats sum_lanes(const Floats* sums) {
    if constexpr (bit == width) {
        return sums[first];
    } else {
        return fold<bit>(sum_lanes<2 * bit, first>(sums), sum_lanes<2 * bit, first + bit>(sums),
                         [](Floats a, Floats b) { return a + b; }, std::make_integer_sequence<int, width>{});
    }
}

// Lane i of the result is x[i % n].
template <int n, int... lane>
PACPU_INLINE Floats repeat(Floats x, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(x, Ints{lane % n...});
}
template <int n>
PACPU_INLINE Floats repeat(Floats x) {
    return repeat<n>(x, std::make_integer_sequence<int, width>{});
}

template <int bit, int... lane>
PACPU_INLINE Floats cross(Floats x, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(x, Ints{(lane ^ bit)...});
}

// Reduces lanes that are n apart; every lane gets the result.
template <int n, typename Function>
PACPU_INLINE Floats reduce(Floats x, Function&& function) {
    if constexpr (n < width) {
        return reduce<2 * n>(function(x, cross<n>(x, std::make_integer_sequence<int, width>{})), function);
    } else {
        return x;
    }
}

}  // namespace
}  // namespace pacpu
