// The native kernel for AMX, in bf16 with 2 to 16 query heads per KV head; others go to AVX-512 BF16, as do the other
// types. A tile of 16 tokens is multiplied by all of a group's queries, 32 elements at a time, and the weights of 32
// tokens by V. The numbers are those of dot_bf16.h.
#include "dot_bf16.h"
#include "tiles.h"
#include "variants.h"

namespace pacpu {
namespace {

// Tiles 0 to 3 are sums of the output, 16 elements of all heads each.
constexpr int weight_tile = 4, score_tile = 5, cache_tile = 6, query_tile = 7;
constexpr int tile_tokens = 16, tile_elements = 32, columns_at_once = 64;
constexpr int max_query_bytes = 1 << 16;  // of a segment, on the stack
static_assert(chunk_tokens % tile_elements == 0, "the weights of 32 tokens fill a tile's rows");


PACPU_INLINE int num_dim_tiles(const Segment& segment) { return (segment.head_dim + tile_elements - 1) / tile_elements; }
PACPU_INLINE int query_bytes_per_kv_head(const Segment& segment) {
    return num_dim_tiles(segment) * tile_elements * 2 * lanes_for(segment.group);
}

// Queries as right-hand sides: [num_kv_heads, pairs of elements, lanes], pairs side by side; lanes without a head are 0.
void arrange_queries(const Segment& segment, uint32_t* arranged) {
    const int lanes = lanes_for(segment.group), num_pairs = num_dim_tiles(segment) * tile_elements / 2;
    __builtin_memset(arranged, 0, (size_t)segment.num_kv_heads * query_bytes_per_kv_head(segment));
    const char* query = (const char*)segment.raw_queries;
    for (int kv_head = 0; kv_head < segment.num_kv_heads; ++kv_head, arranged += num_pairs * lanes)
        for (int h = 0; h < segment.group; ++h, query += 2 * segment.head_dim)
            for (int pair = 0; pair < segment.head_dim / 2; ++pair)
                __builtin_memcpy(arranged + pair * lanes + h, query + 4 * pair, 4);
}

// Scores of 16 tokens, token by token.
template <typename Rows>
PACPU_INLINE void score_tokens(const Segment& segment, const Rows& rows, int first, const uint32_t* queries,
                                float* scores) {
    const int row_bytes = 2 * segment.head_dim, lanes = lanes_for(segment.group);
    const char* start = rows.key(first);
    const bool is_in_place = segment.block_size % tile_tokens == 0 && first + tile_tokens <= rows.num_tokens &&
                             rows.key(first + tile_tokens - 1) - start == (tile_tokens - 1) * row_bytes &&
                             segment.head_dim % tile_elements == 0;
    alignas(64) char copy[tile_tokens][max_tile_bytes];
    zero_tile<score_tile>();
    for (int at = 0; at < num_dim_tiles(segment); ++at) {
        if (rows.ahead)
            for (int t = 0; t < tile_tokens; ++t) rows.prefetch_key(first + t, at * max_tile_bytes);
        if (is_in_place) {
            load_tile<cache_tile>(start + at * max_tile_bytes, row_bytes);
        } else {
            const __mmask32 mask = DotBF16::lanes_of_row(at * tile_elements, segment.head_dim);
            for (int t = 0; t < tile_tokens; ++t)
                _mm512_store_si512(copy[t], _mm512_maskz_loadu_epi16(mask, rows.key(first + t) + at * max_tile_bytes));
            load_tile<cache_tile>(copy, max_tile_bytes);
        }
        load_tile<query_tile>(queries + (ptrdiff_t)at * tile_elements / 2 * lanes, lanes * 4);
        dot_tiles<score_tile, cache_tile, query_tile>();
    }
    store_tile<score_tile>(scores, lanes * 4);
}

// Two tokens' rows interleaved, 64 elements of them, to 4 tiles of 16 pairs of tokens; tokens beyond the end are zero.
template <typename Rows>
PACPU_INLINE void interleave_values(const Segment& segment, const Rows& rows, int first, int at,
                                    char (*values)[16][max_tile_bytes]) {
    for (int pair = 0; pair < tile_elements / 2; ++pair) {
        const int t = first + 2 * pair;
#pragma GCC unroll 2
        for (int b = 0; b < 2; ++b) {
            const int element = at + b * tile_elements;
            const __mmask32 mask = element < segment.head_dim ? DotBF16::lanes_of_row(element, segment.head_dim) : 0;
            if (rows.ahead && mask) {
                rows.prefetch_value(t, 2 * element);
                rows.prefetch_value(t + 1, 2 * element);
            }
            const __m512i even = _mm512_maskz_loadu_epi16(t < rows.num_tokens ? mask : 0, rows.value(t) + 2 * element);
            const __m512i odd =
                _mm512_maskz_loadu_epi16(t + 1 < rows.num_tokens ? mask : 0, rows.value(t + 1) + 2 * element);
            _mm512_store_si512(values[2 * b][pair], _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(values[2 * b + 1][pair], _mm512_unpackhi_epi16(even, odd));
        }
    }
}

// Adds 16 columns of the output.
template <int tile>
PACPU_INLINE void weigh_columns(float* output, ptrdiff_t stride, const char (*values)[max_tile_bytes]) {
    load_tile<tile>(output, stride);
    load_tile<cache_tile>(values, max_tile_bytes);
    dot_tiles<tile, weight_tile, cache_tile>();
    store_tile<tile>(output, stride);
}

struct TilesBF16 {
    static constexpr int element_bytes = sizeof(BFloat16);

    explicit TilesBF16(const Segment& segment) {
        arrange_queries(segment, queries);
        const int lanes = lanes_for(segment.group);
        TileConfig config;
        for (int tile = 0; tile < 4; ++tile) config.set(tile, segment.group, max_tile_bytes);
        config.set(weight_tile, segment.group, tile_elements * 2);
        config.set(score_tile, tile_tokens, lanes * 4);
        config.set(cache_tile, 16, max_tile_bytes);
        config.set(query_tile, tile_elements / 2, lanes * 4);
        configure_tiles(config);
    }
    ~TilesBF16() { release_tiles(); }

    template <typename Rows>
    PACPU_INLINE void attend_kv_head(const Segment& segment, int kv_head, const Rows& rows, SoftmaxState state) {
        switch (lanes_for(segment.group)) {
            case 2: attend_group<2>(segment, kv_head, rows, state); break;
            case 4: attend_group<4>(segment, kv_head, rows, state); break;
            case 8: attend_group<8>(segment, kv_head, rows, state); break;
            default: attend_group<16>(segment, kv_head, rows, state);
        }
    }

    PACPU_INLINE void finish(const Segment& segment, float* output) { DotBF16::finish(segment, output); }

private:
    template <int lanes, typename Rows>
    PACPU_INLINE void attend_group(const Segment& segment, int kv_head, const Rows& rows, SoftmaxState state) {
        alignas(64) float weights[chunk_tokens * lanes];
        alignas(64) uint16_t arranged[max_tile_rows][tile_elements];
        alignas(64) char values[4][16][max_tile_bytes];
        float corrections[lanes];
        const int first_head = kv_head * segment.group;
        const uint32_t* arranged_queries = queries + (ptrdiff_t)kv_head * query_bytes_per_kv_head(segment) / 4;
        for (int first = 0; first < rows.num_tokens; first += tile_tokens)
            score_tokens(segment, rows, first, arranged_queries, weights + first * lanes);
        for (int i = 0; i < rows.num_tokens * lanes; i += width) store(weights + i, load(weights + i) * segment.scale);
        softmax_step<lanes>(weights, rows.num_tokens, segment.group, state.max + first_head, state.sum + first_head,
                            corrections, DotBF16::round);
        float* output = state.output + (ptrdiff_t)first_head * segment.padded_dim;
        for (int h = 0; h < segment.group; ++h)
            for (int d = 0; d < segment.padded_dim; d += width) {
                float* p = output + (ptrdiff_t)h * segment.padded_dim + d;
                store(p, load(p) * corrections[h]);
            }
        const ptrdiff_t stride = segment.padded_dim * sizeof(float);
        for (int first = 0; first < rows.num_tokens; first += tile_elements) {
            for (int h = 0; h < segment.group; ++h)
                for (int t = 0; t < tile_elements; ++t) {
                    uint32_t bits = 0;
                    if (first + t < rows.num_tokens) __builtin_memcpy(&bits, weights + (first + t) * lanes + h, sizeof bits);
                    arranged[h][t] = (uint16_t)(bits >> 16);
                }
            load_tile<weight_tile>(arranged, sizeof arranged[0]);
            for (int at = 0; at < segment.head_dim; at += columns_at_once) {
                interleave_values(segment, rows, first, at, values);
                weigh_columns<0>(output + at, stride, values[0]);
                weigh_columns<1>(output + at + 16, stride, values[1]);
                if (at + tile_elements >= segment.head_dim) break;
                weigh_columns<2>(output + at + 32, stride, values[2]);
                weigh_columns<3>(output + at + 48, stride, values[3]);
            }
        }
    }

    alignas(64) uint32_t queries[max_query_bytes / 4];
};

void attend_bf16(const Segment& segment, const Segment* next, SoftmaxState state) {
    const bool fits = segment.group >= 2 && segment.group <= max_tile_rows &&
                      segment.num_kv_heads * (int64_t)query_bytes_per_kv_head(segment) <= max_query_bytes;
    return fits ? attend<TilesBF16>(segment, next, state) : attend<InRegisters<DotBF16>>(segment, next, state);
}

}  // namespace

const AttendSegment native_amx = attend_bf16;

}  // namespace pacpu
