// One layer's decode attention for a batch of requests over a paged KV cache in host memory.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace pacpu {

struct Int8Kernels;  // int8.h

// A validated call. Rows are the first dimension of q, k, v, out and block_tables; strides are in elements.
struct Problem {
    DType dtype;
    int batch, num_heads, num_kv_heads, head_dim, block_size;
    const void *q, *k, *v;
    void* out;
    int64_t q_stride, k_stride, v_stride, out_stride;
    void* kv_cache;  // [num_blocks, num_kv_heads, 2, block_size, head_dim] of `dtype`
    const Int8Kernels* int8;  // or nullptr: of an int8 cache, see int8.h
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* seq_lens;  // including the new token
    float scale;
    int window;          // how many tokens a row attends to at most, the last ones
    const float* sinks;  // [num_heads], or nullptr: each the score of one more token, whose value is zero
    int num_threads;
    Prefetch prefetch;
    int shared_row_cost;  // 1 to 8, see contexts.h; 8: no blocks are shared
};

// Stores the new tokens' K and V, then attends. Block ids are trusted. Throws only std::bad_alloc.
void run(const Problem& problem, const Kernel& kernel);

}  // namespace pacpu
