// The native kernel's arithmetic for bf16 with AVX-512 BF16: pairs of elements are multiplied as they are and summed in
// float32. Queries are bf16 in the first place; weights are rounded to bf16 and summed as rounded. The instruction takes
// subnormal numbers for zero.
#pragma once

#include "walk.h"

namespace pacpu {
namespace {

struct DotBF16 {
    static constexpr int element_bytes = sizeof(BFloat16);

    static PACPU_INLINE Floats dot(Floats sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }

    // To nearest even; a weight is between 0 and 1, or NaN.
    static PACPU_INLINE Floats round(Floats weights) {
        const auto rounded = (Shorts)_mm512_cvtneps_pbh(weights);
        return (Floats)(__builtin_convertvector(rounded, Words) << 16);
    }

    // Of a row's 32 elements at `at`, those that it has.
    static PACPU_INLINE __mmask32 lanes_of_row(int at, int dim) { return dim - at >= 32 ? ~0u : (1u << (dim - at)) - 1; }

    template <int heads, typename Rows>
    static PACPU_INLINE void score(const Segment& segment, int first_head, const Rows& rows, float* scores) {
        constexpr int lanes = lanes_for(heads), tokens = width / lanes, row_tile = min_of(tokens, max_row_tile);
        const int dim = segment.head_dim;
        const BFloat16* queries = (const BFloat16*)segment.raw_queries + (ptrdiff_t)first_head * dim;
        for (int first = 0; first < rows.num_tokens; first += tokens) {
            Floats sums[width] = {};
#pragma GCC unroll 4
            for (int from = 0; from < tokens; from += row_tile) {
                for (int at = 0; at < dim; at += 32) {
                    const __mmask32 mask = lanes_of_row(at, dim);
                    if (rows.ahead)
#pragma GCC unroll 4
                        for (int t = from; t < from + row_tile; ++t) rows.prefetch_key(first + t, at * element_bytes);
                    __m512i q[heads];
#pragma GCC unroll 4
                    for (int h = 0; h < heads; ++h) pin(q[h] = _mm512_maskz_loadu_epi16(mask, queries + h * dim + at));
#pragma GCC unroll 4
                    for (int t = from; t < from + row_tile; ++t) {
                        const __m512i key = _mm512_maskz_loadu_epi16(mask, (const BFloat16*)rows.key(first + t) + at);
#pragma GCC unroll 4
                        for (int h = 0; h < heads; ++h) sums[t * lanes + h] = dot(sums[t * lanes + h], key, q[h]);
                    }
                }
            }
            store(scores + first * lanes, sum_lanes(sums) * segment.scale);
        }
    }

    // Adds the weighted V of a chunk to `blocks` times 32 elements of the output. Two tokens' rows are interleaved, which
    // leaves the 32 elements in an order of their own until `finish`.
    template <int heads, int blocks, typename Rows>
    static PACPU_INLINE void weigh_blocks(const Segment& segment, const Rows& rows, const float* pairs,
                                          const float* corrections, int at, float* output) {
        constexpr int lanes = lanes_for(heads);
        Floats sums[heads][2 * blocks];
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < 2 * blocks; ++c)
                sums[h][c] = load(output + h * segment.padded_dim + at + c * width) * corrections[h];
        for (int t = 0; t < rows.num_tokens; t += 2) {
            const BFloat16* even = (const BFloat16*)rows.value(t) + at;
            const bool has_odd = t + 1 < rows.num_tokens;
            const BFloat16* odd = has_odd ? (const BFloat16*)rows.value(t + 1) + at : even;
#pragma GCC unroll 4
            for (int b = 0; b < blocks; ++b) {
                const __mmask32 mask = lanes_of_row(at + 32 * b, segment.head_dim);
                if (rows.ahead) {
                    rows.prefetch_value(t, (at + 32 * b) * element_bytes);
                    rows.prefetch_value(t + 1, (at + 32 * b) * element_bytes);
                }
                const __m512i first = _mm512_maskz_loadu_epi16(mask, even + 32 * b);
                const __m512i second = _mm512_maskz_loadu_epi16(has_odd ? mask : 0, odd + 32 * b);
                const __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h) {
                    const __m512i weights = (__m512i)splat_bits(pairs + t * lanes + h);
                    sums[h][2 * b] = dot(sums[h][2 * b], low, weights);
                    sums[h][2 * b + 1] = dot(sums[h][2 * b + 1], high, weights);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < 2 * blocks; ++c) store(output + h * segment.padded_dim + at + c * width, sums[h][c]);
    }

    static PACPU_INLINE __m512i splat_bits(const float* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, sizeof bits);
        return _mm512_set1_epi32(bits);
    }

    template <int heads, typename Rows>
    static PACPU_INLINE void weigh(const Segment& segment, const Rows& rows, float* weights, const float* corrections,
                                   float* output) {
        constexpr int lanes = lanes_for(heads), blocks = heads <= 2 ? 4 : 2;
        // An even token's weight shares its lane with the next token's: the latter in the upper half.
        for (int i = 0; i < rows.num_tokens * lanes; i += width) {
            const Words upper = (Words)next_token<lanes>(load(weights + i), std::make_integer_sequence<int, width>{});
            store(weights + i, (Floats)((Words)load(weights + i) >> 16 | upper));
        }
        int at = 0;
        for (; at + 32 * (blocks - 1) < segment.head_dim; at += 32 * blocks)
            weigh_blocks<heads, blocks>(segment, rows, weights, corrections, at, output);
        for (; at < segment.head_dim; at += 32) weigh_blocks<heads, 1>(segment, rows, weights, corrections, at, output);
    }

    template <int lanes, int... lane>
    static PACPU_INLINE Floats next_token(Floats x, std::integer_sequence<int, lane...>) {
        return __builtin_shuffle(x, Ints{(lane + lanes) % width...});
    }

    // Puts the output's elements back in order: each 32 lie as the lower and the upper halves of groups of eight.
    template <int... lane>
    static PACPU_INLINE void order(const Segment& segment, float* output, std::integer_sequence<int, lane...>) {
        const Ints first = {lane % 4 + lane / 8 * 4 + lane / 4 % 2 * width...}, second = first + 8;
        for (ptrdiff_t at = 0; at < (ptrdiff_t)segment.num_kv_heads * segment.group * segment.padded_dim; at += 32) {
            const Floats low = load(output + at), high = load(output + at + width);
            store(output + at, __builtin_shuffle(low, high, first));
            store(output + at + width, __builtin_shuffle(low, high, second));
        }
    }

    static PACPU_INLINE void finish(const Segment& segment, float* output) {
        order(segment, output, std::make_integer_sequence<int, width>{});
    }
};

}  // namespace
}  // namespace pacpu
