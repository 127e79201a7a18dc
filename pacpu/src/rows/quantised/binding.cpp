// The Python side of products with packed 4-bit matrices.
#include <algorithm>
#include <optional>
#include <utility>

#include "../checks.h"
#include "packed_codes.h"
#include "scratch.h"
#include "thread_team.h"

namespace py = pybind11;

namespace pacpu {
namespace {

const void* contiguous(const Array& array) {
    row_stride(array, false);
    return array.data;
}

void check_int32(const Array& array) {
    if (!is_int(array, 32)) refuse(std::string(array.name) + " must have dtype int32, not " + array.dtype_name());
}

}  // namespace

const void* PackedCodes::keep(const Array& array) {
    owners_.push_back(array.owner);
    return contiguous(array);
}

PackedCodes::PackedCodes(py::handle codes_object, py::handle scales_object, py::handle zeros_object, py::handle order_object,
                         py::handle out_features_object, py::handle in_features_object) {
    const int64_t out_features = read_int("out_features", out_features_object, 1, most_size);
    const int64_t in_features = read_int("in_features", in_features_object, 1, most_size);
    const Array codes = read_array("codes", codes_object), scales = read_array("scales", scales_object);
    const int64_t panels = code_panels(static_cast<int>(out_features)), blocks = code_blocks(static_cast<int>(in_features));
    check_int32(codes);
    check_shape(codes, {panels, blocks, code_columns, block_words}, "[panels, blocks, columns, words]");
    check_rank(scales, 3, "[panels, groups, columns]");
    const int64_t groups = scales.shape[1];
    check_shape(scales, {panels, groups, code_columns}, "[panels, groups, columns]");
    if (groups < 1 || in_features % groups || in_features / groups % run_inputs)
        refuse(std::to_string(groups) + " groups do not cut " + std::to_string(in_features) + " inputs into groups of a multiple of " +
               std::to_string(run_inputs));
    matrix_ = {static_cast<int>(in_features),
               static_cast<int>(out_features),
               static_cast<int>(in_features / groups),
               static_cast<const uint32_t*>(keep(codes)),
               DType::float32,
               keep(scales),
               nullptr,
               nullptr};
    if (zeros_object.is_none()) {
        if (!is_bytes(scales)) refuse("scales without zeros must have dtype uint8, not " + scales.dtype_name());
    } else {
        const Array zeros = read_array("zeros", zeros_object);
        if (!is_bytes(zeros)) refuse("zeros must have dtype uint8, not " + zeros.dtype_name());
        check_shape(zeros, scales.shape, "[panels, groups, columns]");
        matrix_.scale_type = float_dtype(scales);
        matrix_.zeros = static_cast<const uint8_t*>(keep(zeros));
    }
    if (order_object.is_none()) return;
    const Array order = read_array("order", order_object);
    check_int32(order);
    check_shape(order, {in_features}, "[in_features]");
    matrix_.order = static_cast<const int32_t*>(keep(order));
    for (int64_t i = 0; i < in_features; ++i)
        if (matrix_.order[i] < 0 || matrix_.order[i] >= in_features)
            refuse("order[" + std::to_string(i) + "] must be below " + std::to_string(in_features) + ", not " +
                   std::to_string(matrix_.order[i]));
}

void PackedCodes::linear(py::handle x_object, py::handle bias_object, py::handle out_object, py::handle threads_object) const {
    const Array x = read_array("x", x_object), out = read_array("out", out_object);
    const int num_threads = read_num_threads(threads_object);
    const int dtype = static_cast<int>(float_dtype(x));
    check_dtype(out, x);
    check_rank(x, 2, "[rows, in_features]");
    check_sizes(x);
    check_shape(x, {x.shape[0], matrix_.in_features}, "[rows, in_features]");
    check_shape(out, {x.shape[0], matrix_.out_features}, "[rows, out_features]");
    check_writable(out);
    CodeLinear problem = {matrix_, 0, nullptr, row_stride(x), nullptr, nullptr, row_stride(out), nullptr};
    const std::optional<Array> bias = read_optional("bias", bias_object);
    if (bias) {
        check_dtype(*bias, x);
        check_shape(*bias, {matrix_.out_features}, "[out_features]");
        problem.bias = contiguous(*bias);
    }
    const CodeKernels& kernels = row_kernels().codes;
    const int64_t element_bytes = x.type_bits / 8, num_rows = x.shape[0];
    py::gil_scoped_release release;
    static thread_local Scratch inputs;
    for (int64_t row = 0; row < num_rows; row += code_call_rows) {
        problem.rows = static_cast<int>(std::min<int64_t>(code_call_rows, num_rows - row));
        problem.x = static_cast<const char*>(x.data) + row * problem.x_stride * element_bytes;
        problem.y = static_cast<char*>(out.data) + row * problem.y_stride * element_bytes;
        problem.inputs = inputs.at_least(problem.rows * code_input_stride(matrix_.in_features));
        const int64_t most = std::min<int64_t>(problem.rows, problem.rows * int64_t{matrix_.in_features} / min_inputs_per_part);
        const int panels = code_panels(matrix_.out_features), wanted = num_threads == 1 ? 1 : num_threads * parts_per_thread;
        const int num_parts[] = {static_cast<int>(std::clamp<int64_t>(most, 1, wanted)), std::min(panels, wanted)};
        run_phases(2, num_parts, num_threads, [&](int phase, int part) {
            const int count = phase == 0 ? problem.rows : panels;
            const int begin = part_begin(count, num_parts[phase], part), end = part_begin(count, num_parts[phase], part + 1);
            if (phase == 0) return kernels.take_inputs[dtype](problem, begin, end);
            static thread_local Scratch scratch;
            kernels.multiply[dtype](problem, begin, end,
                                    scratch.at_least(code_scratch_floats(problem.rows, matrix_.in_features)));
        });
    }
}

void PackedCodes::write_out(py::handle out_object, py::handle threads_object) const {
    const Array out = read_array("out", out_object);
    const int num_threads = read_num_threads(threads_object);
    const auto kernel = row_kernels().codes.write_out[static_cast<int>(float_dtype(out))];
    check_shape(out, {matrix_.out_features, matrix_.in_features}, "[out_features, in_features]");
    row_stride(out, false);
    check_writable(out);
    py::gil_scoped_release release;
    const int panels = code_panels(matrix_.out_features);
    const int num_parts = num_threads == 1 ? 1 : std::min(panels, num_threads * parts_per_thread);
    run_phases(1, &num_parts, num_threads, [&](int, int part) {
        static thread_local Scratch scratch;
        kernel(matrix_, part_begin(panels, num_parts, part), part_begin(panels, num_parts, part + 1), out.data,
               scratch.at_least(code_scratch_floats(0, matrix_.in_features)));
    });
}

void bind_codes(py::module_& module) {
    py::class_<PackedCodes>(module, "PackedCodes")
        .def(py::init<py::handle, py::handle, py::handle, py::handle, py::handle, py::handle>())
        .def("linear", &PackedCodes::linear)
        .def("write_out", &PackedCodes::write_out);
}

}  // namespace pacpu
