// The native kernel: one-pass flash-decoding. Each file that includes this is compiled for one instruction set.
//
// A segment is walked in chunks of 64 tokens: scores of the chunk, one step of the online softmax, weighted sum of
// the chunk's V. All heads of a group use a chunk while it is in cache, so K and V come from memory once per group.
// While a chunk is worked on, the next one is prefetched through the block table: the hardware cannot guess where a
// block table points.
//
// Vectors are GCC's generic ones; only the fp16 conversion needs an intrinsic. Everything is in an unnamed namespace
// so that no function of one instruction set can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
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

constexpr int chunk_tokens = 64;
constexpr int score_stride = chunk_tokens + 16;  // a tile may run past the chunk's end
constexpr int max_tile_heads = 4;
constexpr int cache_line = 64;

#define PACPU_INLINE inline __attribute__((always_inline))

PACPU_INLINE Floats splat(float x) { return x - Floats{}; }

template <typename Vector>
PACPU_INLINE Vector load_bits(const void* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
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

// Each of a and b holds items of n partial sums side by side. Adds the halves of every item and returns the items of
// a and b, now n/2 wide, taking turns.
template <int n, int... lane>
PACPU_INLINE Floats halve_items(Floats a, Floats b, std::integer_sequence<int, lane...>) {
    constexpr int half = n / 2;
    const Ints low = {(lane / n * n + lane % half + (lane / half % 2) * width)...};
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + half);
}

// Lane i of the result is the sum of all lanes of sums[start + i * stride], i < count; lanes come in groups of
// width / count partial sums until count reaches width.
template <int count, int start, int stride>
PACPU_INLINE Floats sum_lanes(const Floats* sums) {
    if constexpr (count == 1) {
        return sums[start];
    } else {
        const Floats even = sum_lanes<count / 2, start, stride * 2>(sums);
        const Floats odd = sum_lanes<count / 2, start + stride, stride * 2>(sums);
        return halve_items<2 * width / count>(even, odd, std::make_integer_sequence<int, width>{});
    }
}

// The rows of a chunk: K of each token; V is value_offset elements further on. Padded with the last row, so that
// tiles and prefetches need no special case at the end.
template <typename T>
struct Chunk {
    const T* keys[score_stride];
    int num_tokens;
};

template <typename T>
PACPU_INLINE void locate_chunk(const Segment& segment, int first_token, Chunk<T>& chunk) {
    int block = first_token / segment.block_size, slot = first_token % segment.block_size;
    const int remaining = segment.num_tokens - first_token;
    const int n = remaining < chunk_tokens ? remaining : chunk_tokens;
    for (int i = 0; i < n; ++block, slot = 0) {
        const T* row = (const T*)(segment.keys + segment.blocks[block] * segment.block_bytes);
        row += (ptrdiff_t)slot * segment.head_dim;
        const int end = n - i < segment.block_size - slot ? n : i + segment.block_size - slot;
        for (; i < end; ++i, row += segment.head_dim) chunk.keys[i] = row;
    }
    for (int i = n; i < score_stride; ++i) chunk.keys[i] = chunk.keys[n - 1];
    chunk.num_tokens = n;
}

// Scores of `heads` query heads against a chunk, tile by tile: width / heads tokens at a time, one accumulator per
// token and head.
template <typename T, int heads>
PACPU_INLINE void score(const Segment& segment, const float* queries, const Chunk<T>& chunk, const Chunk<T>* prefetch,
                        float* scores) {
    constexpr int tokens = width / heads;
    const int dim = segment.head_dim, whole = dim - dim % width;
    for (int first = 0; first < chunk.num_tokens; first += tokens) {
        const T* const* keys = chunk.keys + first;
        Floats sums[width] = {};
        auto step = [&](int at, auto load_key) __attribute__((always_inline)) {
            // Spread over the steps: a burst of prefetches would wait for free line-fill buffers.
            if (prefetch && at * sizeof(T) % cache_line == 0)
                for (int t = 0; t < tokens; ++t) __builtin_prefetch(prefetch->keys[first + t] + at);
#pragma GCC unroll 16
            for (int t = 0; t < tokens; ++t) {
                const Floats key = load_key(keys[t] + at);
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h) sums[h * tokens + t] += key * load(queries + h * segment.padded_dim + at);
            }
        };
        for (int at = 0; at < whole; at += width) step(at, [](const T* p) { return load(p); });
        if (whole < dim) step(whole, [](const T* p) { return load_last_8(p); });
        float dots[width];
        store(dots, sum_lanes<width, 0, 1>(sums));
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
            __builtin_memcpy(scores + h * score_stride + first, dots + h * tokens, tokens * sizeof(float));
    }
}

