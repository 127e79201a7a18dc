// Attention over codes with AVX2: bytes are widened to 16 bits, even and odd ones apart, and multiplied in pairs. Queries
// and weights have 15 bits.
#include "walk.h"

namespace pacpu {
namespace {

PACPU_INLINE __m256i splat_pair(const void* p) { return _mm256_set1_epi32(load_bits<int32_t>(p)); }

PACPU_INLINE void add_products(__m256i& sum, __m256i even, __m256i odd, const void* pairs) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, splat_pair(pairs)));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd, splat_pair((const char*)pairs + 4)));
}

struct Avx2 {
    static constexpr int largest_weight = 0x7fff;
    struct Weights {
        alignas(32) char quads[chunk_quads][16];  // tokens 0 and 2, then 1 and 3; the rest is not read
    };

    static PACPU_INLINE void put_query(char (*fours)[16], Ints x) {
        const __m256i bytes = _mm256_set_epi32(0, 0, 0x0d0c0504, 0x09080100, 0, 0, 0x0d0c0504, 0x09080100);
        _mm256_store_si256((__m256i*)fours, _mm256_shuffle_epi8((__m256i)x, bytes));
    }

    static PACPU_INLINE void put_weights(Weights& weights, int vector, Floats x) {
        put_query(weights.quads + 2 * vector, (Ints)_mm256_cvtps_epi32(x));
    }

    template <int heads, int way>
    static PACPU_INLINE void score(const Query* queries, int dim, const Tiles& chunk, float (*scores)[chunk_tokens]) {
        constexpr int halves = tile_tokens / width;
#pragma GCC unroll 1
        for (int tile = 0; tile < chunk_tiles; ++tile) {
            const char *const keys = chunk.tiles[tile], *const ahead = chunk.ahead[tile];
            __m256i sums[heads][halves];
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
                for (int i = 0; i < halves; ++i) sums[h][i] = _mm256_set1_epi32(queries[h].offset);
            for (ptrdiff_t at = 0; at < dim; at += 4) {
                prefetch_line<way>(ahead + at * tile_tokens);
                __m256i even[halves], odd[halves];
#pragma GCC unroll 2
                for (int i = 0; i < halves; ++i) {
                    const __m256i both = _mm256_loadu_si256((const __m256i*)(keys + at * tile_tokens) + i);
                    even[i] = _mm256_and_si256(both, _mm256_set1_epi16(0xff));
                    odd[i] = _mm256_srli_epi16(both, 8);
                }
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
                    for (int i = 0; i < halves; ++i) add_products(sums[h][i], even[i], odd[i], queries[h].fours + 2 * at);
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
                for (int i = 0; i < halves; ++i)
                    store(scores[h] + tile * tile_tokens + i * width, _mm256_cvtepi32_ps(sums[h][i]) * queries[h].scale);
        }
    }

    template <int heads, int columns, int way>
    static PACPU_INLINE void weigh_columns(const Tiles& chunk, int dim, ptrdiff_t at, const Weights* weights,
                                           const float* before, const float* now, float* output, int padded_dim) {
        __m256i sums[heads][columns];
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c) sums[h][c] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int tile = 0; tile < chunk_tiles; ++tile) {
            const ptrdiff_t offset = values_at(dim) + 4 * at;
            const char *values = chunk.tiles[tile] + offset, *ahead = chunk.ahead[tile] + offset;
#pragma GCC unroll 1
            for (int quad = 4 * tile; quad < 4 * tile + 4; ++quad, values += 4 * dim, ahead += 4 * dim) {
#pragma GCC unroll 8
                for (int c = 0; c < columns; c += 2) prefetch_line<way>(ahead + 4 * c * width);
                __m256i even[columns], odd[columns];
#pragma GCC unroll 8
                for (int c = 0; c < columns; ++c) {
                    // A byte further back, even bytes are where odd ones were: this shifts for nothing. K lies before V.
                    even[c] = _mm256_srai_epi16(_mm256_loadu_si256((const __m256i*)(values - 1) + c), 8);
                    odd[c] = _mm256_srai_epi16(_mm256_loadu_si256((const __m256i*)values + c), 8);
                }
#pragma GCC unroll 4
                for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
                    for (int c = 0; c < columns; ++c) add_products(sums[h][c], even[c], odd[c], weights[h].quads[quad]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c) {
                float* const to = output + (ptrdiff_t)h * padded_dim + at + c * width;
                store(to, load(to) * before[h] + _mm256_cvtepi32_ps(sums[h][c]) * now[h]);
            }
    }

    template <int heads, int way>
    static PACPU_INLINE void weigh(const Tiles& chunk, int dim, const Weights* weights, const float* before, const float* now,
                                   float* output, int padded_dim) {
        int at = 0;
        constexpr int columns = heads == 1 ? 4 : 2;
        for (; at + columns * width <= dim; at += columns * width)
            weigh_columns<heads, columns, way>(chunk, dim, at, weights, before, now, output, padded_dim);
        for (; at + 2 * width <= dim; at += 2 * width)
            weigh_columns<heads, 2, way>(chunk, dim, at, weights, before, now, output, padded_dim);
        if (at < dim) weigh_columns<heads, 1, way>(chunk, dim, at, weights, before, now, output, padded_dim);
    }
};

}  // namespace

const Int8Kernels int8_avx2 = {attend_int8<Avx2>, {codec<float>, codec<Half>, codec<BFloat16>}};

}  // namespace pacpu
