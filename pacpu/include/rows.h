// Work on rows, one per token: a Llama layer's products with packed matrices, norms, rotations and activations.
//
// Rows are contiguous within and `..._stride` elements apart. Sums run in float32. This header is compiled into
// translation units with different instruction sets: it must not define any inline function with external linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"
#include "quantised.h"

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

// y = (x + addend) / sqrt(mean((x + addend)^2) + eps) * (offset + weight). With an addend, x becomes x + addend, rounded, and
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
    float offset = 0.0f;
};

// Each head of x [rows, num_heads, head_dim] becomes its norm, as above, with a weight of its own.
struct HeadNorms {
    int rows, num_heads, head_dim;
    void* x;
    int64_t x_stride, element_bytes;
    const void* weights;  // [num_heads, head_dim]
    float eps;
    float offset = 0.0f;
};
void norm_heads(const HeadNorms& problem, void (*rms_norm)(const RmsNorm&, int, int), int begin, int end);

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

// y = (up + 1) * gate * sigmoid(alpha * gate), with gate = x[:size] of at most `limit`, and up = x[size:] from -limit to limit.
struct ClampedSwiGLU {
    SiluAndMul rows;
    float limit, alpha;
};

// y[row] = the sum over slots of x[places[row, slot]] * factors[row, slot], slot by slot; a place of -1 adds nothing.
struct AddSlots {
    int rows, size, slots;
    const void* x;  // [..., size]
    const int32_t* places;
    const float* factors;
    void* y;
    int64_t y_stride;
};

// The column of each row's highest value, the first of equals; NaN counts as the highest.
struct Argmax {
    int rows, size;  // size is at least 1
    const void* x;
    int64_t x_stride;
    int64_t* found;  // [rows]
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

// K and V of a prompt are packed in panels of so many tokens; scores are computed for a stretch of panels at a time.
constexpr int key_panel = 64, key_stretch = 512;

constexpr int prompt_rows_at_once = 16;  // most rows of one call of `attend_prompt`

// Attention of a request's last `rows` tokens over its whole context, in bfloat16: row i attends to the last `window`
// tokens up to its own.
struct Prompt {
    int rows, num_heads, num_kv_heads, context, head_dim;  // head_dim is even
    float scale;
    const BFloat16* q;  // [rows, num_heads, head_dim]
    int64_t q_stride;
    const BFloat16* k;  // [num_kv_heads, context, head_dim]
    int64_t k_head_stride, k_stride;
    const BFloat16* v;
    int64_t v_head_stride, v_stride;
    BFloat16* out;  // [rows, num_heads, head_dim]
    int64_t out_stride;
    int window;
    const float* sinks;  // [num_heads], or nullptr: each the score of one more token, whose value is zero
    BFloat16* packed;  // [num_kv_heads, panels, 2, key_panel, padded_dim()]: keys by pairs of elements, values of tokens

