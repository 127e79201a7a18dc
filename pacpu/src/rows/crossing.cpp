// Rows from one layer's attention to the next one's in a single call. Products, norms and activations are phases of one
// job: no array is made and no thread is woken for each of them.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "checks.h"
#include "quantised/packed_codes.h"
#include "scratch.h"
#include "thread_team.h"

namespace py = pybind11;

namespace pacpu {
namespace {

// So many rows cross at a time: each matrix is then read once per block, and activations stay in the caches.
constexpr int crossing_rows = 512;

// With fewer elements, handing a part of a norm to another thread takes longer than the part.
constexpr int64_t min_elements_per_part = 1 << 13;

struct Matrix {
    const BFloat16* packed;  // or nullptr: then there are codes
    const CodeMatrix* codes;
    const BFloat16* bias;
    int in_features, out_features;
};

// A product with a matrix of either kind. With codes it takes two phases: `inputs` is where its rows are brought first.
class Product {
public:
    Product(const Matrix& matrix, int rows, const BFloat16* x, int64_t x_stride, BFloat16* y, int64_t y_stride, void* inputs)
        : plain_{rows, matrix.in_features, matrix.out_features, x, x_stride, matrix.packed, matrix.bias, y, y_stride} {
        if (matrix.codes) codes_ = {*matrix.codes, rows, x, x_stride, matrix.bias, y, y_stride, inputs};
    }

    bool has_codes() const { return codes_.matrix.codes; }

    int num_panels() const {
        const int columns = has_codes() ? code_columns : panel_columns;
        return (plain_.out_features + columns - 1) / columns;
    }

    void take_inputs(const RowKernels& kernels, int begin_row, int end_row) const {
        kernels.codes.take_inputs[static_cast<int>(DType::bfloat16)](codes_, begin_row, end_row);
    }

    void multiply(const RowKernels& kernels, int begin_panel, int end_panel) const {
        static thread_local Scratch scratch;
        if (!has_codes())
            return kernels.linear(plain_, begin_panel, end_panel, scratch.at_least(linear_scratch_floats(plain_)));
        kernels.codes.multiply[static_cast<int>(DType::bfloat16)](
            codes_, begin_panel, end_panel, scratch.at_least(code_scratch_floats(plain_.rows, plain_.in_features)));
    }

private:
    Linear plain_;
    CodeLinear codes_{};
};

// What a phase does with a product's rows before it, with its panels, and with its rows after it.
enum class Step { take_inputs, multiply, finish };

struct Phase {
    Step step;
    int product, units;  // rows or panels
};

class Crossing {
public:
    Crossing(py::tuple o, py::handle post_norm, py::tuple gate_up, py::tuple down, py::handle norm, py::tuple projection,
             py::handle head_norms, py::handle attention_object, py::handle intermediate_object, py::handle out_object,
             py::handle rotated_object, py::handle head_dim_object, py::handle eps)
        : eps_(static_cast<float>(read_scalar<double>("eps", eps))) {
        const int64_t attention_size = read_int("attention_size", attention_object, 1, most_size);
        const int64_t intermediate_size = read_int("intermediate_size", intermediate_object, 1, most_size / 2);
        const int64_t out_features = read_int("out_features", out_object, 1, most_size);
        const int64_t rotated_heads = read_int("rotated_heads", rotated_object, 0, most_size);
        const int64_t head_dim = read_int("head_dim", head_dim_object, 0, most_size);
        if (rotated_heads && (head_dim < 2 || head_dim % 2 || rotated_heads > out_features / head_dim))
            refuse("rotated_heads cannot be " + std::to_string(rotated_heads) + " of head_dim " + std::to_string(head_dim));
        const Array norm_array = read_array("norm", norm);
        check_rank(norm_array, 1, "[hidden_size]");
        const int64_t hidden_size = norm_array.shape[0];
        if (hidden_size < 1 || hidden_size > most_size)
            refuse("norm must have from 1 to " + std::to_string(most_size) + " elements, not " + std::to_string(hidden_size));
        post_norm_ = read_vector("post_norm", post_norm, hidden_size);
        norm_ = read_vector("norm", norm, hidden_size);
        o_ = read_matrix("o", o, hidden_size, attention_size);
        gate_up_ = read_matrix("gate_up", gate_up, 2 * intermediate_size, hidden_size);
        down_ = read_matrix("down", down, hidden_size, intermediate_size);
        projection_ = read_matrix("projection", projection, out_features, hidden_size);
        has_codes_ = o_.codes || gate_up_.codes || down_.codes || projection_.codes;
        rotated_heads_ = static_cast<int>(rotated_heads);
        head_dim_ = static_cast<int>(head_dim);
        if (!head_norms.is_none()) {
            const Array weights = read_array("head_norms", head_norms);
            check_bfloat16(weights);
            check_shape(weights, {rotated_heads, head_dim}, "[rotated_heads, head_dim]");
            row_stride(weights, false);
            head_norms_ = keep(weights);
        }
    }

