// The KV cache in eight bits: K and V as codes, with a scale per token and KV head. pacpu/int8.py says the same in Python.
//
// A tile is 16 tokens of one KV head. A block of 16 n tokens holds n tiles of its first head, then those of the next one:
//   K  uint8, code + 128, [head_dim / 4, 16 tokens, 4]
//   V  int8, [4, head_dim, 4 tokens]
//   16 float scales of K, 16 of V
// So a register of K holds four elements of each of 16 tokens, one of V four tokens of each of 16 elements, and products
// of bytes need no sums across a register.
//
// This header is compiled into translation units with different instruction sets: it must not define any inline function
// with external linkage.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace pacpu {

constexpr int tile_tokens = 16;
constexpr int largest_code = 127;
constexpr float least_scale = 1.0f / (1 << 23);  // codes of tiny rows then lie on the grid of fp16's subnormal numbers

// Offsets in a tile, and its size.
static constexpr int64_t values_at(int head_dim) { return int64_t{tile_tokens} * head_dim; }
static constexpr int64_t scales_at(int head_dim) { return 2 * values_at(head_dim); }
static constexpr int64_t tile_bytes(int head_dim) { return scales_at(head_dim) + 2 * tile_tokens * int64_t{sizeof(float)}; }

// Of one KV head in a block.
static constexpr int64_t int8_head_bytes(int block_size, int head_dim) {
    return block_size / tile_tokens * tile_bytes(head_dim);
}

// For one element type. A row becomes codes thus, in float32, with the same bits on every instruction set:
//   scale = max(max |x| / 127, least_scale) to 16 significant bits; code = x / scale to the nearest, ties to even
// both by products with reciprocals. code * scale, rounded to any of our types, becomes the same codes and scale again:
// the largest code is 127, 127 * scale rounds to the largest element it came from, and rounding moves no code by half.
// A row with an infinity or a NaN has NaN for its scale.
struct Int8Codec {
    // One token's K and V [head_dim] into a slot of a tile.
    void (*store)(const void* k, const void* v, int head_dim, char* tile, int slot);
    // A tile's K and V, both [16, head_dim].
    void (*pack)(const void* k, const void* v, int head_dim, char* tile);
    // K and V [num_tokens, head_dim] of the first tokens of a tile.
    void (*unpack)(const char* tile, int head_dim, int num_tokens, void* k, void* v);
};

// Of one instruction set. `attend` reads only `queries` of a segment, whatever their type was, and overwrites them.
struct Int8Kernels {
    AttendSegment attend;
    Int8Codec codecs[num_dtypes];  // by DType
};

// Those of the instruction set in use, or AVX2's in place of VNNI's.
const Int8Kernels& int8_kernels(bool is_narrow = false);

extern const Int8Kernels int8_portable;
#if defined(__x86_64__)
extern const Int8Kernels int8_avx2;
extern const Int8Kernels int8_avx512vnni;
#endif

}  // namespace pacpu
