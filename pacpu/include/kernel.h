// What a CPU attention kernel is: the contract between the driver (paged_attention.cpp) and the kernels.
//
// The driver cuts a call into segments, a stretch of one sequence's context under some or all KV heads, and hands each
// segment to a kernel. A kernel turns a segment into online-softmax states; it neither owns threads nor stores new
// tokens nor normalises. So a kernel is one function per element type and can be added in a file of its own (plus a line
// in registry.cpp).
//
// Blocks lie anywhere, but all that a segment wants of a block lies together. How a kernel walks its segment decides
// how fast it is: memory gives block after block, all heads of each, far faster than head after head.
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
enum class Isa { portable, avx2, avx512, avx512bf16, amx };
constexpr int num_isas = 5;

// What a kernel asks memory for before it needs it: of a block no more than the beginning, whose place no hardware can
// guess, or all, into the second or the first level of the cache. Which is fastest depends on the processor and on the
// kernel's arithmetic. Results are the same.
enum class Prefetch { none, level2, level1 };

// A stretch of one sequence's context under `num_kv_heads` neighbouring KV heads, each attended by the `group` query
// heads that share it: those of one row, or of several rows that have these blocks in common.
struct Segment {
    float* queries;           // [num_kv_heads, group, padded_dim], multiplied by `scale`, zero beyond head_dim
    const void* raw_queries;  // [num_kv_heads, group, head_dim] in the element type, as the caller gave them
    const char* keys;         // K of the first KV head in block 0 of the cache: [block_size, head_dim], V follows; or tiles
    int64_t head_bytes;       // from a KV head in a block to the next one
    int64_t block_bytes;      // from a block of the cache to the next one
    const int32_t* blocks;    // block ids of this stretch
    int first_slot;           // where in blocks[0] it starts, below block_size; what is before must not count
    int num_tokens;           // >= 1; ceil((first_slot + num_tokens) / block_size) entries of `blocks` are valid
    int block_size;           // tokens per block, >= 1
    int head_dim;             // a positive multiple of 8
    int padded_dim;           // head_dim rounded up to a multiple of 32
    int group;                // query heads per KV head, >= 1, whatever the model's heads
    int num_kv_heads;         // >= 1
    float scale;              // on the scores of raw_queries
    Prefetch prefetch;        // a kernel may do as it likes
};

// Online-softmax states of a segment's query heads, overwritten by the kernel. With scores s_t = <query, K_t>:
// max = max_t s_t, sum = sum_t exp(s_t - max), output = sum_t exp(s_t - max) V_t (FlashAttention, section 3.1).
struct SoftmaxState {
    float* max;     // [num_kv_heads, group]; 16 floats more may be read and written, as with `sum`
    float* sum;     // [num_kv_heads, group]
    float* output;  // [num_kv_heads, group, padded_dim], 64-byte aligned; beyond head_dim unspecified
};

// `next` is the segment the same thread will attend afterwards, or nullptr: a hint for prefetching.
using AttendSegment = void (*)(const Segment& segment, const Segment* next, SoftmaxState state);

struct Kernel {
    const char* name;
    AttendSegment attend[num_dtypes];  // by DType; nullptr where the kernel does not compute in it
    const char* unavailable;           // nullptr, or why the kernel cannot be used here
    const char* limit = nullptr;       // why `attend` lacks some types
    bool spans_kv_heads = false;       // whether it takes segments of more than one KV head
};

// One per kernel file: the kernel's variant for an instruction set that this CPU has.
Kernel native_kernel(Isa isa);
Kernel ispc_kernel(Isa isa);
Kernel llamafile_kernel(Isa isa);

// Readies the native kernel's AMX path, once, on a CPU that has AMX: asks the operating system and compares a small case
// with AVX-512. Returns nullptr, or why AMX must not be used.
const char* native_amx_problem();

}  // namespace pacpu
