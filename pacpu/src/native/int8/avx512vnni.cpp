// Attention over codes with AVX-512 VNNI: products of unsigned with signed bytes, four at a time. A query is two signed
// bytes, high * 128 + low, a weight two unsigned ones, high * 256 + low.
#include "walk.h"

namespace pacpu {
namespace {

// As assembly: GCC 12 copies the accumulator of the intrinsic twice and spills.
PACPU_INLINE void dot(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

PACPU_INLINE __m512i splat_four(const void* p) { return _mm512_set1_epi32(load_bits<int32_t>(p)); }

// high * 2^shift + low, which fits 32 bits, while its parts may not.
PACPU_INLINE Floats as_floats(__m512i high, int shift, __m512i low) {
    return __builtin_convertvector((Ints)(((Words)high << shift) + (Words)low), Floats);
}

struct Vnni {
    static constexpr int largest_weight = 0xffff;
    struct Weights {
        alignas(64) char quads[chunk_quads][16];  // four high bytes, four low ones; the rest is not read
    };

    // Of each four words the second bytes, then the first ones.
    static PACPU_INLINE void put_bytes(char (*fours)[16], __m512i words) {
        const __m512i bytes = _mm512_set4_epi32(0, 0, 0x0c080400, 0x0d090501);
        _mm512_store_si512(fours, _mm512_shuffle_epi8(words, bytes));
    }

    static PACPU_INLINE void put_query(char (*fours)[16], Ints x) {
        const Ints high = (x + 64) >> 7, low = x - high * 128;
        put_bytes(fours, (__m512i)(high << 8 | (low & 0xff)));
    }

    static PACPU_INLINE void put_weights(Weights& weights, int vector, Floats x) {
        put_bytes(weights.quads + 4 * vector, _mm512_maskz_cvtps_epi32((__mmask16)-1, x));
    }

    template <int heads, int way>
    static PACPU_INLINE void score(const Query* queries, int dim, const Tiles& chunk, float (*scores)[chunk_tokens]) {
        __m512i high[heads][chunk_tiles], low[heads][chunk_tiles];
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
            for (int i = 0; i < chunk_tiles; ++i) {
                high[h][i] = _mm512_setzero_si512();
                low[h][i] = _mm512_set1_epi32(queries[h].offset);
            }
        for (ptrdiff_t at = 0; at < dim; at += 4) {
            __m512i keys[chunk_tiles];
#pragma GCC unroll 2
            for (int i = 0; i < chunk_tiles; ++i) {
                keys[i] = _mm512_loadu_si512(chunk.tiles[i] + at * tile_tokens);
                prefetch_line<way>(chunk.ahead[i] + at * tile_tokens);
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h) {
                const __m512i q_high = splat_four(queries[h].fours + 2 * at);
                const __m512i q_low = splat_four(queries[h].fours + 2 * at + 4);
#pragma GCC unroll 2
                for (int i = 0; i < chunk_tiles; ++i) {
                    dot(high[h][i], keys[i], q_high);
                    dot(low[h][i], keys[i], q_low);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 2
            for (int i = 0; i < chunk_tiles; ++i)
                store(scores[h] + i * tile_tokens, as_floats(high[h][i], 7, low[h][i]) * queries[h].scale);
    }

    // Elements from `at` on, 16 to a column; those beyond the head's last one go where nothing is read.
    template <int heads, int columns, int way>
    static PACPU_INLINE void weigh_columns(const char* const* quads, const char* const* ahead, ptrdiff_t at,
                                           const Weights* weights, const float* before, const float* now, float* output,
                                           int padded_dim) {
        __m512i high[heads][columns], low[heads][columns];
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) high[h][c] = low[h][c] = _mm512_setzero_si512();
#pragma GCC unroll 1
        for (int quad = 0; quad < chunk_quads; ++quad) {
            __m512i values[columns];
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) {
                values[c] = _mm512_loadu_si512(quads[quad] + 4 * (at + c * width));
                prefetch_line<way>(ahead[quad] + 4 * (at + c * width));
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; ++h) {
                const __m512i w_high = splat_four(weights[h].quads[quad]), w_low = splat_four(weights[h].quads[quad] + 4);
#pragma GCC unroll 4
                for (int c = 0; c < columns; ++c) {
                    dot(high[h][c], w_high, values[c]);
                    dot(low[h][c], w_low, values[c]);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h)
#pragma GCC unroll 4
            for (int c = 0; c < columns; ++c) {
                float* const to = output + (ptrdiff_t)h * padded_dim + at + c * width;
                store(to, load(to) * before[h] + as_floats(high[h][c], 8, low[h][c]) * now[h]);
            }
    }

    template <int heads, int way>
    static PACPU_INLINE void weigh(const Tiles& chunk, int dim, const Weights* weights, const float* before, const float* now,
                                   float* output, int padded_dim) {
        constexpr int columns = heads <= 2 ? 4 : 2;
        const char *quads[chunk_quads], *ahead[chunk_quads];
#pragma GCC unroll 8
        for (int quad = 0; quad < chunk_quads; ++quad) {
            const ptrdiff_t offset = values_at(dim) + quad % 4 * 4 * dim;
            quads[quad] = chunk.tiles[quad / 4] + offset;
            ahead[quad] = chunk.ahead[quad / 4] + offset;
        }
        int at = 0;
        for (; at + columns * width <= dim; at += columns * width)
            weigh_columns<heads, columns, way>(quads, ahead, at, weights, before, now, output, padded_dim);
        for (; at < dim; at += width)
            weigh_columns<heads, 1, way>(quads, ahead, at, weights, before, now, output, padded_dim);
    }
};

}  // namespace

const Int8Kernels int8_avx512vnni = {attend_int8<Vnni>, {codec<float>, codec<Half>, codec<BFloat16>}};

}  // namespace pacpu
