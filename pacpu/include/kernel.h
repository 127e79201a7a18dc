// What a CPU attention kernel is: the contract between the driver (paged_attention.cpp) and the kernels.
//
// The driver cuts a call into segments, a stretch of one sequence's context under one KV head, and hands each
// segment to a kernel. A kernel turns a segment into an online-softmax state; it neither owns threads nor
// allocates, stores new tokens, or normalises. So a kernel is one function per element type and can be added in a
// file of its own (plus a line in registry.cpp).
//
// This header is compiled into translation units with different instruction sets: it must not define any inline
// function with external linkage, or the linker might keep the copy that an older CPU cannot run.
#pragma once

#include <cstdint>

namespace pacpu {

enum class DType { float32, float16, bfloat16 };
constexpr int num_dtypes = 3;

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

// Instruction sets, from least to most demanding; a kernel may come in a variant for each.
enum class Isa { portable, avx2, avx512 };
constexpr int num_isas = 3;

// A stretch of one sequence's context under one KV head, attended by the `group` query heads that share it.
struct Segment {
    const float* queries;      // [group, padded_dim], multiplied by the softmax scale, zero beyond head_dim
    const char* keys;          // K of this KV head in block 0 of the cache: [block_size, head_dim] elements, V follows
    int64_t block_bytes;       // from a block of the cache to the next one
    const int32_t* blocks;     // block ids of this stretch; it starts at the first token of blocks[0]
    int num_tokens;            // >= 1; ceil(num_tokens / block_size) entries of `blocks` are valid
    int block_size;            // tokens per block, >= 1
    int head_dim;              // a positive multiple of 8
    int padded_dim;            // head_dim rounded up to a multiple of 16
    int group;                 // query heads per KV head, >= 1
};

// Online-softmax state of a segment, overwritten by the kernel. With scores s_t = <query, K_t>:
// max = max_t s_t, sum = sum_t exp(s_t - max), output = sum_t exp(s_t - max) V_t (FlashAttention, section 3.1).
struct SoftmaxState {
    float* max;     // [group]
    float* sum;     // [group]
    float* output;  // [group, padded_dim], 64-byte aligned; entries beyond head_dim are unspecified
};

// `next` is the segment the same thread will attend afterwards, or nullptr: a hint for prefetching.
using AttendSegment = void (*)(const Segment& segment, const Segment* next, SoftmaxState state);

struct Kernel {
    const char* name;
    AttendSegment attend[num_dtypes];  // by DType
    const char* unavailable;           // nullptr, or why the kernel cannot be used here
};

// One per kernel file: the kernel's variant for an instruction set that this CPU has.
Kernel native_kernel(Isa isa);
Kernel ispc_kernel(Isa isa);

}  // namespace pacpu