// One step of the online softmax for one head: scores become weights; returns the factor for what was summed before.
PACPU_INLINE float softmax_step(float* scores, int num_tokens, float& max, float& sum) {
    for (int t = num_tokens; t % width; ++t) scores[t] = -__builtin_inff();
    Floats maxima = splat(max);
    for (int t = 0; t < num_tokens; t += width) {
        const Floats s = load(scores + t);
        maxima = s > maxima ? s : maxima;
    }
    float new_max = max;
    for (int i = 0; i < width; ++i) new_max = maxima[i] > new_max ? maxima[i] : new_max;
    Floats sums = {};
    for (int t = 0; t < num_tokens; t += width) {
        const Floats weights = exp_nonpositive(load(scores + t) - new_max);
        sums += weights;
        store(scores + t, weights);
    }
    float chunk_sum = 0;
    for (int i = 0; i < width; ++i) chunk_sum += sums[i];
    const float correction = exp_nonpositive(splat(max - new_max))[0];
    max = new_max;
    sum = sum * correction + chunk_sum;
    return correction;
}

// Adds the weighted V of a chunk to `columns` vectors of the output, starting at element `at`.
template <typename T, int heads, int columns, typename Load>
PACPU_INLINE void weigh(const Segment& segment, const Chunk<T>& chunk, const Chunk<T>* prefetch, const float* weights,
                        const float* corrections, int at, float* output, Load load_value) {
    const ptrdiff_t offset = (ptrdiff_t)segment.block_size * segment.head_dim + at;
    Floats sums[heads][columns];
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c)
            sums[h][c] = load(output + h * segment.padded_dim + at + c * width) * corrections[h];
    for (int t = 0; t < chunk.num_tokens; ++t) {
        if (prefetch) {
            const char* ahead = (const char*)(prefetch->keys[t] + offset);
            for (int line = 0; line < columns * width * (int)sizeof(T); line += cache_line)
                __builtin_prefetch(ahead + line);
        }
        Floats values[columns];
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) values[c] = load_value(chunk.keys[t] + offset + c * width);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) sums[h][c] += values[c] * weights[h * score_stride + t];
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) store(output + h * segment.padded_dim + at + c * width, sums[h][c]);
}

// All of a chunk's work for `heads` query heads starting at head `first`.
template <typename T, int heads>
PACPU_INLINE void attend_heads(const Segment& segment, int first, const Chunk<T>& chunk, const Chunk<T>* prefetch,
                               SoftmaxState state) {
    constexpr int columns = heads <= 2 || width == 16 ? 4 : 2;
    alignas(64) float scores[heads * score_stride];
    float corrections[heads];
    score<T, heads>(segment, segment.queries + (ptrdiff_t)first * segment.padded_dim, chunk, prefetch, scores);
    for (int h = 0; h < heads; ++h)
        corrections[h] =
            softmax_step(scores + h * score_stride, chunk.num_tokens, state.max[first + h], state.sum[first + h]);
    float* output = state.output + (ptrdiff_t)first * segment.padded_dim;
    const auto load_whole = [](const T* p) { return load(p); };
    int at = 0;
    for (; at + columns * width <= segment.head_dim; at += columns * width)
        weigh<T, heads, columns>(segment, chunk, prefetch, scores, corrections, at, output, load_whole);
    for (; at + width <= segment.head_dim; at += width)
        weigh<T, heads, 1>(segment, chunk, prefetch, scores, corrections, at, output, load_whole);
    if (at < segment.head_dim)
        weigh<T, heads, 1>(segment, chunk, prefetch, scores, corrections, at, output,
                           [](const T* p) { return load_last_8(p); });
}

template <typename T>
void attend(const Segment& segment, const Segment* next, SoftmaxState state) {
    for (int h = 0; h < segment.group; ++h) {
        state.max[h] = -__builtin_inff();
        state.sum[h] = 0;
    }
    for (int i = 0; i < segment.group * segment.padded_dim; ++i) state.output[i] = 0;
    Chunk<T> chunks[2];
    locate_chunk(segment, 0, chunks[0]);
    for (int first_token = 0, turn = 0; first_token < segment.num_tokens; first_token += chunk_tokens, turn ^= 1) {
        const Chunk<T>& chunk = chunks[turn];
        const Chunk<T>* prefetch = nullptr;
        if (first_token + chunk_tokens < segment.num_tokens) {
            locate_chunk(segment, first_token + chunk_tokens, chunks[turn ^ 1]);
            prefetch = &chunks[turn ^ 1];
        } else if (next) {
            locate_chunk(*next, 0, chunks[turn ^ 1]);
            prefetch = &chunks[turn ^ 1];
        }
        for (int head = 0; head < segment.group; head += max_tile_heads) {
            switch (segment.group - head) {
                case 1: attend_heads<T, 1>(segment, head, chunk, prefetch, state); break;
                case 2: attend_heads<T, 2>(segment, head, chunk, prefetch, state); break;
                case 3: attend_heads<T, 3>(segment, head, chunk, prefetch, state); break;
                default: attend_heads<T, 4>(segment, head, chunk, prefetch, state);
            }
            prefetch = nullptr;
        }
    }
}

}  // namespace
}  // namespace pacpu
