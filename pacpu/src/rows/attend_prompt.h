// Causal attention of a prompt's rows by the dot products of AVX-512 BF16, with an online softmax over stretches of the
// context (FlashAttention, section 3.1). Scores and sums are float32; the weights of the softmax are rounded to bfloat16.
#pragma once

#include "elements.h"
#include "rows.h"

namespace pacpu {
namespace {

constexpr int attend_vectors = key_panel / width;
constexpr int attend_rows = 6;  // times attend_vectors accumulators: three quarters of the registers

// sums [rows, key_panel] = (or, if `adds`, +=) x [rows, 2 num_pairs] times weights [num_pairs, key_panel, 2]. Rows of
// weights are `pair_stride` elements apart.
template <int rows>
__attribute__((noinline)) void attend_tile(const BFloat16* x, int64_t x_stride, const BFloat16* weights, int64_t pair_stride,
                                           int num_pairs, float* sums, int64_t sums_stride, bool adds) {
    Floats total[rows][attend_vectors];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < attend_vectors; ++v)
            total[r][v] = adds ? load(sums + r * sums_stride + v * width) : Floats{};
    for (int pair = 0; pair < num_pairs; ++pair) {
        __m512i weight[attend_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < attend_vectors; ++v) {
            weight[v] = load_bits<__m512i>(weights + pair * pair_stride + 2 * v * width);
            pin(weight[v]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
            __m512i input = _mm512_set1_epi32(load_pair(x + r * x_stride + 2 * pair));
            pin(input);
#pragma GCC unroll 4
            for (int v = 0; v < attend_vectors; ++v)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)input, (__m512bh)weight[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < attend_vectors; ++v) store(sums + r * sums_stride + v * width, total[r][v]);
}

using AttendTile = void (*)(const BFloat16*, int64_t, const BFloat16*, int64_t, int, float*, int64_t, bool);
constexpr AttendTile attend_tiles[attend_rows + 1] = {nullptr,        attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                      attend_tile<4>, attend_tile<5>, attend_tile<6>};

// All rows of x, in tiles of nearly equal size.
PACPU_INLINE void multiply_rows_with(const BFloat16* x, int64_t x_stride, int rows, const BFloat16* weights,
                                     int64_t pair_stride, int num_pairs, float* sums, int64_t sums_stride, bool adds) {
    const int num_tiles = (rows + attend_rows - 1) / attend_rows;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = rows * tile / num_tiles, count = rows * (tile + 1) / num_tiles - row;
        attend_tiles[count](x + row * x_stride, x_stride, weights, pair_stride, num_pairs, sums + row * sums_stride,
                            sums_stride, adds);
    }
}

// One panel of K and of V, of one KV head: tokens beyond the context, and elements beyond the head, are zero.
void pack_panel(const Prompt& p, int kv_head, int panel) {
    const int first = panel * key_panel, count = min_of(key_panel, p.context - first);
    const BFloat16* k = p.k + kv_head * p.k_head_stride + first * p.k_stride;
    BFloat16* keys = p.packed_keys(kv_head, panel);
    for (int pair = 0; pair < p.head_dim / 2; ++pair)
        for (int t = 0; t < key_panel; ++t) {
            const int32_t both = t < count ? load_pair(k + t * p.k_stride + 2 * pair) : 0;
            __builtin_memcpy(keys + (pair * key_panel + t) * 2, &both, sizeof both);
        }
    const BFloat16* v = p.v + kv_head * p.v_head_stride + first * p.v_stride;
    BFloat16* values = p.packed_values(kv_head, panel);
    for (int t = 0; t < key_panel; t += 2, values += 2 * p.padded_dim())
        for (int d = 0; d < p.padded_dim(); ++d) {
            const bool is_inside = d < p.head_dim;
            values[2 * d] = is_inside && t < count ? v[t * p.v_stride + d] : BFloat16{0};
            values[2 * d + 1] = is_inside && t + 1 < count ? v[(t + 1) * p.v_stride + d] : BFloat16{0};
        }
}

// The rows [begin, end) of the prompt under the query heads of one KV head.
void attend_prompt(const Prompt& p, int kv_head, int begin, int end, float* scratch) {
    const int group = p.num_heads / p.num_kv_heads, rows = (end - begin) * group, padded = p.padded_dim();
    float* const scores = scratch;                                        // [rows, key_stretch]
    float* const sums = scores + rows * key_stretch;                      // [rows, padded]
    float* const maxima = sums + rows * padded;                           // [rows]
    float* const totals = maxima + rows;                                  // [rows]
    auto* const queries = (BFloat16*)(totals + rows);                     // [rows, head_dim]
    BFloat16* const weights = queries + int64_t{rows} * p.head_dim;       // [rows, key_stretch]
    for (int r = 0; r < rows; ++r) {
        __builtin_memcpy(queries + r * p.head_dim,
                         p.q + (begin + r / group) * p.q_stride + (kv_head * group + r % group) * p.head_dim,
                         p.head_dim * sizeof(BFloat16));
        maxima[r] = -__builtin_inff();
        totals[r] = 0;
    }
    for (int i = 0; i < rows * padded; ++i) sums[i] = 0;

    const int before = p.context - p.rows;  // tokens of earlier chunks
    const int reached = before + begin + 1 - p.window, first_reached = reached < 0 ? 0 : reached / key_panel * key_panel;
    for (int first = first_reached; first < before + end; first += key_stretch) {
        const int count = min_of(key_stretch, before + end - first), num_panels = (count + key_panel - 1) / key_panel;
        for (int panel = 0; panel < num_panels; ++panel)
            multiply_rows_with(queries, p.head_dim, rows, p.packed_keys(kv_head, first / key_panel + panel), 2 * key_panel,
                               p.head_dim / 2, scores + panel * key_panel, key_stretch, false);
        for (int r = 0; r < rows; ++r) {
            const int visible = before + begin + r / group + 1 - first;  // of this stretch
            float* score = scores + r * key_stretch;
            BFloat16* weight = weights + r * key_stretch;
            const int stop = num_panels * key_panel, seen = visible < 0 ? 0 : min_of(visible, stop);
            const int left = visible > p.window ? visible - p.window : 0;  // behind by the window
            for (int t = 0; t < left; ++t) score[t] = -__builtin_inff();
            for (int t = seen; t < min_of(stop, (seen + width - 1) / width * width); ++t) score[t] = -__builtin_inff();
            Floats most = splat(maxima[r]);
            for (int t = 0; t < seen; t += width) {
                const Floats scaled = load(score + t) * p.scale;
                store(score + t, scaled);
                most = maximum(most, scaled);
            }
            most = reduce<1>(most, [](Floats a, Floats b) { return maximum(a, b); });
            // No row lacks a visible token in the first stretch, so that its maximum is finite from there on: the last
            // row's window begins less than a panel and the other rows behind the stretch.
            static_assert(key_panel + prompt_rows_at_once <= key_stretch);
            const float correction = exp_nonpositive(splat(maxima[r]) - most)[0];
            maxima[r] = most[0];
            Floats total{};
            int t = 0;
            for (; t < seen; t += width) {
                const Floats e = exp_nonpositive(load(score + t) - most);
                total += e;
                store(weight + t, e);
            }
            for (; t < stop; t += width) store(weight + t, Floats{});
            total = reduce<1>(total, [](Floats a, Floats b) { return a + b; });
            totals[r] = totals[r] * correction + total[0];
            if (first > first_reached && correction != 1.0f)
                for (int d = 0; d < padded; d += width)
                    store(sums + r * padded + d, load(sums + r * padded + d) * correction);
        }
        for (int panel = 0; panel < num_panels; ++panel)
            for (int d = 0; d < padded; d += key_panel)
                multiply_rows_with(weights + panel * key_panel, key_stretch, rows,
                                   p.packed_values(kv_head, first / key_panel + panel) + 2 * d, 2 * padded, key_panel / 2,
                                   sums + d, padded, true);
    }
    for (int r = 0; r < rows; ++r) {
        BFloat16* out = p.out + (begin + r / group) * p.out_stride + (kv_head * group + r % group) * p.head_dim;
        const float sink = p.sinks ? __builtin_expf(p.sinks[kv_head * group + r % group] - maxima[r]) : 0.0f;
        const Floats factor = splat(1.0f / (totals[r] + sink));
        for (int d = 0; d < p.head_dim; d += width)
            store_some(out + d, load(sums + r * padded + d) * factor, min_of(width, p.head_dim - d));
    }
}

}  // namespace
}  // namespace pacpu
