// Arrays of other libraries, by the DLPack protocol: the ABI structs we need and a function to read one.
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pacpu {

// A view of an array; alive as long as `owner`: what was lent, which need not be the argument it was read from.
struct Array {
    const char* name;  // of the argument, for messages
    void* data;
    int32_t type_code;
    int32_t type_bits;
    bool is_read_only;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;  // in elements
    pybind11::object owner;

    std::string dtype_name() const;
};

// Throws pybind11::value_error, naming the argument, if the object does not speak DLPack or is not in host memory.
Array read_array(const char* name, pybind11::handle object);

}  // namespace pacpu
