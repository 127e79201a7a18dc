#include "arguments.h"

#include <algorithm>
#include <limits>

#include "int8.h"

namespace py = pybind11;

namespace pacpu {
namespace {

constexpr int32_t code_int = 0, code_uint = 1, code_float = 2, code_bfloat = 4;  // DLDataTypeCode

}  // namespace

std::string to_string(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

void refuse(const std::string& message) { throw py::value_error(message); }

std::optional<DType> dtype_of(const Array& array) {
    if (array.type_code == code_float && array.type_bits == 32) return DType::float32;
    if (array.type_code == code_float && array.type_bits == 16) return DType::float16;
    if (array.type_code == code_bfloat && array.type_bits == 16) return DType::bfloat16;
    return std::nullopt;
}

void check_sizes(const Array& array) {
    for (const int64_t size : array.shape)
        if (size > most_size)
            refuse(std::string(array.name) + " is too large: shape " + to_string(array.shape) + ", where a dimension has at most " +
                   std::to_string(most_size));
}

void check_query_elements(const Array& q) {
    if (const int64_t elements = q.shape[1] * q.shape[2]; elements > most_query_elements)
        refuse(std::string(q.name) + " must have at most " + std::to_string(most_query_elements) +
               " elements in a row (num_heads * head_dim), not " + std::to_string(elements));
}

void check_rank(const Array& array, size_t rank, const char* meaning) {
    if (array.shape.size() != rank)
        refuse(std::string(array.name) + " must have shape " + meaning + ", not " + to_string(array.shape));
}

void check_shape(const Array& array, const std::vector<int64_t>& expected, const char* meaning) {
    if (array.shape != expected)
        refuse(std::string(array.name) + " must have shape " + meaning + " = " + to_string(expected) + ", not " +
               to_string(array.shape));
}

void check_dtype(const Array& array, const Array& other) {
    if (array.type_code != other.type_code || array.type_bits != other.type_bits)
        refuse(std::string(array.name) + " must have the dtype of " + other.name + ", " + other.dtype_name() + ", not " +
               array.dtype_name());
}

bool is_int(const Array& array, int bits) { return array.type_code == code_int && array.type_bits == bits; }

bool is_bytes(const Array& array) { return array.type_code == code_uint && array.type_bits == 8; }

int64_t int8_block_size(const Array& array, int64_t head_dim) {
    const int64_t bytes = array.shape.back();
    if (head_dim < 8 || head_dim % 8 || head_dim > int_max / 64 || bytes < 1 || bytes % tile_bytes(static_cast<int>(head_dim)))
        refuse(std::string(array.name) + " must have a multiple of " + std::to_string(32 * head_dim + 128) +
               " bytes (16 tokens of a head with head_dim " + std::to_string(head_dim) + ", a multiple of 8) in its last dimension, not " +
               std::to_string(bytes));
    return bytes / tile_bytes(static_cast<int>(head_dim)) * tile_tokens;
}

int64_t row_stride(const Array& array, bool may_have_gaps) {
    int64_t expected = 1;
    for (size_t i = array.shape.size(); i-- > 1; expected *= array.shape[i])
        if (array.shape[i] != 1 && array.strides[i] != expected)
            refuse(std::string(array.name) + " must be contiguous" + (may_have_gaps ? " within a row" : "") +
                   ", but has strides " + to_string(array.strides) + " for shape " + to_string(array.shape));
    if (array.shape[0] <= 1) return expected;
    const int64_t stride = array.strides[0];
    if (may_have_gaps ? stride < expected : stride != expected)
        refuse(std::string(array.name) + " must have rows " + (may_have_gaps ? "at least " : "exactly ") +
               std::to_string(expected) + " elements apart, not " + std::to_string(stride));
    return stride;
}

void check_writable(const Array& array) {
    if (array.is_read_only) refuse(std::string(array.name) + " must be writable, but is read-only");
}

int64_t read_int(const char* name, py::handle object, int64_t least, int64_t most) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
    if (!number) {
        PyErr_Clear();
        refuse(std::string(name) + " cannot be " + std::string(py::repr(object)));
    }
    int beyond;  // what fits: -1 or 1
    const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &beyond);
    const bool is_less = beyond ? beyond < 0 : value < least;
    if (is_less || beyond || value > most)
        refuse(std::string(name) + " must be at " + (is_less ? "least " : "most ") + std::to_string(is_less ? least : most) +
               ", not " + std::string(py::repr(number)));
    return value;
}

int read_num_threads(py::handle object) { return static_cast<int>(read_int("num_threads", object, 1, most_threads)); }

int read_window(py::handle object) {
    if (object.is_none()) return int_max;
    return static_cast<int>(std::min(read_int("window", object, 1, std::numeric_limits<int64_t>::max()), int_max));
}

std::optional<Array> read_optional(const char* name, pybind11::handle object) {
    if (object.is_none()) return std::nullopt;
    return read_array(name, object);
}

void check_sinks(const Array& array, int64_t num_heads) {
    check_shape(array, {num_heads}, "[num_heads]");
    if (dtype_of(array) != DType::float32) refuse("sinks must have dtype float32, not " + array.dtype_name());
    row_stride(array, false);
}

}  // namespace pacpu
