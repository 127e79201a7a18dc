// Vectors of elements in and out, whole and in part, for the work on rows.
#pragma once

#include "../native/vectors.h"
#if !defined(__AVX2__)
#include "numbers.h"
#endif

namespace pacpu {
namespace {

PACPU_INLINE int min_of(int a, int b) { return a < b ? a : b; }

// Two elements as they are.
PACPU_INLINE int32_t load_pair(const BFloat16* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return bits;
}

PACPU_INLINE void store(BFloat16* p, Floats v) {
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    const Words quiet = bits >> 16 | 0x40;
    const auto narrowed = __builtin_convertvector(v == v ? rounded : quiet, Shorts);
    __builtin_memcpy(p, &narrowed, sizeof narrowed);
}

PACPU_INLINE void store(Half* p, Floats v) {
#if defined(__AVX512F__)
    const __m256i narrowed = _mm512_maskz_cvtps_ph((__mmask16)-1, v, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &narrowed, sizeof narrowed);
#elif defined(__F16C__)
    const __m128i narrowed = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &narrowed, sizeof narrowed);
#else
    for (int i = 0; i < width; ++i) narrow(v[i], p[i]);
#endif
}

// The first `count` elements of a vector; the other lanes are zero.
template <typename T>
PACPU_INLINE Floats load_some(const T* p, int count) {
    if (count >= width) return load(p);
    T padded[width] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return load(padded);
}

template <typename T>
PACPU_INLINE void store_some(T* p, Floats v, int count) {
    if (count >= width) return store(p, v);
    T padded[width];
    store(padded, v);
    for (int i = 0; i < count; ++i) p[i] = padded[i];
}

}  // namespace
}  // namespace pacpu
