// A packed 4-bit matrix as Python holds it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "dlpack.h"
#include "rows.h"

namespace pacpu {

// So many rows are brought into the order of codes at a time.
constexpr int code_call_rows = 512;

// With fewer elements of x, handing a part of them to another thread takes longer than the part.
constexpr int64_t min_inputs_per_part = 1 << 14;

class PackedCodes {
public:
    PackedCodes(pybind11::handle codes, pybind11::handle scales, pybind11::handle zeros, pybind11::handle order,
                pybind11::handle out_features, pybind11::handle in_features);

    void linear(pybind11::handle x, pybind11::handle bias, pybind11::handle out, pybind11::handle num_threads) const;
    void write_out(pybind11::handle out, pybind11::handle num_threads) const;

    const CodeMatrix& matrix() const { return matrix_; }

private:
    // Returns the data of an array that is kept.
    const void* keep(const Array& array);

    CodeMatrix matrix_;
    std::vector<pybind11::object> owners_;  // of what was lent
};

}  // namespace pacpu
