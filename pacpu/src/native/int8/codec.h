// Rows of K and V to codes and back.
#pragma once

#include <cstring>

#include "../../rows/elements.h"
#include "int8.h"

namespace pacpu {
namespace {

typedef int8_t Codes __attribute__((vector_size(width)));
typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr int cut_elements = 256;  // of a row at a time

// The largest of the lanes, none of which is negative; as integers, NaN is the largest.
PACPU_INLINE Floats larger(Floats a, Floats b) { return (Floats)((Ints)a > (Ints)b ? (Ints)a : (Ints)b); }

// The largest magnitude of a row; infinite or NaN if an element is.
template <typename T>
PACPU_INLINE float largest_magnitude(const T* x, int dim) {
    Floats most = {};
    for (int i = 0; i < dim; i += width) most = larger((Floats)((Ints)load_some(x + i, dim - i) & 0x7fffffff), most);
    return reduce<1>(most, larger)[0];
}

PACPU_INLINE float scale_for(float largest) {
    if (!(largest < __builtin_inff())) return __builtin_nanf("");
    float scale = largest * (1.0f / largest_code);
    scale = scale > least_scale ? scale : least_scale;
    uint32_t bits;
    __builtin_memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x80) & ~0xffu;
    __builtin_memcpy(&scale, &bits, sizeof bits);
    return scale;
}

// Codes of up to `cut_elements` elements, in whole vectors.
template <typename T>
PACPU_INLINE void encode(const T* x, int count, float scale, int8_t* codes) {
    const float inverse = scale == scale ? 1 / scale : 0;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    for (int i = 0; i < count; i += width) {
        Floats quotient = inverse ? load_some(x + i, count - i) * inverse : Floats{};
        pin(quotient);  // a fused multiply-add would round once where others round twice
        const Codes narrowed = __builtin_convertvector((Ints)(quotient + magic) - (Ints)magic, Codes);
        __builtin_memcpy(codes + i, &narrowed, sizeof narrowed);
    }
}

PACPU_INLINE void put_scales(char* tile, int dim, int slot, float key_scale, float value_scale) {
    __builtin_memcpy(tile + scales_at(dim) + 4 * slot, &key_scale, sizeof key_scale);
    __builtin_memcpy(tile + scales_at(dim) + 4 * (tile_tokens + slot), &value_scale, sizeof value_scale);
}

// Four codes of K as the tile has them.
PACPU_INLINE void put_key(const int8_t* codes, char* to) {
    uint32_t four;
    __builtin_memcpy(&four, codes, sizeof four);
    four ^= 0x80808080u;
    __builtin_memcpy(to, &four, sizeof four);
}

template <typename T>
void store_token(const void* k, const void* v, int dim, char* tile, int slot) {
    const T *key = static_cast<const T*>(k), *value = static_cast<const T*>(v);
    const float key_scale = scale_for(largest_magnitude(key, dim)), value_scale = scale_for(largest_magnitude(value, dim));
    char* const keys = tile + 4 * slot;
    char* const values = tile + values_at(dim) + slot / 4 * 4 * dim + slot % 4;
    int8_t codes[cut_elements];
    for (int at = 0; at < dim; at += cut_elements) {
        const int count = min_of(dim - at, cut_elements);
        encode(key + at, count, key_scale, codes);
        for (int i = 0; i < count; i += 4) put_key(codes + i, keys + (at + i) * tile_tokens);
        encode(value + at, count, value_scale, codes);
        for (int i = 0; i < count; ++i) values[4 * (at + i)] = codes[i];
    }
    put_scales(tile, dim, slot, key_scale, value_scale);
}

// Four rows of 16 bytes to 16 groups of four.
PACPU_INLINE void interleave(const int8_t* codes, Bytes* groups) {
    typedef int16_t Pairs __attribute__((vector_size(16)));
    Bytes row[4];
    for (int t = 0; t < 4; ++t) __builtin_memcpy(row + t, codes + t * cut_elements, sizeof row[t]);
    const Bytes low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
    const Pairs lower = {0, 8, 1, 9, 2, 10, 3, 11}, upper = lower + 4;
    const Pairs first[2] = {(Pairs)__builtin_shuffle(row[0], row[1], low), (Pairs)__builtin_shuffle(row[0], row[1], high)};
    const Pairs second[2] = {(Pairs)__builtin_shuffle(row[2], row[3], low), (Pairs)__builtin_shuffle(row[2], row[3], high)};
    for (int i = 0; i < 2; ++i) {
        groups[2 * i] = (Bytes)__builtin_shuffle(first[i], second[i], lower);
        groups[2 * i + 1] = (Bytes)__builtin_shuffle(first[i], second[i], upper);
    }
}

template <typename T>
void pack_tile(const void* k, const void* v, int dim, char* tile) {
    const T *keys = static_cast<const T*>(k), *values = static_cast<const T*>(v);
    float key_scales[tile_tokens], value_scales[tile_tokens];
    for (int t = 0; t < tile_tokens; ++t) {
        key_scales[t] = scale_for(largest_magnitude(keys + t * dim, dim));
        value_scales[t] = scale_for(largest_magnitude(values + t * dim, dim));
        put_scales(tile, dim, t, key_scales[t], value_scales[t]);
    }
    int8_t codes[tile_tokens][cut_elements];
    for (int at = 0; at < dim; at += cut_elements) {
        const int count = min_of(dim - at, cut_elements);
        for (int t = 0; t < tile_tokens; ++t) encode(keys + t * dim + at, count, key_scales[t], codes[t]);
        for (int i = 0; i < count; i += 4)
            for (int t = 0; t < tile_tokens; ++t) put_key(codes[t] + i, tile + (at + i) * tile_tokens + 4 * t);
        for (int t = 0; t < tile_tokens; ++t) encode(values + t * dim + at, count, value_scales[t], codes[t]);
        for (int quad = 0; quad < tile_tokens / 4; ++quad)
            for (int i = 0; i < count; i += 16) {
                Bytes groups[4];
                interleave(codes[4 * quad] + i, groups);
                char* const to = tile + values_at(dim) + 4 * (quad * dim + at + i);
                __builtin_memcpy(to, groups, 4 * min_of(count - i, 16));
            }
    }
}

template <typename T>
void unpack_tile(const char* tile, int dim, int num_tokens, void* k, void* v) {
    float scales[2 * tile_tokens];
    __builtin_memcpy(scales, tile + scales_at(dim), sizeof scales);
    for (int t = 0; t < num_tokens; ++t) {
        T *key = static_cast<T*>(k) + int64_t{t} * dim, *value = static_cast<T*>(v) + int64_t{t} * dim;
        const char* const values = tile + values_at(dim) + t / 4 * 4 * dim;
        for (int i = 0; i < dim; i += width) {
            int8_t four_by_four[width];
            for (int j = 0; j < width; j += 4)
                put_key((const int8_t*)tile + (i + j < dim ? i + j : 0) * tile_tokens + 4 * t, (char*)four_by_four + j);
            Codes codes;
            __builtin_memcpy(&codes, four_by_four, sizeof codes);
            store_some(key + i, __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats) * scales[t], dim - i);
            // Beyond the last element are the scales: the load stays in the tile.
            const Ints quads = (Ints)(load_bits<Words>(values + 4 * i) << (24 - 8 * (t % 4))) >> 24;
            store_some(value + i, __builtin_convertvector(quads, Floats) * scales[tile_tokens + t], dim - i);
        }
    }
}

template <typename T>
constexpr Int8Codec codec = {store_token<T>, pack_tile<T>, unpack_tile<T>};

}  // namespace
}  // namespace pacpu
