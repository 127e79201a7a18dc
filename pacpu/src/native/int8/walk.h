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
constexpr float log_2 = 0.69314718f;
constexpr int no_prefetch = 0, second_level = 2, first_level = 3;  // the last two as __builtin_prefetch has them

template <int way>
PACPU_INLINE void prefetch_line(const char* p) {
    if constexpr (way != no_prefetch) __builtin_prefetch(p, 0, way);
}

// A query as integers, where its floats were: for each four elements eight bytes of the instruction set's own, behind
// them the scale and minus what the 128 that K's codes are too large by adds to the sum.
struct Query {
    const char* fours;
    float scale;
    int32_t offset;
};

PACPU_INLINE Query query_of(const Segment& segment, int head) {
    Query query{(const char*)(segment.queries + (ptrdiff_t)head * segment.padded_dim), 0, 0};
    const char* const behind = query.fours + 2 * segment.head_dim;
    __builtin_memcpy(&query.scale, behind, sizeof query.scale);
    __builtin_memcpy(&query.offset, behind + sizeof query.scale, sizeof query.offset);
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
        const float scale = is_finite ? (is_nothing ? 0 : most / largest / log_2) : __builtin_nanf("");
        const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
        Ints total{};
        for (int i = 0; i < dim; i += width) {  // eight bytes take the place of sixteen: reading stays ahead
            const Floats quotient = is_nothing ? Floats{} : load(query + i) * inverse;
            const Ints whole = (Ints)(quotient + magic) - (Ints)magic;
            total += whole;
            alignas(64) char fours[width / 4][16];
            Math::put_query(fours, whole);
            for (int j = 0; j < width / 4; ++j) __builtin_memcpy((char*)query + 2 * i + 8 * j, fours[j], 8);
        }
        int32_t offset = 0;
        for (int lane = 0; lane < width; ++lane) offset -= 128 * total[lane];
        __builtin_memcpy((char*)query + 2 * dim, &scale, sizeof scale);
        __builtin_memcpy((char*)query + 2 * dim + sizeof scale, &offset, sizeof offset);
    }
}

// The tiles of a chunk under one KV head, and those that are wanted next; the same, where nothing is. Tokens count from
// `begin` to `end`.
struct Tiles {
    const char *tiles[chunk_tiles], *ahead[chunk_tiles];
    int begin, end;
};

// Lane by lane, all bits where there is a token, of those from `first` on.
template <int... lane>
PACPU_INLINE Ints are_tokens(int first, const Tiles& chunk, std::integer_sequence<int, lane...>) {
    return (Ints{lane...} >= chunk.begin - first) & (Ints{lane...} < chunk.end - first);
}

// What all heads of a chunk share. Slots without a token may hold anything.
struct Scales {
    Floats keys[chunk_vectors];
    Floats limits[chunk_vectors];  // of scores: infinity, and where there is no token minus infinity
    Floats values[chunk_vectors];  // relative to `largest_value` and times the largest weight
    float largest_value;

    PACPU_INLINE Scales(const Tiles& chunk, int dim, int largest_weight) {
        Floats most = {};
        for (int i = 0; i < chunk_vectors; ++i) {
            const int token = i * width;
            const float* scales = (const float*)(chunk.tiles[token / tile_tokens] + scales_at(dim)) + token % tile_tokens;
            const Ints is_token = are_tokens(token, chunk, std::make_integer_sequence<int, width>{});
            keys[i] = load(scales);
            limits[i] = (Floats)((Ints)splat(__builtin_inff()) | (~is_token & (Ints)splat(-0.0f)));
            values[i] = (Floats)((Ints)load(scales + tile_tokens) & is_token);
            most = larger(values[i], most);
        }
        largest_value = reduce<1>(most, larger)[0];
        if (largest_value < 1e-30f) largest_value = 1e-30f;  // memory that was never written: zero
        const float factor = largest_weight / largest_value;
        for (int i = 0; i < chunk_vectors; ++i) values[i] *= factor;
    }
};

// 2^x for x <= 0 within 1.1e-4 of itself, a twentieth of what int8 costs, and exact for whole x; never less than 2^-125;
// NaN stays NaN.
PACPU_INLINE Floats exp2_nonpositive(Floats x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats y = maximum(splat(-125.0f), x);
    const Floats shifted = y + magic;
    const Floats r = y - (shifted - magic);
    Floats p = splat(5.50090578e-2f);
    p = p * r + 0.242210975f;
    p = p * r + 0.693282898f;
    p = p * r + 1.0f;
    return (Floats)((Words)p + ((Words)shifted << 23));
}

// Lane i of the result is made of all lanes of x[i % 4], of the first so many; with a single one every lane is.
template <int heads, typename Function>
PACPU_INLINE Floats reduce_heads(const Floats* x, Function function) {
    if constexpr (heads == 1) {
        return reduce<1>(x[0], function);
    } else {
        constexpr auto all = std::make_integer_sequence<int, width>{};
        const Floats first = fold<1>(x[0], x[1], function, all);
        const Floats second = heads == 2 ? first : fold<1>(x[2], x[heads - 1], function, all);
        return reduce<4>(fold<2>(first, second, function, all), function);
    }
}