    void run(py::handle attention_object, py::handle residual_object, py::handle angles_object, py::handle out_object,
             py::handle num_threads_object) const {
        const Array attention = read_array("attention_out", attention_object);
        const Array residual = read_array("residual", residual_object), out = read_array("out", out_object);
        const int num_threads = read_num_threads(num_threads_object);
        for (const Array* array : {&attention, &residual, &out}) {
            check_bfloat16(*array);
            check_sizes(*array);
        }
        check_rank(residual, 2, "[rows, hidden_size]");
        const int64_t rows = residual.shape[0];
        check_shape(residual, {rows, down_.out_features}, "[rows, hidden_size]");
        check_shape(attention, {rows, o_.in_features}, "[rows, attention_size]");
        check_shape(out, {rows, projection_.out_features}, "[rows, out_features]");
        check_writable(residual);
        check_writable(out);
        std::optional<Array> angles;
        if (rotated_heads_) {
            angles = read_array("angles", angles_object);
            if (float_dtype(*angles) != DType::float32) refuse("angles must have dtype float32, not " + angles->dtype_name());
            check_shape(*angles, {rows, 2, head_dim_}, "[rows, 2, head_dim]");
        }
        const RowKernels& kernels = row_kernels();
        if (!kernels.linear) refuse("a crossing needs AVX-512; the instruction set in use is another");
        const int64_t attention_stride = row_stride(attention), residual_stride = row_stride(residual);
        const int64_t out_stride = row_stride(out), angles_stride = angles ? row_stride(*angles) : 0;
        py::gil_scoped_release release;
        for (int64_t row = 0; row < rows; row += crossing_rows)
            cross({static_cast<int>(std::min<int64_t>(crossing_rows, rows - row)),
                   static_cast<const BFloat16*>(attention.data) + row * attention_stride, attention_stride,
                   static_cast<BFloat16*>(residual.data) + row * residual_stride, residual_stride,
                   angles ? static_cast<const float*>(angles->data) + row * angles_stride : nullptr, angles_stride,
                   static_cast<BFloat16*>(out.data) + row * out_stride, out_stride},
                  kernels, num_threads);
    }

private:
    struct Rows {
        int count;
        const BFloat16* attention;
        int64_t attention_stride;
        BFloat16* residual;
        int64_t residual_stride;
        const float* angles;
        int64_t angles_stride;
        BFloat16* out;
        int64_t out_stride;
    };

    const BFloat16* keep(const Array& array) {
        owners_.push_back(array.owner);
        return static_cast<const BFloat16*>(array.data);
    }

    const BFloat16* read_vector(const char* name, py::handle object, int64_t size) {
        const Array array = read_array(name, object);
        check_bfloat16(array);
        check_shape(array, {size}, "[outputs]");
        row_stride(array, false);
        return keep(array);
    }

    Matrix read_matrix(const char* name, const py::tuple& parts, int64_t out_features, int64_t in_features) {
        if (parts.size() != 2) refuse(std::string(name) + " must be a packed matrix and its bias or None");
        Matrix matrix{nullptr, nullptr, nullptr, static_cast<int>(in_features), static_cast<int>(out_features)};
        if (py::isinstance<PackedCodes>(parts[0])) {
            matrix.codes = &parts[0].cast<const PackedCodes&>().matrix();
            if (matrix.codes->in_features != in_features || matrix.codes->out_features != out_features)
                refuse(std::string(name) + " must have sides " + to_string({out_features, in_features}) + ", not " +
                       to_string({matrix.codes->out_features, matrix.codes->in_features}));
            owners_.push_back(parts[0]);
        } else {
            const Array packed = read_array(name, parts[0]);
            check_bfloat16(packed);
            check_shape(packed, packed_shape(out_features, in_features), "packed_shape(out_features, in_features)");
            row_stride(packed, false);
            matrix.packed = keep(packed);
        }
        const py::object bias = parts[1];
        if (!bias.is_none()) matrix.bias = read_vector(name, bias, out_features);
        return matrix;
    }

