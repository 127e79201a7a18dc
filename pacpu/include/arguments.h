// Checks of what Python gives: every message names the argument and the offending value.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dlpack.h"
#include "kernel.h"

namespace pacpu {

constexpr int64_t int_max = 0x7fffffff;

// The most that a size may be, of an array or told in numbers: a few times it, and tiles of padding, fit an int.
constexpr int64_t most_size = int64_t{1} << 28;

// The most elements of all heads of a query: with the scores of a part's rows they fit an int.
constexpr int64_t most_query_elements = int64_t{1} << 18;

// Many more than cores; with its parts a thread counts to this some times over.
constexpr int64_t most_threads = int64_t{1} << 12;

std::string to_string(const std::vector<int64_t>& shape);

[[noreturn]] void refuse(const std::string& message);

// Nothing if it is none of ours.
std::optional<DType> dtype_of(const Array& array);

bool is_int(const Array& array, int bits);

// Whether it has dtype uint8.
bool is_bytes(const Array& array);

// Tokens to a block of an int8 cache [..., head_bytes], see int8.h; refuses what is none.
int64_t int8_block_size(const Array& array, int64_t head_dim);

// No dimension is larger than `most_size`.
void check_sizes(const Array& array);

// Of q [rows, num_heads, head_dim].
void check_query_elements(const Array& q);

void check_rank(const Array& array, size_t rank, const char* meaning);
void check_shape(const Array& array, const std::vector<int64_t>& expected, const char* meaning);
// `other` has the dtype that `array` must have.
void check_dtype(const Array& array, const Array& other);
void check_writable(const Array& array);

// Checks that everything but the first dimension is contiguous; returns the first dimension's stride.
int64_t row_stride(const Array& array, bool may_have_gaps = true);

// Scalars are converted here, since pybind11's own message would print every array of the call.
template <typename T>
T read_scalar(const char* name, pybind11::handle object) {
    try {
        return object.cast<T>();
    } catch (const pybind11::cast_error&) {
        refuse(std::string(name) + " cannot be " + std::string(pybind11::repr(object)));
    }
}

// An integer of any type, from `least` to `most`.
int64_t read_int(const char* name, pybind11::handle object, int64_t least, int64_t most);

int read_num_threads(pybind11::handle object);

// At least 1; of None the largest.
int read_window(pybind11::handle object);

// Nothing of None.
std::optional<Array> read_optional(const char* name, pybind11::handle object);

void check_sinks(const Array& array, int64_t num_heads);

}  // namespace pacpu
