// A stretch of the context that the llamafile kernel works on at a time, and how the next one is prefetched meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace pacpu {
namespace {

constexpr int tile = 16;           // the product sums multiples of this
constexpr int chunk_tokens = 256;  // at most, between steps of the online softmax: long, since sums end with a reduction
constexpr int cache_line = 64;

// The rows of a chunk under the first KV head: K of each token; V is value_offset elements further on.
template <typename T>
struct Chunk {
    const T* keys[chunk_tokens];
    int num_tokens = 0, head_dim = 0, block_size = 1, first_slot = 0;
    ptrdiff_t value_offset = 0;

    Chunk() = default;

    // The chunk at a token of the segment. All chunks of a segment are about equally long: a short one is inefficient.
    Chunk(const Segment& segment, int first_token)
        : head_dim(segment.head_dim),
          block_size(segment.block_size),
          first_slot((segment.first_slot + first_token) % block_size),
          value_offset(static_cast<ptrdiff_t>(block_size) * head_dim) {
        const int num_chunks = (segment.num_tokens + chunk_tokens - 1) / chunk_tokens;
        const int equal_share = ((segment.num_tokens + num_chunks - 1) / num_chunks + tile - 1) / tile * tile;
        const int remaining = segment.num_tokens - first_token;
        num_tokens = remaining < equal_share ? remaining : equal_share;
        const int32_t* block = segment.blocks + (segment.first_slot + first_token) / block_size;
        for (int t = 0, slot = first_slot; t < num_tokens; ++block, slot = 0) {
            const T* row = reinterpret_cast<const T*>(segment.keys + *block * segment.block_bytes);
            row += static_cast<ptrdiff_t>(slot) * head_dim;
            for (; t < num_tokens && slot < block_size; ++t, ++slot, row += head_dim) keys[t] = row;
        }
    }

    // How many tokens from t on, at most `most`, lie one after another in memory.
    int run(int t, int most) const {
        const int in_block = block_size - (first_slot + t) % block_size, in_chunk = num_tokens - t;
        const int length = in_block < in_chunk ? in_block : in_chunk;
        return length < most ? length : most;
    }
};

// Prefetches a chunk under one KV head little by little, in the order of memory. Into the L2 cache: a chunk is larger
// than L1, and from there prefetches would push out what is being worked on (half the speed).
template <typename T>
class Prefetcher {
public:
    // Spreads all of `chunk` over `work` units of work on other data.
    Prefetcher(const Chunk<T>& chunk, ptrdiff_t offset, int work)
        : chunk_(chunk),
          offset_(offset),
          bytes_per_work_(2.0f * chunk.num_tokens * chunk.head_dim * sizeof(T) / work) {}

    // To be called after so many units of work.
    inline __attribute__((always_inline)) void advance(int work) {
        budget_ += static_cast<float>(work) * bytes_per_work_;
        int lines = static_cast<int>(budget_) / cache_line;
        budget_ -= static_cast<float>(lines * cache_line);
        while (lines > 0) {
            if (at_ == end_ && !next_piece()) return;
            const int left = static_cast<int>((end_ - at_) / cache_line), count = left < lines ? left : lines;
            for (int i = 0; i < count; ++i) __builtin_prefetch(at_ + i * cache_line, 0, 2);
            at_ += count * cache_line;
            lines -= count;
        }
    }

private:
    // Goes on to the V of these tokens, or to the K of the next.
    bool next_piece() {
        if (first_ == chunk_.num_tokens) return false;
        const int tokens = chunk_.run(first_, chunk_tokens);
        const T* piece = chunk_.keys[first_] + offset_ + (is_value_ ? chunk_.value_offset : 0);
        at_ = reinterpret_cast<const char*>(piece);
        const ptrdiff_t bytes = static_cast<ptrdiff_t>(tokens) * chunk_.head_dim * static_cast<ptrdiff_t>(sizeof(T));
        end_ = at_ + (bytes + cache_line - 1) / cache_line * cache_line;
        if (is_value_) first_ += tokens;
        is_value_ = !is_value_;
        return true;
    }

    const Chunk<T>& chunk_;
    const ptrdiff_t offset_;
    const float bytes_per_work_;
    float budget_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
    int first_ = 0;
    bool is_value_ = false;
};

}  // namespace
}  // namespace pacpu
