// Products of rows with a packed bfloat16 matrix by fused multiply-adds in float32. A panel's weights are widened once, by
// the first tile of rows, into a buffer that stays in the level-2 cache for all others. On CPUs whose bfloat16
// instructions multiply at a lower rate (Intel's without AMX: at half of it) this is the fastest there is.
#pragma once

#include "panels.h"

namespace pacpu {
namespace {

constexpr int panel_vectors = panel_columns / width;
constexpr int tile_rows = 8;  // times panel_vectors accumulators: three quarters of the registers

// Adds to `sums` [rows, panel_columns] (or sets, if `is_first`) the products of so many pairs of inputs. `weights` are
// packed and written to `wide` [2 num_pairs, panel_columns], or are null and read from there. `ahead`: memory to fetch.
template <int rows, bool is_packed>
__attribute__((noinline)) void multiply_tile(const float* x, int64_t x_stride, const BFloat16* weights, float* wide,
                                             int num_pairs, float* sums, bool is_first, const char* ahead) {
    Floats total[rows][panel_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < panel_vectors; ++v)
            total[r][v] = is_first ? Floats{} : load(sums + r * panel_columns + v * width);
    for (int pair = 0; pair < num_pairs; ++pair) {
        if (ahead) __builtin_prefetch(ahead + pair * int64_t{4 * panel_columns}, 0, 2);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            Floats weight[panel_vectors];
#pragma GCC unroll 3
            for (int v = 0; v < panel_vectors; ++v) {
                float* place = wide + (2 * pair + odd) * panel_columns + v * width;
                if (is_packed) {
                    const auto both = load_bits<Words>(weights + 2 * (pair * panel_columns + v * width));
                    weight[v] = (Floats)(odd ? both & 0xffff0000u : both << 16);
                    store(place, weight[v]);
                } else {
                    weight[v] = load(place);
                }
                pin(weight[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                Floats input = splat(x[r * x_stride + 2 * pair + odd]);
                pin(input);
#pragma GCC unroll 3
                for (int v = 0; v < panel_vectors; ++v) total[r][v] += input * weight[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < panel_vectors; ++v) store(sums + r * panel_columns + v * width, total[r][v]);
}

using MultiplyTile = void (*)(const float*, int64_t, const BFloat16*, float*, int, float*, bool, const char*);

// By the number of rows.
template <bool is_packed>
constexpr MultiplyTile multiply_rows[tile_rows + 1] = {nullptr,
                                                       multiply_tile<1, is_packed>,
                                                       multiply_tile<2, is_packed>,
                                                       multiply_tile<3, is_packed>,
                                                       multiply_tile<4, is_packed>,
                                                       multiply_tile<5, is_packed>,
                                                       multiply_tile<6, is_packed>,
                                                       multiply_tile<7, is_packed>,
                                                       multiply_tile<8, is_packed>};

// A product's rows, or some of them, with some of the matrix's panels.
void multiply_block(const Linear& p, int begin_panel, int end_panel, float* scratch) {
    const int64_t x_stride = padded_inputs(p.in_features);
    float* const x = scratch;
    float* const wide = x + p.rows * x_stride;
    float* const sums = wide + 2 * max_block_pairs * panel_columns;
    for (int r = 0; r < p.rows; ++r)  // zeros behind the last input: those packed there are multiplied, too
        for (int i = 0; i < p.in_features; i += width)
            store(x + r * x_stride + i, load_some(p.x + r * p.x_stride + i, min_of(width, p.in_features - i)));

    over_tiles(p, begin_panel, end_panel, tile_rows, sums, [&](const PanelTile& t) {
        const auto multiply = t.row == 0 ? multiply_rows<true>[t.rows] : multiply_rows<false>[t.rows];
        multiply(x + t.row * x_stride + 2 * t.first_pair, x_stride, t.weights, wide, t.num_pairs,
                 sums + t.row * panel_columns, t.first_pair == 0, t.ahead);
    });
}

void widening_linear(const Linear& p, int begin_panel, int end_panel, float* scratch) {
    in_blocks_of_rows(p, [&](const Linear& block) { multiply_block(block, begin_panel, end_panel, scratch); });
}

}  // namespace
}  // namespace pacpu
