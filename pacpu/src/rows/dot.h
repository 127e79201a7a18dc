// Products of rows with a packed bfloat16 matrix by the dot products of AVX-512 BF16: pairs of elements are multiplied as
// they are and summed in float32. The instruction takes subnormal numbers for zero.
#pragma once

#include "panels.h"

namespace pacpu {
namespace {

constexpr int dot_vectors = panel_columns / width;
constexpr int dot_rows = 8;  // times dot_vectors accumulators: three quarters of the registers

// Adds to `sums` [rows, panel_columns] (or sets, if `is_first`) the products of so many pairs of inputs. `ahead`: memory
// to fetch.
template <int rows>
__attribute__((noinline)) void dot_tile(const BFloat16* x, int64_t x_stride, const BFloat16* weights, int num_pairs,
                                        float* sums, bool is_first, const char* ahead) {
    Floats total[rows][dot_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < dot_vectors; ++v)
            total[r][v] = is_first ? Floats{} : load(sums + r * panel_columns + v * width);
    for (int pair = 0; pair < num_pairs; ++pair) {
        if (ahead) __builtin_prefetch(ahead + pair * int64_t{4 * panel_columns}, 0, 2);
        __m512i weight[dot_vectors];
#pragma GCC unroll 3
        for (int v = 0; v < dot_vectors; ++v) {
            weight[v] = load_bits<__m512i>(weights + 2 * (pair * panel_columns + v * width));
            pin(weight[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            __m512i input = _mm512_set1_epi32(load_pair(x + r * x_stride + 2 * pair));
            pin(input);
#pragma GCC unroll 3
            for (int v = 0; v < dot_vectors; ++v)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)input, (__m512bh)weight[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < dot_vectors; ++v) store(sums + r * panel_columns + v * width, total[r][v]);
}

using DotTile = void (*)(const BFloat16*, int64_t, const BFloat16*, int, float*, bool, const char*);

constexpr DotTile dot_tiles[dot_rows + 1] = {nullptr,     dot_tile<1>, dot_tile<2>, dot_tile<3>, dot_tile<4>,
                                             dot_tile<5>, dot_tile<6>, dot_tile<7>, dot_tile<8>};

// A product's rows, or some of them, with some of the matrix's panels.
void dot_block(const Linear& p, int begin_panel, int end_panel, float* scratch) {
    const int num_pairs = (p.in_features + 1) / 2;
    float* const sums = scratch;
    const BFloat16* x = p.x;
    int64_t x_stride = p.x_stride;
    if (p.in_features % 2) {  // a copy, with a zero behind the last input
        auto* copy = (BFloat16*)(scratch + p.rows * panel_columns);
        const int64_t copy_stride = int64_t{2} * num_pairs;
        for (int r = 0; r < p.rows; ++r) {
            __builtin_memcpy(copy + r * copy_stride, x + r * x_stride, p.in_features * sizeof(BFloat16));
            copy[r * copy_stride + p.in_features] = BFloat16{0};
        }
        x = copy;
        x_stride = copy_stride;
    }
    over_tiles(p, begin_panel, end_panel, dot_rows, sums, [&](const PanelTile& t) {
        dot_tiles[t.rows](x + t.row * x_stride + 2 * t.first_pair, x_stride, t.weights, t.num_pairs,
                          sums + t.row * panel_columns, t.first_pair == 0, t.ahead);
    });
}

void dot_linear(const Linear& p, int begin_panel, int end_panel, float* scratch) {
    in_blocks_of_rows(p, [&](const Linear& block) { dot_block(block, begin_panel, end_panel, scratch); });
}

}  // namespace
}  // namespace pacpu
