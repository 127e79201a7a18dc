// The native kernel's way through a segment: one pass of flash-decoding, the same for all arithmetic.
//
// The context is walked in chunks of 32 tokens, and within a chunk from KV head to KV head, because that is the order of
// memory: a block holds all heads side by side. For each head: scores of the chunk, one step of the online softmax,
// weighted sum of V. The query heads of a group share a pass, so K and V come from memory and are widened once.
//
// While a head's chunk is worked on, the lines of the next one (the next head's, at the last head the next chunk's
// first, at the last chunk the next segment's) are prefetched: the hardware cannot guess where a block table points, and
// where several heads share K and V it waits for their arithmetic. Where nothing is shared, some processors keep up by
// themselves within a block, and more prefetches get in their way; others halve their speed without. Processors of one
// maker differ in this, so it is measured, and the caller says how.
#pragma once

#include "vectors.h"

namespace pacpu {
namespace {

constexpr int chunk_tokens = 32;
constexpr int cache_line = 64;
constexpr int max_row_tile = 4;  // rows of K read side by side

constexpr int min_of(int a, int b) { return a < b ? a : b; }

// The K rows of a chunk for the segment's first KV head. Padded with the last row, so that tiles and prefetches need
// no special case at the end. A segment that starts within a block has a shorter first chunk, so that the others begin
// where blocks do.
struct Chunk {
    const char* keys[chunk_tokens];
    int num_tokens;
};

PACPU_INLINE void locate_chunk(const Segment& segment, int first_token, int row_bytes, Chunk& chunk) {
    const int place = segment.first_slot + first_token;
    int block = place / segment.block_size, slot = place % segment.block_size;
    const int n = min_of(segment.num_tokens - first_token, chunk_tokens - place % chunk_tokens);
    for (int i = 0; i < n; ++block, slot = 0) {
        const char* row = segment.keys + segment.blocks[block] * segment.block_bytes + (ptrdiff_t)slot * row_bytes;
        for (const int end = min_of(n, i + segment.block_size - slot); i < end; ++i, row += row_bytes) chunk.keys[i] = row;
    }
    for (int i = n; i < chunk_tokens; ++i) chunk.keys[i] = chunk.keys[n - 1];
    chunk.num_tokens = n;
}

// A chunk under one KV head, and where to find what comes next; `ahead` is null if nothing does or is asked for.
template <int locality>  // of the prefetches, as __builtin_prefetch has it
struct ChunkRows {
    const char* const* keys;
    ptrdiff_t offset = 0;    // from keys[t] to the K of this head
    ptrdiff_t value_offset;  // from keys[t] to the V of this head
    const char* const* ahead;
    ptrdiff_t ahead_offset = 0, ahead_value_offset = 0;
    int num_tokens;

    ChunkRows(const char* const* keys, ptrdiff_t value_offset, int num_tokens)
        : keys(keys), value_offset(value_offset), ahead(keys), num_tokens(num_tokens) {}

    PACPU_INLINE const char* key(int t) const { return keys[t] + offset; }
    PACPU_INLINE const char* value(int t) const { return keys[t] + value_offset; }
    PACPU_INLINE void prefetch_key(int t, int byte) const {
        __builtin_prefetch(ahead[t] + ahead_offset + byte, 0, locality);
    }
    PACPU_INLINE void prefetch_value(int t, int byte) const {
        __builtin_prefetch(ahead[t] + ahead_value_offset + byte, 0, locality);
    }
};

// How many lanes `heads` query heads take side by side: a power of two.
constexpr int lanes_for(int heads) { return heads <= 2 ? heads : heads <= 4 ? 4 : heads <= 8 ? 8 : 16; }

// One step of the online softmax for `heads` query heads, whose scores of a chunk lie token by token, `lanes` to a
// token. Scores become weights (`round` may coarsen them; what is summed is what is used), those beyond the chunk's end
// zero as far as vectors reach. `corrections`, one for each lane, are the factors for what was summed before.
template <int lanes, typename Round>
PACPU_INLINE void softmax_step(float* scores, int num_tokens, int heads, float* max, float* sum, float* corrections,
                               Round round) {
    static_assert(lanes <= width, "a token's heads fit a vector");
    constexpr int tokens = width / lanes;
    const int vectors = (num_tokens + tokens - 1) / tokens;
    for (int i = num_tokens * lanes; i < vectors * width; ++i) scores[i] = -__builtin_inff();
    const Floats old_max = repeat<lanes>(load(max));
    Floats new_max = old_max;
    for (int i = 0; i < vectors; ++i) new_max = maximum(load(scores + i * width), new_max);
    new_max = reduce<lanes>(new_max, [](Floats a, Floats b) { return maximum(a, b); });
    Floats total = {};
    for (int i = 0; i < vectors; ++i) {
        const Floats weights = round(exp_nonpositive(load(scores + i * width) - new_max));
        total += weights;
        store(scores + i * width, weights);
    }
    total = reduce<lanes>(total, [](Floats a, Floats b) { return a + b; });
    const Floats correction = exp_nonpositive(old_max - new_max);
    total += repeat<lanes>(load(sum)) * correction;
    float results[3][width];
    store(results[0], new_max);
    store(results[1], total);
    store(results[2], correction);
    __builtin_memcpy(max, results[0], heads * sizeof(float));
    __builtin_memcpy(sum, results[1], heads * sizeof(float));
    __builtin_memcpy(corrections, results[2], lanes * sizeof(float));
}

// Arithmetic that keeps its sums in vector registers: up to 4 heads at a time.
template <typename Arithmetic>
struct InRegisters {
    static constexpr int element_bytes = Arithmetic::element_bytes;