template <int head, int... lane>
PACPU_INLINE Floats of_head(Floats x, std::integer_sequence<int, lane...>) {
    return __builtin_shuffle(x, Ints{lane / 4 * 4 + head...});
}

// A chunk's weights for the heads from `head` on, given the largest score of each, lane by lane; adds up by `totals`.
template <typename Math, int head, int heads>
PACPU_INLINE void weigh_tokens(const Scales& scales, const Floats (*scores)[chunk_vectors], Floats most,
                               typename Math::Weights* weights, Floats* totals) {
    if constexpr (head < heads) {
        const Floats own = of_head<head>(most, std::make_integer_sequence<int, width>{});
        totals[head] = Floats{};
        for (int i = 0; i < chunk_vectors; ++i) {
            const Floats weight = exp2_nonpositive(scores[head][i] - own);
            totals[head] += weight;
            Math::put_weights(weights[head], i, weight * scales.values[i]);
        }
        weigh_tokens<Math, head + 1, heads>(scales, scores, most, weights, totals);
    }
}

// `products` are scores in units of log 2, without K's scales. Returns by `weights` integers, and the factors for what was
// summed before and for the chunk's sums of integers. A score that is NaN counts as infinite, and its weight is NaN.
template <typename Math, int heads>
PACPU_INLINE void softmax_step(const Scales& scales, float (*products)[chunk_tokens], float* max, float* sum,
                               typename Math::Weights* weights, float* before, float* now) {
    Floats scores[heads][chunk_vectors], most[heads], totals[heads];
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h)
        for (int i = 0; i < chunk_vectors; ++i) {
            const Floats score = load(products[h] + i * width) * scales.keys[i];
            scores[h][i] = score < scales.limits[i] ? score : scales.limits[i];
            most[h] = i ? maximum(scores[h][i], most[h]) : scores[h][i];
        }
    const Floats own_max = reduce_heads<heads>(most, [](Floats a, Floats b) { return maximum(a, b); });
    weigh_tokens<Math, 0, heads>(scales, scores, own_max, weights, totals);
    const Floats total = reduce_heads<heads>(totals, [](Floats a, Floats b) { return a + b; });
    const Floats old_max = load(max), rise = own_max - old_max, one = splat(1.0f);
    const Floats lesser = exp2_nonpositive((Floats)((Ints)rise | (Ints)splat(-0.0f)));
    const Floats keep = rise > 0 ? lesser : one, take = rise > 0 ? one : lesser;
    alignas(64) float results[4][width];
    store(results[0], maximum(own_max, old_max));
    store(results[1], load(sum) * keep + total * take);
    store(results[2], keep);
    store(results[3], take * (scales.largest_value / Math::largest_weight));
    __builtin_memcpy(max, results[0], heads * sizeof(float));
    __builtin_memcpy(sum, results[1], heads * sizeof(float));
    __builtin_memcpy(before, results[2], heads * sizeof(float));
    __builtin_memcpy(now, results[3], heads * sizeof(float));
}

template <typename Math, int way, int heads>
PACPU_INLINE void attend_heads(const Segment& segment, int first, const Tiles& chunk, const Scales& scales,
                               SoftmaxState state) {
    const int dim = segment.head_dim;
    alignas(64) float products[heads][chunk_tokens];
    typename Math::Weights weights[heads];
    float before[heads], now[heads];
    Query queries[heads];
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) queries[h] = query_of(segment, first + h);
    Math::template score<heads, way>(queries, dim, chunk, products);
    softmax_step<Math, heads>(scales, products, state.max + first, state.sum + first, weights, before, now);
    Math::template weigh<heads, way>(chunk, dim, weights, before, now, state.output + (ptrdiff_t)first * segment.padded_dim,
                                     segment.padded_dim);
}

template <typename Math, int way>
PACPU_INLINE void attend_kv_head(const Segment& segment, int kv_head, Tiles chunk, SoftmaxState state) {
    for (int tile = 0; tile < chunk_tiles; ++tile)
        for (int byte = 0; byte < 2 * cache_line; byte += cache_line)
            prefetch_line<way>(chunk.ahead[tile] + scales_at(segment.head_dim) + byte);
    const Scales scales(chunk, segment.head_dim, Math::largest_weight);
    for (int head = 0; head < segment.group; head += 4) {
        const int first = kv_head * segment.group + head;
        switch (segment.group - head) {
            case 1: attend_heads<Math, way, 1>(segment, first, chunk, scales, state); break;
            case 2: attend_heads<Math, way, 2>(segment, first, chunk, scales, state); break;
            case 3: attend_heads<Math, way, 3>(segment, first, chunk, scales, state); break;
            default: attend_heads<Math, way, 4>(segment, first, chunk, scales, state);
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
    for (int h = 0; h < num_heads; ++h) state.max[h] *= log_2;
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
