// Products of rows with packed 4-bit matrices. An element is (code - zero) * scale, or a number of MXFP4 times a power of two,
// rounded to the type of the rows; sums run in float32. Compiled for several instruction sets: it must not define any inline function with external linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace pacpu {

// A packed matrix is cut into panels of so many of its outputs; the last one is padded with arbitrary codes.
constexpr int code_columns = 8;

// Inputs are cut into blocks of 128, the last one padded. Bits 4 j to 4 j + 3 of word i of a block: input 16 j + i. Inputs
// of a run, those of one j, share a scale and a zero point.
constexpr int block_words = 16, run_inputs = 16, block_runs = 8, block_inputs = block_runs * run_inputs;

// So many blocks are decoded at a time: 1,024 inputs of a panel are 32 KiB of floats, which the level-1 cache about holds.
constexpr int stretch_blocks = 8;

// So many rows are multiplied with a decoded stretch: 512 KiB of floats, which the level-2 cache holds. If it does not hold
// all inputs of the rows, so many panels take a stretch one after the other.
constexpr int max_code_rows = 128, cached_input_bytes = max_code_rows * stretch_blocks * block_inputs * 4, panels_at_once = 6;

static constexpr int code_panels(int out_features) { return (out_features + code_columns - 1) / code_columns; }
static constexpr int code_blocks(int in_features) { return (in_features + block_inputs - 1) / block_inputs; }

struct CodeMatrix {
    int in_features, out_features, group_size;  // groups of a multiple of run_inputs divide the inputs
    const uint32_t* codes;                      // [panels, blocks, code_columns, block_words]
    DType scale_type;
    const void* scales;    // [panels, groups, code_columns]; in MXFP4 uint8: 2^(scale - 127), 255 is NaN
    const uint8_t* zeros;  // [panels, groups, code_columns]; nullptr in MXFP4
    const int32_t* order;  // [in]: column i of codes multiplies input order[i]; nullptr: input i
};

static inline const uint32_t* codes_of(const CodeMatrix& m, int panel, int block) {
    return m.codes + (int64_t{panel} * code_blocks(m.in_features) + block) * code_columns * block_words;
}

// y = x W^T + bias. All but the codes have one type.
struct CodeLinear {
    CodeMatrix matrix;
    int rows;
    const void* x;
    int64_t x_stride;
    const void* bias;  // [out] or nullptr
    void* y;
    int64_t y_stride;
    void* inputs;  // [rows, code_input_stride]: x as the kernel multiplies it, float or BFloat16
};

// Of `inputs`, in elements: whole blocks, and two cache lines more, which keep rows apart in the cache.
static constexpr int64_t code_input_stride(int in_features) { return int64_t{code_blocks(in_features)} * block_inputs + 32; }

// Whole cache lines.
static constexpr size_t aligned_floats(size_t count) { return (count + 15) / 16 * 16; }

static constexpr size_t code_scratch_floats(int rows, int in_features) {
    return aligned_floats(size_t(code_blocks(in_features)) * block_runs) + stretch_blocks * block_inputs * code_columns +
           size_t(rows < max_code_rows ? rows : max_code_rows) * panels_at_once * code_columns;
}

// By DType. First the rows are brought into `inputs`, then every panel is multiplied. `scratch`: code_scratch_floats floats,
// aligned to 64 bytes.
struct CodeKernels {
    int input_bytes[num_dtypes];  // of an element of `inputs`
    void (*take_inputs[num_dtypes])(const CodeLinear&, int begin_row, int end_row);
    void (*multiply[num_dtypes])(const CodeLinear&, int begin_panel, int end_panel, float* scratch);
    // Writes the elements of panels, columns in the order of codes, to `out` [out_features, in_features].
    void (*write_out[num_dtypes])(const CodeMatrix&, int begin_panel, int end_panel, void* out, float* scratch);
};

}  // namespace pacpu