    explicit InRegisters(const Segment&) {}

    template <typename Rows>
    PACPU_INLINE void attend_kv_head(const Segment& segment, int kv_head, Rows rows, SoftmaxState state) {
        for (int head = 0; head < segment.group; head += 4) {
            const int first = kv_head * segment.group + head;
            switch (segment.group - head) {
                case 1: attend_heads<1>(segment, first, rows, state); break;
                case 2: attend_heads<2>(segment, first, rows, state); break;
                case 3: attend_heads<3>(segment, first, rows, state); break;
                default: attend_heads<4>(segment, first, rows, state);
            }
            rows.ahead = nullptr;
        }
    }

    PACPU_INLINE void finish(const Segment& segment, float* output) { Arithmetic::finish(segment, output); }

private:
    template <int heads, typename Rows>
    PACPU_INLINE void attend_heads(const Segment& segment, int first, const Rows& rows, SoftmaxState state) {
        constexpr int lanes = lanes_for(heads);
        alignas(64) float weights[chunk_tokens * lanes];
        float corrections[lanes];
        Arithmetic::template score<heads>(segment, first, rows, weights);
        softmax_step<lanes>(weights, rows.num_tokens, heads, state.max + first, state.sum + first, corrections,
                            Arithmetic::round);
        Arithmetic::template weigh<heads>(segment, rows, weights, corrections,
                                          state.output + (ptrdiff_t)first * segment.padded_dim);
    }
};

// `Math` does a chunk under one KV head; it lives as long as the segment.
template <typename Math, int locality>
void walk(const Segment& segment, const Segment* next, SoftmaxState state) {
    const int num_heads = segment.num_kv_heads * segment.group, row_bytes = segment.head_dim * Math::element_bytes;
    const ptrdiff_t value_offset = (ptrdiff_t)segment.block_size * row_bytes;
    for (int h = 0; h < num_heads; ++h) {
        state.max[h] = -__builtin_inff();
        state.sum[h] = 0;
    }
    __builtin_memset(state.output, 0, sizeof(float) * num_heads * segment.padded_dim);
    Math math(segment);
    Chunk chunks[2];
    locate_chunk(segment, 0, row_bytes, chunks[0]);
    for (int next_token = 0, turn = 0; next_token < segment.num_tokens; turn ^= 1) {
        const Chunk& chunk = chunks[turn];
        Chunk* following = &chunks[turn ^ 1];
        next_token += chunk.num_tokens;
        if (next_token < segment.num_tokens) {
            locate_chunk(segment, next_token, row_bytes, *following);
        } else if (next) {
            locate_chunk(*next, 0, row_bytes, *following);
        } else {
            following = nullptr;
        }
        ChunkRows<locality> rows(chunk.keys, value_offset, chunk.num_tokens);
        if (segment.prefetch == Prefetch::none) rows.ahead = nullptr;
        for (int kv_head = 0; kv_head < segment.num_kv_heads; ++kv_head) {
            rows.ahead_offset = rows.offset + segment.head_bytes;
            if (kv_head == segment.num_kv_heads - 1) {
                rows.ahead = following ? following->keys : nullptr;
                rows.ahead_offset = 0;
            }
            rows.ahead_value_offset = rows.ahead_offset + value_offset;
            math.attend_kv_head(segment, kv_head, rows, state);
            rows.offset += segment.head_bytes;
            rows.value_offset += segment.head_bytes;
        }
    }
    math.finish(segment, state.output);
}

// Each way of prefetching has code of its own, so that the innermost loops choose nothing.
template <typename Math>
void attend(const Segment& segment, const Segment* next, SoftmaxState state) {
    constexpr int first_level = 3, second_level = 2;
    if (segment.prefetch == Prefetch::level1)
        walk<Math, first_level>(segment, next, state);
    else
        walk<Math, second_level>(segment, next, state);
}

}  // namespace
}  // namespace pacpu
