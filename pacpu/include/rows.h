// Work on rows, one per token: a Llama layer's products with packed matrices, norms, rotations and activations.
//
// Rows are contiguous within and `..._stride` elements apart. Sums run in float32. This header is compiled into
// translation units with different instruction sets: it must not define any inline function with external linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace pacpu {

// A packed matrix is cut into panels of so many of its rows (columns of the product). A panel holds, pair of inputs by
// pair of inputs, the two weights of each of its columns side by side; what is beyond the matrix is zero.
constexpr int panel_columns = 48;

// A product is computed in blocks of rows and pairs of inputs whose floats the level-2 cache holds: with 1536 inputs 776 KiB
// of rows, and 384 KiB of a panel's widened weights.
constexpr int max_block_rows = 128, max_block_pairs = 1024;

// y = x W^T + bias, in bfloat16.
struct Linear {
    int rows, in_features, out_features;
    const BFloat16* x;
    int64_t x_stride;
    const BFloat16* packed;  // [ceil(out / panel_columns), ceil(in / 2), panel_columns, 2]
    const BFloat16* bias;    // [out] or nullptr
    BFloat16* y;
    int64_t y_stride;
};

// y = (x + addend) / sqrt(mean((x + addend)^2) + eps) * weight. With an addend, x becomes x + addend, rounded, and
// y is made of that.
struct RmsNorm {
    int rows, size;
    void* x;
    int64_t x_stride;
    const void* addend;  // or nullptr
    int64_t addend_stride;
    const void* weight;  // [size]
    float eps;
    void* y;
    int64_t y_stride;
};

// x = x * cos + (x with the halves of each head exchanged) * sin, in place; `angles` [rows, 2, head_dim]: cos, signed sin.
struct Rotary {
    int rows, num_heads, head_dim;
    void* x;
    int64_t x_stride;
    const float* angles;
    int64_t angles_stride;
};

// y = silu(x[:size]) * x[size:]
struct SiluAndMul {
    int rows, size;
    const void* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride;
};

// Puts row i of k and v [rows, num_kv_heads, head_dim] into slot offsets[i] of block blocks[i] of a layer's KV cache.
struct StoreKV {
    int rows, num_kv_heads, block_size;
    int64_t slot_bytes;  // one token's K of one head
    const char* k;
    const char* v;
    int64_t k_stride_bytes, v_stride_bytes;
    char* kv_cache;  // [num_blocks, num_kv_heads, 2, block_size, head_dim]
    const int64_t* blocks;
    const int64_t* offsets;
};
void store_kv(const StoreKV& problem, int begin, int end);

// One instruction set's functions; each does the rows (of a linear: the panels) from `begin` to `end`. By DType.
struct RowKernels {
    // nullptr: there is none. `scratch`: linear_scratch_floats(problem) floats, aligned to 64 bytes.
    void (*linear)(const Linear&, int begin_panel, int end_panel, float* scratch);
    void (*rms_norm[num_dtypes])(const RmsNorm&, int begin, int end);
    void (*rotary[num_dtypes])(const Rotary&, int begin, int end);
    void (*silu_and_mul[num_dtypes])(const SiluAndMul&, int begin, int end);
};

// From a widened row to the next: whole cache lines, and one more, which keeps a tile's rows apart in the cache.
static constexpr int64_t padded_inputs(int64_t in_features) { return (in_features + 15) / 16 * 16 + 16; }

static constexpr size_t linear_scratch_floats(const Linear& p) {
    const int rows = p.rows < max_block_rows ? p.rows : max_block_rows;
    return rows * (padded_inputs(p.in_features) + panel_columns) + 2 * max_block_pairs * panel_columns;
}

// Those of the instruction set in use.
const RowKernels& row_kernels();

// Whether `linear` is the fastest way to multiply bfloat16 here: there are wide vectors and no matrix unit.
bool linear_is_fastest();

extern const RowKernels rows_portable;
#if defined(__x86_64__)
extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;
extern const RowKernels rows_avx512bf16;
#endif

}  // namespace pacpu
