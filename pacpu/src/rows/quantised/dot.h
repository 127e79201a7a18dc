// 4-bit codes as bfloat16 for the dot products of AVX-512 BF16, which take subnormal numbers for zero.
#pragma once

#include "product.h"

namespace pacpu {
namespace {

// A vector has the elements of runs j and j + 4 of a block in turn, as 16-bit halves of a word of codes have them.
struct DotElements {
    using Element = BFloat16;
    using Vector = __m512i;
    static constexpr int lanes = 32, distance = block_runs / 2;

    static PACPU_INLINE void store_vector(BFloat16* p, Vector v) { __builtin_memcpy(p, &v, sizeof v); }
    static PACPU_INLINE Vector load_vector(const BFloat16* p) { return load_bits<__m512i>(p); }
    static PACPU_INLINE Floats multiply_add(Floats sum, Vector x, Vector y) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
    }

    // See WideElements. The values of both runs' groups make one table.
    template <typename Take>
    static PACPU_INLINE void decode(const uint32_t* codes, int num_blocks, const int* group_of_run, const Groups& groups,
                                    Take&& take) {
        const char* ahead = (const char*)(codes + num_blocks * code_columns * block_words);
        const __m512i nibbles = _mm512_set1_epi32(0x000f000f), upper_half = _mm512_set1_epi32(0x00100000);
        __m512i tables[code_columns] = {};
        int low = -1, high = -1;
        for (int block = 0; block < num_blocks; ++block, codes += code_columns * block_words) {
            const int* own = group_of_run + block * block_runs;
#pragma GCC unroll 4
            for (int run = 0; run < distance; ++run) {
                for (int line = 0; line < 2; ++line)
                    __builtin_prefetch(ahead + ((block * distance + run) * 2 + line) * 64, 0, 2);
                if (own[run] != low || own[run + distance] != high) {
                    low = own[run];
                    high = own[run + distance];
                    const float* scales = groups.scales + (low - groups.first) * code_columns;
                    const float* zeros = groups.zeros + (low - groups.first) * code_columns;
                    const int64_t apart = (high - low) * code_columns;
#pragma GCC unroll 8
                    for (int c = 0; c < code_columns; ++c)
                        tables[c] = (__m512i)_mm512_cvtne2ps_pbh(
                            values_of(groups.numbers, scales[c + apart], zeros[c + apart], 0),
                            values_of(groups.numbers, scales[c], zeros[c], 0));
                }
#pragma GCC unroll 8
                for (int c = 0; c < code_columns; ++c) {
                    const __m512i words = (__m512i)(load_bits<Words>(codes + c * block_words) >> 4 * run);
                    const __m512i indices = _mm512_ternarylogic_epi32(words, nibbles, upper_half, 0xea);  // (a & b) | c
                    take(block * distance + run, c, _mm512_permutexvar_epi16(indices, tables[c]));
                }
            }
        }
    }

    // A row in the order of decoded elements.
    static PACPU_INLINE void take_row(const BFloat16* x, const CodeMatrix& m, BFloat16* inputs) {
        BFloat16 gathered[2][run_inputs];
        for (int block = 0; block < code_blocks(m.in_features); ++block)
            for (int run = 0; run < distance; ++run, inputs += lanes) {
                const int first = block * block_inputs + run * run_inputs;
                const BFloat16* low = run_of(x, m, first, gathered[0]);
                const BFloat16* high = run_of(x, m, first + distance * run_inputs, gathered[1]);
                const Words pairs = __builtin_convertvector(load_bits<Shorts>(low), Words) |
                                    __builtin_convertvector(load_bits<Shorts>(high), Words) << 16;
                __builtin_memcpy(inputs, &pairs, sizeof pairs);
            }
    }
};

constexpr CodeKernels dot_code_kernels = PACPU_CODE_KERNELS(DotElements);

}  // namespace
}  // namespace pacpu
