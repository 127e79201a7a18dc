// Attention over codes for the compiler's default target, so on every CPU. Queries and weights have 15 bits.
#include "walk.h"

namespace pacpu {
namespace {

struct Portable {
    static constexpr int largest_weight = 0x7fff;
    struct Weights {
        int32_t weights[chunk_tokens];
    };

    static PACPU_INLINE void put_query(char (*fours)[16], Ints x) {
        const auto elements = __builtin_convertvector(x, Shorts);
        __builtin_memcpy(fours, &elements, sizeof elements);
    }

    static PACPU_INLINE void put_weights(Weights& weights, int vector, Floats x) {
        const Floats rounded = x > 0 ? x + 0.5f : Floats{};  // NaN shows in the sum of weights
        const Ints whole = __builtin_convertvector(rounded, Ints);
        __builtin_memcpy(weights.weights + vector * width, &whole, sizeof whole);
    }

    template <int heads, int way>
    static PACPU_INLINE void score(const Query* queries, int dim, const Tiles& chunk, float (*scores)[chunk_tokens]) {
        for (int tile = 0; tile < chunk_tiles; ++tile) {
            uint32_t sums[heads][tile_tokens];  // which may wrap around on their way
            for (int h = 0; h < heads; ++h)
                for (uint32_t& sum : sums[h]) sum = queries[h].offset;
            for (ptrdiff_t at = 0; at < dim; at += 4) {
                prefetch_line<way>(chunk.ahead[tile] + at * tile_tokens);
                const auto* keys = (const uint8_t*)chunk.tiles[tile] + at * tile_tokens;
                for (int h = 0; h < heads; ++h) {
                    int16_t q[4];
                    __builtin_memcpy(q, queries[h].fours + 2 * at, sizeof q);
                    for (int t = 0; t < tile_tokens; ++t)
                        sums[h][t] += keys[4 * t] * q[0] + keys[4 * t + 1] * q[1] + keys[4 * t + 2] * q[2] + keys[4 * t + 3] * q[3];
                }
            }
            for (int h = 0; h < heads; ++h)
                for (int t = 0; t < tile_tokens; ++t)
                    scores[h][tile * tile_tokens + t] = (float)(int32_t)sums[h][t] * queries[h].scale;
        }
    }

    template <int heads, int way>
    static PACPU_INLINE void weigh(const Tiles& chunk, int dim, const Weights* weights, const float* before, const float* now,
                                   float* output, int padded_dim) {
        constexpr int columns = 8;
        for (int at = 0; at < dim; at += columns) {
            int32_t sums[heads][columns] = {};
            for (int quad = 0; quad < chunk_quads; ++quad) {
                const ptrdiff_t offset = values_at(dim) + 4 * (quad % 4 * dim + at);
                prefetch_line<way>(chunk.ahead[quad / 4] + offset);
                const auto* values = (const int8_t*)chunk.tiles[quad / 4] + offset;
                for (int h = 0; h < heads; ++h) {
                    const int32_t* w = weights[h].weights + 4 * quad;
                    for (int c = 0; c < columns; ++c)
                        sums[h][c] += values[4 * c] * w[0] + values[4 * c + 1] * w[1] + values[4 * c + 2] * w[2] + values[4 * c + 3] * w[3];
                }
            }
            for (int h = 0; h < heads; ++h)
                for (int c = 0; c < columns; ++c) {
                    float& to = output[(ptrdiff_t)h * padded_dim + at + c];
                    to = to * before[h] + (float)sums[h][c] * now[h];
                }
        }
    }
};

}  // namespace

const Int8Kernels int8_portable = {attend_int8<Portable>, {codec<float>, codec<Half>, codec<BFloat16>}};

}  // namespace pacpu
