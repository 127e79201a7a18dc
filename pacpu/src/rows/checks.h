// Checks of arrays that all bindings of the work on rows make.
#pragma once

#include <vector>

#include "arguments.h"
#include "rows.h"

namespace pacpu {

DType float_dtype(const Array& array);
void check_bfloat16(const Array& array);

// int64 [rows], each from `least` to below `limit`.
void check_slots(const Array& array, int64_t rows, int64_t limit, int64_t least = 0);

// Refuses sides that a packed matrix cannot have.
std::vector<int64_t> packed_shape(int64_t out_features, int64_t in_features);

// Of a call's parts: threads claim them, so that one which begins late or loses its core does less.
constexpr int parts_per_thread = 4;

// Where the part-th of num_parts nearly equal stretches of [0, count) begins.
inline int part_begin(int count, int num_parts, int part) { return static_cast<int>(int64_t{count} * part / num_parts); }

// The Python class of a layer's crossing.
void bind_crossing(pybind11::module_& module);

// Copies between a KV cache and buffers.
void bind_kv_copies(pybind11::module_& module);

// The same for an int8 KV cache, whose rows become codes on their way in and elements on their way out.
void store_codes(const Array& k, const Array& v, const Array& kv_cache, const Array& blocks, const Array& offsets, int num_threads);
void gather_codes(const Array& kv_cache, const Array& blocks, const Array& out, int num_threads);
void convert_blocks(const Array& pool, const Array& blocks, const Array& staging, int num_threads, bool gathers);

// The operations on states of linear attention.
void bind_linear_attention(pybind11::module_& module);

// The Python class of packed 4-bit matrices.
void bind_codes(pybind11::module_& module);

// The Python class of a layer's experts.
void bind_experts(pybind11::module_& module);

}  // namespace pacpu