    void cross(const Rows& rows, const RowKernels& kernels, int num_threads) const {
        const int count = rows.count, hidden = down_.out_features, intermediate = down_.in_features;
        static thread_local Scratch activations;
        auto* const normed = reinterpret_cast<BFloat16*>(
            activations.at_least((int64_t{count} * (2 * int64_t{hidden} + 3 * int64_t{intermediate}) + 1) / 2));
        BFloat16* const addend = normed + int64_t{count} * hidden;
        BFloat16* const gate_up = addend + int64_t{count} * hidden;
        BFloat16* const active = gate_up + int64_t{count} * 2 * intermediate;
        const int bfloat16 = static_cast<int>(DType::bfloat16);

        static thread_local Scratch code_inputs;  // of one product after the other
        const int widest = std::max({o_.in_features, hidden, intermediate});
        void* const inputs = code_inputs.at_least(has_codes_ ? count * code_input_stride(widest) : 0);
        const Product products[] = {
            {o_, count, rows.attention, rows.attention_stride, addend, hidden, inputs},
            {gate_up_, count, normed, hidden, gate_up, 2 * int64_t{intermediate}, inputs},
            {down_, count, active, intermediate, addend, hidden, inputs},
            {projection_, count, normed, hidden, rows.out, rows.out_stride, inputs},
        };
        const auto add_norm = [&](const BFloat16* weight, int begin, int end) {
            kernels.rms_norm[bfloat16]({count, hidden, rows.residual, rows.residual_stride, addend, hidden, weight, eps_,
                                        normed, hidden},
                                       begin, end);
        };
        const auto turn = [&](int begin, int end) {
            if (head_norms_)
                norm_heads({count, rotated_heads_, head_dim_, rows.out, rows.out_stride, sizeof(BFloat16), head_norms_, eps_},
                           kernels.rms_norm[bfloat16], begin, end);
            kernels.rotary[bfloat16](
                {count, rotated_heads_, head_dim_, rows.out, rows.out_stride, rows.angles, rows.angles_stride}, begin, end);
        };

        const auto rows_for = [&](int64_t elements) { return std::min<int64_t>(count, count * elements / min_elements_per_part); };
        Phase phases[max_phases];
        int num_parts[max_phases], num_phases = 0;
        const auto add = [&](Step step, int product, int units, int64_t most_parts) {
            phases[num_phases] = {step, product, units};
            num_parts[num_phases++] =
                num_threads == 1 ? 1 : static_cast<int>(std::clamp<int64_t>(most_parts, 1, num_threads * parts_per_thread));
        };
        const int64_t inputs_of[] = {o_.in_features, hidden, intermediate, hidden};
        const int64_t widths[] = {hidden, intermediate, hidden, int64_t{rotated_heads_} * head_dim_};
        for (int i = 0; i < 4; ++i) {
            if (products[i].has_codes()) add(Step::take_inputs, i, count, rows_for(inputs_of[i]));
            add(Step::multiply, i, products[i].num_panels(), products[i].num_panels());
            if (i < 3 || rotated_heads_) add(Step::finish, i, count, rows_for(widths[i]));
        }
        run_phases(num_phases, num_parts, num_threads, [&](int phase, int part) {
            const auto [step, index, units] = phases[phase];
            const int begin = part_begin(units, num_parts[phase], part), end = part_begin(units, num_parts[phase], part + 1);
            if (step == Step::take_inputs) return products[index].take_inputs(kernels, begin, end);
            if (step == Step::multiply) return products[index].multiply(kernels, begin, end);
            if (index == 0) return add_norm(post_norm_, begin, end);
            if (index == 1)
                return kernels.silu_and_mul[bfloat16](
                    {count, intermediate, gate_up, 2 * int64_t{intermediate}, active, intermediate}, begin, end);
            if (index == 2) return add_norm(norm_, begin, end);
            turn(begin, end);
        });
    }

    std::vector<py::object> owners_;  // of what was lent, and matrices of codes
    Matrix o_, gate_up_, down_, projection_;
    const BFloat16* post_norm_;
    const BFloat16* norm_;
    const BFloat16* head_norms_ = nullptr;
    int rotated_heads_, head_dim_;
    bool has_codes_;
    float eps_;
};

}  // namespace

void bind_crossing(py::module_& module) {
    py::class_<Crossing>(module, "Crossing")
        .def(py::init<py::tuple, py::handle, py::tuple, py::tuple, py::handle, py::tuple, py::handle, py::handle, py::handle,
                      py::handle, py::handle, py::handle, py::handle>())
        .def("run", &Crossing::run);
}

}  // namespace pacpu
