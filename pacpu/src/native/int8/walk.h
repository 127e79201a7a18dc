// Attention over codes, the same for every instruction set but for its products of integers.
//
// As with the other types the context is walked in chunks of 32 tokens, two tiles, and within a chunk from KV head to KV
// head, while the tiles of the next head are prefetched. Scores: codes of K times a query of 15 bits. Weights are taken
// relative to the chunk's own maximum, multiplied by V's scales, and become integers relative to the largest of these.
// Integer sums are exact; they are brought together in float32, chunk by chunk.
#pragma once

#include "codec.h"

namespace pacpu {
namespace {

constexpr int chunk_tiles = 2, chunk_tokens = chunk_tiles * tile_tokens, chunk_quads = chunk_tokens / 4;
constexpr int chunk_vectors = chunk_tokens / width;
constexpr int cache_line = 64;
constexpr int no_prefetch = 0, second_level = 2, first_level = 3;  // the last two as __builtin_prefetch has them

template <int way>
PACPU_INLINE void prefetch_line(const char* p) {
    if constexpr (way != no_prefetch) __builtin_prefetch(p, 0, way);
}

// A query as integers, where its floats were: for each four elements eight bytes of the instruction set's own, behind
// them the scale and what the 128 that K's codes are too large by adds to each sum.
struct Query {
    const char* fours;
    float scale;
    int32_t offsets[2];
};

PACPU_INLINE Query query_of(const Segment& segment, int head) {
    Query query{(const char*)(segment.queries + (ptrdiff_t)head * segment.padded_dim), 0, {}};
    const char* const behind = query.fours + 2 * segment.head_dim;
    __builtin_memcpy(&query.scale, behind, sizeof query.scale);
    __builtin_memcpy(query.offsets, behind + sizeof query.scale, sizeof query.offsets);
    return query;
}

template <typename Math>
void pack_queries(const Segment& segment) {
    const int dim = segment.head_dim;
    // 15 bits, fewer for very large heads: sums of 128 or less times this stay below 2^31.
    const int largest = min_of(127 * 128, (1 << 24) / dim);
    for (int head = 0; head < segment.num_kv_heads * segment.group; ++head) {
        float* const query = segment.queries + (ptrdiff_t)head * segment.padded_dim;
        const float most = largest_magnitude(query, dim);
        const bool is_finite = most < __builtin_inff(), is_nothing = !is_finite || most < 1e-30f;
        const float inverse = is_nothing ? 0 : largest / most;
        const float scale = is_finite ? (is_nothing ? 0 : most / largest) : __builtin_nanf("");
        int32_t offsets[2] = {};
        for (int i = 0; i < dim; i += 4) {  // eight bytes take the place of sixteen: reading stays ahead
            int32_t four[4];
            for (int j = 0; j < 4; ++j) four[j] = is_nothing ? 0 : (int32_t)__builtin_lrintf(query[i + j] * inverse);
            Math::pack_four(four, (char*)query + 2 * i, offsets);
        }
        for (int32_t& offset : offsets) offset *= -128;
        __builtin_memcpy((char*)query + 2 * dim, &scale, sizeof scale);
        __builtin_memcpy((char*)query + 2 * dim + sizeof scale, offsets, sizeof offsets);
    }
}

// The tiles of a chunk under one KV head, and those that are wanted next; the same, where nothing is. Tokens count from
// `begin` to `end`.
struct Tiles {
    const char *tiles[chunk_tiles], *ahead[chunk_tiles];
    int begin, end;
};

// What V's scales make of a chunk's weights.
struct ValueScales {
    Floats relative[chunk_vectors];  // times the largest weight; zero beyond the last token
    float largest;

