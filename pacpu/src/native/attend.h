// The native kernel's arithmetic in float32: elements are widened and multiplied by fused multiply-adds.
#pragma once

#include "walk.h"

namespace pacpu {
namespace {

template <typename T>
struct Widened {
    static constexpr int element_bytes = sizeof(T);

    static PACPU_INLINE Floats round(Floats weights) { return weights; }
    static PACPU_INLINE void finish(const Segment&, float*) {}

    // Tile by tile: width / lanes tokens at a time, one accumulator per token and head.
    template <int heads, typename Rows>
    static PACPU_INLINE void score(const Segment& segment, int first_head, const Rows& rows, float* scores) {
        constexpr int lanes = lanes_for(heads), tokens = width / lanes, row_tile = min_of(tokens, max_row_tile);
        const float* queries = segment.queries + (ptrdiff_t)first_head * segment.padded_dim;
        const int dim = segment.head_dim, whole = dim - dim % width, padded_dim = segment.padded_dim;
        for (int first = 0; first < rows.num_tokens; first += tokens) {
            const T* keys[tokens];
#pragma GCC unroll 16
            for (int t = 0; t < tokens; ++t) keys[t] = (const T*)rows.key(first + t);
            Floats sums[width] = {};
            auto step = [&](int from, int at, auto load_key) __attribute__((always_inline)) {
                if (rows.ahead && at * sizeof(T) % cache_line == 0)
#pragma GCC unroll 4
                    for (int t = from; t < from + row_tile; ++t) rows.prefetch_key(first + t, at * sizeof(T));
                Floats query[heads];
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h) pin(query[h] = load(queries + h * padded_dim + at));
#pragma GCC unroll 4
                for (int t = from; t < from + row_tile; ++t) {
                    const Floats key = load_key(keys[t] + at);
#pragma GCC unroll 4
                    for (int h = 0; h < heads; ++h) sums[t * lanes + h] += key * query[h];
                }
            };
#pragma GCC unroll 4
            for (int from = 0; from < tokens; from += row_tile) {
                for (int at = 0; at < whole; at += width) step(from, at, [](const T* p) { return load(p); });
                if (whole < dim) step(from, whole, [](const T* p) { return load_last_8(p); });
            }
            store(scores + first * lanes, sum_lanes(sums));
        }
    }

    // Adds the weighted V of a chunk to `columns` vectors of the output, starting at element `at`.
    template <int heads, int columns, typename Rows, typename Load>
    static PACPU_INLINE void weigh_columns(const Segment& segment, const Rows& rows, const float* weights,
                                           const float* corrections, int at, float* output, Load load_value) {
        constexpr int lanes = lanes_for(heads);
        Floats sums[heads][columns];
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c)
                sums[h][c] = load(output + h * segment.padded_dim + at + c * width) * corrections[h];
        // A line that an earlier call has begun is on its way: asked for twice, it would hold up others.
        const int start = at * sizeof(T), end = start + columns * width * sizeof(T);
        const int first_line = (start + cache_line - 1) / cache_line * cache_line;
        for (int t = 0; t < rows.num_tokens; ++t) {
            const T* value = (const T*)rows.value(t) + at;
            if (rows.ahead)
                for (int byte = first_line; byte < end; byte += cache_line) rows.prefetch_value(t, byte);
            Floats values[columns];
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c) values[c] = load_value(value + c * width);
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
                for (int c = 0; c < columns; ++c) sums[h][c] += values[c] * weights[t * lanes + h];
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c) store(output + h * segment.padded_dim + at + c * width, sums[h][c]);
    }

    template <int heads, typename Rows>
    static PACPU_INLINE void weigh(const Segment& segment, const Rows& rows, const float* weights,
                                   const float* corrections, float* output) {
        constexpr int columns = heads == 1 ? 8 : (width == 16 ? 16 : 8) / lanes_for(heads);
        const auto load_whole = [](const T* p) { return load(p); };
        int at = 0;
        for (; at + columns * width <= segment.head_dim; at += columns * width)
            weigh_columns<heads, columns>(segment, rows, weights, corrections, at, output, load_whole);
        for (; at + width <= segment.head_dim; at += width)
            weigh_columns<heads, 1>(segment, rows, weights, corrections, at, output, load_whole);
        if (at < segment.head_dim)
            weigh_columns<heads, 1>(segment, rows, weights, corrections, at, output,
                                    [](const T* p) { return load_last_8(p); });
    }
};

}  // namespace
}  // namespace pacpu
