// A packed 4-bit matrix as Python holds it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "rows.h"

namespace pacpu {

// So many rows are brought into the order of codes at a time.
constexpr int code_call_rows = 512;

// With fewer elements of x, handing a part of them to another thread takes longer than the part.
constexpr int64_t min_inputs_per_part = 1 << 14;

class PackedCodes {
public:
    PackedCodes(pybind11::object codes, pybind11::object scales, pybind11::object zeros, pybind11::object order,
                int64_t out_features, int64_t in_features);

    void linear(pybind11::handle x, pybind11::handle bias, pybind11::handle out, pybind11::handle num_threads) const;
    void write_out(pybind11::handle out, pybind11::handle num_threads) const;

    const CodeMatrix& matrix() const { return matrix_; }

private:
    CodeMatrix matrix_;
    std::vector<pybind11::object> owners_;
};

}  // namespace pacpu