    int padded_dim() const { return (head_dim + key_panel - 1) / key_panel * key_panel; }
    int num_panels() const { return (context + key_panel - 1) / key_panel; }
    BFloat16* packed_keys(int kv_head, int panel) const {
        return packed + (int64_t{kv_head} * num_panels() + panel) * 2 * key_panel * padded_dim();
    }
    BFloat16* packed_values(int kv_head, int panel) const {
        return packed_keys(kv_head, panel) + key_panel * padded_dim();
    }
    size_t packed_floats() const { return size_t(num_kv_heads) * num_panels() * key_panel * padded_dim(); }
    size_t scratch_floats(int rows_at_once) const {
        const size_t heads = size_t(rows_at_once) * (num_heads / num_kv_heads);
        return heads * (key_stretch + padded_dim() + 2) + heads * (head_dim + key_stretch) / 2 + 1;
    }
};

// Rows that follow each other and continue a request's state.
struct StateRun {
    int64_t slot;  // -1: of padding, whose state counts as zero and is not written
    int first_row, num_rows;
    bool is_first;  // the slot counts as zero
};

// Tokens of linear attention: a state [key_dim, value_dim] becomes state * exp(log_decay) + key * written, in float32, where
// written = beta * (value - key * state), of the decayed state. The result is query * state. Keys and queries are scaled to
// length 1, the latter to 1 / sqrt(key_dim). As many value heads follow each other for each key head.
struct DeltaRule {
    int num_key_heads, num_value_heads, key_dim, value_dim;
    const void* q;  // [rows, num_key_heads, key_dim]
    int64_t q_stride;
    const void* k;
    int64_t k_stride;
    const void* v;  // [rows, num_value_heads, value_dim]
    int64_t v_stride;
    const float* log_decay;  // [rows, num_value_heads]
    int64_t log_decay_stride;
    const float* beta;
    int64_t beta_stride;
    float* states;  // [slots, num_value_heads, key_dim, value_dim]
    float* out;     // [rows, num_value_heads, value_dim]
    int64_t out_stride;
};

// Tokens whose queries, keys and values are held at a time.
constexpr int state_tokens = 8;

constexpr int max_taps = 8;

// A convolution takes a run's rows for so many channels at a time: their kept inputs lie side by side.
constexpr int convolved_channels = 128;

// y = SiLU of each channel's products of its last `num_taps` inputs, the row's own included, with its weights.
struct Convolution {
    int num_channels, num_taps;
    const void* x;  // [rows, num_channels]
    int64_t x_stride;
    const void* weight;  // [num_channels, num_taps]
    void* inputs;        // [slots, num_channels, num_taps - 1]: the last ones of each state
    void* y;
    int64_t y_stride;
    const StateRun* runs;
    int num_runs;
};

// One instruction set's functions; each does the rows (of a linear: the panels) from `begin` to `end`. By DType.
struct RowKernels {
    // nullptr: there is none. `scratch`: linear_scratch_floats(problem) floats, aligned to 64 bytes.
    void (*linear)(const Linear&, int begin_panel, int end_panel, float* scratch);
    void (*rms_norm[num_dtypes])(const RmsNorm&, int begin, int end);
    void (*rotary[num_dtypes])(const Rotary&, int begin, int end);
    void (*silu_and_mul[num_dtypes])(const SiluAndMul&, int begin, int end);
    void (*clamped_swiglu[num_dtypes])(const ClampedSwiGLU&, int begin, int end);
    void (*add_slots[num_dtypes])(const AddSlots&, int begin, int end);
    void (*argmax[num_dtypes])(const Argmax&, int begin, int end);
    // `ahead`: a state to fetch meanwhile, or nullptr. `scratch`: delta_scratch_floats(problem) floats.
    void (*delta_rule[num_dtypes])(const DeltaRule&, const StateRun&, int head, const float* ahead, float* scratch);
    void (*convolve[num_dtypes])(const Convolution&, int begin_channel, int end_channel);
    // nullptr: there is none. First every panel of every KV head is packed, then rows are attended, in any order.
    void (*pack_panel)(const Prompt&, int kv_head, int panel);
    void (*attend_prompt)(const Prompt&, int kv_head, int begin_row, int end_row, float* scratch);
    CodeKernels codes;
    // y = x * factor, elements to floats in whole vectors, up to 16, of which the last is filled with zeros; and back.
    void (*widen[num_dtypes])(const void* x, int count, float factor, float* y);
    void (*narrow[num_dtypes])(const float* x, int count, float factor, void* y);
};

// From a widened row to the next: whole cache lines, and one more, which keeps a tile's rows apart in the cache.
static constexpr int64_t padded_inputs(int64_t in_features) { return (in_features + 15) / 16 * 16 + 16; }

static constexpr size_t linear_scratch_floats(const Linear& p) {
    const int rows = p.rows < max_block_rows ? p.rows : max_block_rows;
    return rows * (padded_inputs(p.in_features) + panel_columns) + 2 * max_block_pairs * panel_columns;
}

static constexpr size_t delta_scratch_floats(const DeltaRule& p) {
    const size_t tokens = state_tokens * (2 * padded_inputs(p.key_dim) + padded_inputs(p.value_dim));
    return tokens + size_t(p.key_dim) * p.value_dim;
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