    PACPU_INLINE ValueScales(const Tiles& chunk, int dim, int largest_weight) {
        Floats most = {};
        for (int i = 0; i < chunk_vectors; ++i) {
            const int token = i * width;
            const char* tile = chunk.tiles[token / tile_tokens];
            const Floats scales = load((const float*)(tile + scales_at(dim)) + tile_tokens + token % tile_tokens);
            relative[i] = is_token(token, chunk) ? scales : Floats{};
            most = larger(relative[i], most);
        }
        largest = reduce<1>(most, larger)[0];
        if (largest < 1e-30f) largest = 1e-30f;  // memory that was never written: zero
        const float factor = largest_weight / largest;
        for (int i = 0; i < chunk_vectors; ++i) relative[i] *= factor;
    }

    // Of the tokens from `first` on, lane by lane, whether there are such.
    static PACPU_INLINE Ints is_token(int first, const Tiles& chunk) {
        const Ints places = lanes(std::make_integer_sequence<int, width>{}) + first;
        return (places >= chunk.begin) & (places < chunk.end);
    }
    template <int... lane>
    static PACPU_INLINE Ints lanes(std::integer_sequence<int, lane...>) {
        return Ints{lane...};
    }
};

// `scores` are without K's scales. Returns by `weights` integers, and the factors for what was summed before and for the
// chunk's sums of integers.
template <typename Math, int heads>
PACPU_INLINE void softmax_step(const Tiles& chunk, int dim, const ValueScales& values, float (*scores)[chunk_tokens],
                               float* max, float* sum, typename Math::Weights* weights, float* before, float* now) {
    alignas(64) float chunk_max[width] = {}, chunk_sum[width] = {};
    Floats key_scales[chunk_vectors];
    for (int i = 0; i < chunk_vectors; ++i) {
        const int token = i * width;
        key_scales[i] = load((const float*)(chunk.tiles[token / tile_tokens] + scales_at(dim)) + token % tile_tokens);
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) {
        Floats score[chunk_vectors], most = splat(-__builtin_inff());
        for (int i = 0; i < chunk_vectors; ++i) {
            const Floats product = load(scores[h] + i * width) * key_scales[i];
            score[i] = ValueScales::is_token(i * width, chunk) ? product : splat(-__builtin_inff());
            most = maximum(score[i], most);
        }
        most = reduce<1>(most, [](Floats a, Floats b) { return maximum(a, b); });
        Floats total = {};
        for (int i = 0; i < chunk_vectors; ++i) {
            const Floats weight = exp_nonpositive(score[i] - most);
            total += weight;
            Math::put_weights(weights[h], i, weight * values.relative[i]);
        }
        chunk_max[h] = most[0];
        chunk_sum[h] = reduce<1>(total, [](Floats a, Floats b) { return a + b; })[0];
    }
    const Floats old_max = load(max), own_max = load(chunk_max), new_max = maximum(own_max, old_max);
    const Floats keep = exp_nonpositive(old_max - new_max), take = exp_nonpositive(own_max - new_max);
    alignas(64) float results[4][width];
    store(results[0], new_max);
    store(results[1], load(sum) * keep + load(chunk_sum) * take);
    store(results[2], keep);
    store(results[3], take * (values.largest / Math::largest_weight));
    __builtin_memcpy(max, results[0], heads * sizeof(float));
    __builtin_memcpy(sum, results[1], heads * sizeof(float));
    __builtin_memcpy(before, results[2], heads * sizeof(float));
    __builtin_memcpy(now, results[3], heads * sizeof(float));
}

template <typename Math, int way, int heads>
PACPU_INLINE void attend_heads(const Segment& segment, int first, const Tiles& chunk, const ValueScales& values,
                               SoftmaxState state) {
    const int dim = segment.head_dim;
    alignas(64) float scores[heads][chunk_tokens];
    typename Math::Weights weights[heads];
    float before[heads], now[heads];
    Query queries[heads];
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) queries[h] = query_of(segment, first + h);
    Math::template score<heads, way>(queries, dim, chunk, scores);
    softmax_step<Math, heads>(chunk, dim, values, scores, state.max + first, state.sum + first, weights, before, now);
    Math::template weigh<heads, way>(chunk, dim, weights, before, now, state.output + (ptrdiff_t)first * segment.padded_dim,
                                     segment.padded_dim);
}

template <typename Math, int way>
PACPU_INLINE void attend_kv_head(const Segment& segment, int kv_head, Tiles chunk, SoftmaxState state) {
    for (int tile = 0; tile < chunk_tiles; ++tile)
        for (int byte = 0; byte < 2 * cache_line; byte += cache_line)
            prefetch_line<way>(chunk.ahead[tile] + scales_at(segment.head_dim) + byte);
    const ValueScales values(chunk, segment.head_dim, Math::largest_weight);
    for (int head = 0; head < segment.group; head += 4) {
        const int first = kv_head * segment.group + head;
        switch (segment.group - head) {
            case 1: attend_heads<Math, way, 1>(segment, first, chunk, values, state); break;
            case 2: attend_heads<Math, way, 2>(segment, first, chunk, values, state); break;
            case 3: attend_heads<Math, way, 3>(segment, first, chunk, values, state); break;
            default: attend_heads<Math, way, 4>(segment, first, chunk, values, state);
        }
        for (int tile = 0; tile < chunk_tiles; ++tile) chunk.ahead[tile] = chunk.tiles[tile];  // has come
    }
}

// The first KV head's tiles of the chunk that begins with a tile; the last one twice, where there is no second.
PACPU_INLINE void locate(const Segment& segment, int first_tile, const char** tiles) {
    const int tiles_per_block = segment.block_size / tile_tokens;
    const int last = (segment.first_slot + segment.num_tokens - 1) / tile_tokens;
    for (int i = 0; i < chunk_tiles; ++i) {
        const int tile = min_of(first_tile + i, last);
        tiles[i] = segment.keys + segment.blocks[tile / tiles_per_block] * segment.block_bytes +
                   tile % tiles_per_block * tile_bytes(segment.head_dim);
    }
}

template <typename Math, int way>
void walk(const Segment& segment, const Segment* next, SoftmaxState state) {
    const int num_heads = segment.num_kv_heads * segment.group;
    for (int h = 0; h < num_heads; ++h) {
        state.max[h] = -__builtin_inff();
        state.sum[h] = 0;
    }
    __builtin_memset(state.output, 0, sizeof(float) * num_heads * segment.padded_dim);
    pack_queries<Math>(segment);
    const char* tiles[2][chunk_tiles];
    const int first_tile = segment.first_slot / tile_tokens, end = segment.first_slot + segment.num_tokens;
    locate(segment, first_tile, tiles[0]);
    for (int slot = first_tile * tile_tokens, turn = 0; slot < end; slot += chunk_tokens, turn ^= 1) {
        const char **here = tiles[turn], **following = tiles[turn ^ 1];
        const bool is_last = slot + chunk_tokens >= end;
        if (!is_last) locate(segment, slot / tile_tokens + chunk_tiles, following);
        if (is_last && next) locate(*next, next->first_slot / tile_tokens, following);
        Tiles chunk;
        chunk.begin = slot < segment.first_slot ? segment.first_slot - slot : 0;
        chunk.end = min_of(end - slot, chunk_tokens);
        for (int kv_head = 0; kv_head < segment.num_kv_heads; ++kv_head) {
            const ptrdiff_t offset = kv_head * segment.head_bytes;
            for (int i = 0; i < chunk_tiles; ++i) {
                chunk.tiles[i] = here[i] + offset;
                chunk.ahead[i] = chunk.tiles[i] + segment.head_bytes;
                if (kv_head == segment.num_kv_heads - 1) chunk.ahead[i] = is_last && !next ? chunk.tiles[i] : following[i];
            }
            attend_kv_head<Math, way>(segment, kv_head, chunk, state);
        }
    }
}

template <typename Math>
void attend_int8(const Segment& segment, const Segment* next, SoftmaxState state) {
    switch (segment.prefetch) {
        case Prefetch::none: return walk<Math, no_prefetch>(segment, next, state);
        case Prefetch::level2: return walk<Math, second_level>(segment, next, state);
        case Prefetch::level1: return walk<Math, first_level>(segment, next, state);
    }
}

}  // namespace
}  // namespace pacpu
