// An FFN of experts in a single call. Rows are sorted by their experts; products with each expert's matrices, activations
// and sums are phases of one job.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "../checks.h"
#include "packed_codes.h"
#include "scratch.h"
#include "thread_team.h"

namespace py = pybind11;

namespace pacpu {
namespace {

// A pair is a row and one of its slots. So many are computed at a time, which bounds the memory between the phases.
constexpr int64_t call_pairs = 4096;

// Decoding a panel takes as long as multiplying it with so many rows.
constexpr int64_t decode_rows = 3;

struct Stack {
    const CodeMatrix* codes;  // of all experts, each padded to whole panels
    const char* bias;         // [experts * outputs] or nullptr
    int outputs;              // of an expert

    int num_panels() const { return code_panels(outputs); }

    CodeMatrix of(int expert) const {
        CodeMatrix m = *codes;
        const int64_t first = int64_t{expert} * num_panels(), groups = m.in_features / m.group_size;
        const int64_t scale_bytes = !m.zeros ? 1 : m.scale_type == DType::float32 ? 4 : 2;
        m.out_features = outputs;
        m.codes = codes_of(m, 0, 0) + first * code_blocks(m.in_features) * code_columns * block_words;
        m.scales = static_cast<const char*>(m.scales) + first * groups * code_columns * scale_bytes;
        if (m.zeros) m.zeros += first * groups * code_columns;
        return m;
    }
};

// An expert that has pairs: those sorted from `begin` to `end`. `cost`: of all before it, a panel with a row is 1.
struct Chosen {
    int expert, begin, end;
    int64_t cost;

    int64_t panel_cost() const { return end - begin + decode_rows; }
};

class PackedExperts {
public:
    PackedExperts(py::tuple gate_up, py::tuple down, std::optional<std::pair<float, float>> clamp, py::handle num_experts,
                  py::handle hidden, py::handle ffn)
        : clamp_(clamp), num_experts_(static_cast<int>(read_int("num_experts", num_experts, 1, most_size))) {
        const int64_t hidden_size = read_int("hidden_size", hidden, 1, most_size);
        const int64_t ffn_size = read_int("ffn_size", ffn, 1, most_size / 2);
        gate_up_ = read_stack("gate_up", gate_up, 2 * ffn_size, hidden_size);
        down_ = read_stack("down", down, hidden_size, ffn_size);
    }

    void run(py::handle x_object, py::handle ids_object, py::handle likelihoods_object, py::handle out_object,
             py::handle threads_object) const {
        const Array x = read_array("x", x_object), ids = read_array("ids", ids_object);
        const Array likelihoods = read_array("likelihoods", likelihoods_object), out = read_array("out", out_object);
        const int num_threads = read_num_threads(threads_object);
        const DType dtype = float_dtype(x);
        if (bias_type_ && *bias_type_ != dtype) refuse("x must have the dtype of the biases, not " + x.dtype_name());
        check_dtype(out, x);
        check_rank(x, 2, "[rows, hidden_size]");
        check_sizes(x);
        const int64_t rows = x.shape[0], hidden = down_.outputs;
        check_shape(x, {rows, hidden}, "[rows, hidden_size]");
        check_shape(out, {rows, hidden}, "[rows, hidden_size]");
        check_writable(out);
        check_rank(ids, 2, "[rows, slots]");
        const int64_t slots = ids.shape[1];
        if (slots < 1 || slots > call_pairs) refuse("ids cannot have " + std::to_string(slots) + " slots");
        check_shape(ids, {rows, slots}, "[rows, slots]");
        check_shape(likelihoods, {rows, slots}, "[rows, slots]");
        if (!is_int(ids, 64)) refuse("ids must have dtype int64, not " + ids.dtype_name());
        if (float_dtype(likelihoods) != DType::float32)
            refuse("likelihoods must have dtype float32, not " + likelihoods.dtype_name());
        row_stride(ids, false);
        row_stride(likelihoods, false);
        const auto* own_ids = static_cast<const int64_t*>(ids.data);
        for (int64_t i = 0; i < rows * slots; ++i)
            if (own_ids[i] < 0 || own_ids[i] > num_experts_)
                refuse("ids must be at most " + std::to_string(num_experts_) + ", not " + std::to_string(own_ids[i]));
        const int64_t x_stride = row_stride(x), out_stride = row_stride(out), element_bytes = x.type_bits / 8;
        py::gil_scoped_release release;
        for (int64_t row = 0; row < rows; row += call_pairs / slots)
            compute({static_cast<int>(std::min(call_pairs / slots, rows - row)), static_cast<int>(slots),
                     static_cast<const char*>(x.data) + row * x_stride * element_bytes, x_stride, own_ids + row * slots,
                     static_cast<const float*>(likelihoods.data) + row * slots,
                     static_cast<char*>(out.data) + row * out_stride * element_bytes, out_stride, element_bytes,
                     static_cast<int>(dtype)},
                    num_threads);
    }

private:
    struct Rows {
        int count, slots;
        const char* x;
        int64_t x_stride;
        const int64_t* ids;
        const float* likelihoods;
        char* out;
        int64_t out_stride, element_bytes;
        int dtype;
    };

    Stack read_stack(const char* name, const py::tuple& parts, int64_t outputs, int64_t inputs) {
        if (parts.size() != 2 || !py::isinstance<PackedCodes>(parts[0]))
            refuse(std::string(name) + " must be packed codes and a bias or None");
        Stack stack{&parts[0].cast<const PackedCodes&>().matrix(), nullptr, static_cast<int>(outputs)};
        const int64_t padded = int64_t{num_experts_} * stack.num_panels() * code_columns;
        if (stack.codes->in_features != inputs || stack.codes->out_features != padded || stack.codes->order)
            refuse(std::string(name) + " must have sides " + to_string({padded, inputs}) + " and no order, not " +
                   to_string({stack.codes->out_features, stack.codes->in_features}));
        owners_.push_back(parts[0]);
        const py::object bias_object = parts[1];
        if (bias_object.is_none()) return stack;
        const Array bias = read_array("bias", bias_object);
        if (bias_type_ && *bias_type_ != float_dtype(bias)) refuse("both biases must have one dtype");
        bias_type_ = float_dtype(bias);
        check_shape(bias, {num_experts_ * outputs}, "[num_experts * outputs]");
        row_stride(bias, false);
        stack.bias = static_cast<const char*>(bias.data);
        owners_.push_back(bias.owner);
        return stack;
    }

    // Sorts pairs by experts, those of none left out: `pairs` in that order, and by pair its place there, or -1.
    std::vector<Chosen> sort(const Rows& rows, std::vector<int32_t>& pairs, std::vector<int32_t>& places) const {
        const int num_pairs = rows.count * rows.slots;
        std::vector<int> next(num_experts_ + 1);
        for (int pair = 0; pair < num_pairs; ++pair) ++next[rows.ids[pair]];
        std::vector<Chosen> chosen;
        int begin = 0;
        int64_t cost = 0;
        for (int expert = 0; expert < num_experts_; ++expert) {
            const int count = std::exchange(next[expert], begin);
            if (!count) continue;
            chosen.push_back({expert, begin, begin + count, cost});
            cost += chosen.back().panel_cost();
            begin += count;
        }
        pairs.resize(begin);
        places.assign(num_pairs, -1);
        for (int pair = 0; pair < num_pairs; ++pair)
            if (rows.ids[pair] < num_experts_) {
                places[pair] = next[rows.ids[pair]]++;
                pairs[places[pair]] = pair;
            }
        return chosen;
    }

    void compute(const Rows& rows, int num_threads) const {
        std::vector<int32_t> pairs, places;
        const std::vector<Chosen> chosen = sort(rows, pairs, places);
        const int num_pairs = static_cast<int>(pairs.size()), hidden = down_.outputs, ffn = gate_up_.outputs / 2;
        const int64_t bytes = rows.element_bytes, width = std::max(2 * ffn, hidden);
        const int64_t stride = code_input_stride(std::max(hidden, ffn));
        static thread_local Scratch input_memory, product_memory, active_memory;
        float* const inputs = input_memory.at_least(num_pairs * stride);
        char* const products = reinterpret_cast<char*>(product_memory.at_least(num_pairs * width));
        char* const active = reinterpret_cast<char*>(active_memory.at_least(num_pairs * int64_t{ffn}));
        const RowKernels& kernels = row_kernels();
        const auto problem_of = [&](const Stack& stack, int expert, int begin, int end) {
            const char* bias = stack.bias ? stack.bias + int64_t{expert} * stack.outputs * bytes : nullptr;
            const int64_t input_bytes = code_input_stride(stack.codes->in_features) * kernels.codes.input_bytes[rows.dtype];
            char* const own_inputs = reinterpret_cast<char*>(inputs) + begin * input_bytes;
            char* const y = products + begin * int64_t{stack.outputs} * bytes;
            return CodeLinear{stack.of(expert), end - begin, nullptr, 0, bias, y, stack.outputs, own_inputs};
        };
        const auto take_inputs = [&](const Stack& stack, int place, const void* x) {
            CodeLinear problem = problem_of(stack, 0, place, place + 1);
            problem.x = x;
            kernels.codes.take_inputs[rows.dtype](problem, 0, 1);
        };
        const auto multiply = [&](const Stack& stack, int part, int num_parts) {
            if (chosen.empty()) return;
            const int64_t panels = stack.num_panels(), total = panels * (chosen.back().cost + chosen.back().panel_cost());
            const int64_t from = total * part / num_parts, to = total * (part + 1) / num_parts;
            for (const Chosen& own : chosen) {
                const auto panel_at = [&](int64_t cost) {
                    return static_cast<int>(std::clamp<int64_t>((cost - panels * own.cost) / own.panel_cost(), 0, panels));
                };
                const int begin = panel_at(from), end = panel_at(to);
                if (begin >= end) continue;
                const CodeLinear problem = problem_of(stack, own.expert, own.begin, own.end);
                static thread_local Scratch scratch;
                kernels.codes.multiply[rows.dtype](
                    problem, begin, end, scratch.at_least(code_scratch_floats(problem.rows, problem.matrix.in_features)));
            }
        };
        const int wanted = num_threads == 1 ? 1 : num_threads * parts_per_thread;
        const int of_pairs = std::clamp(num_pairs, 1, wanted), of_rows = std::clamp(rows.count, 1, wanted);
        const int num_parts[] = {of_pairs, wanted, of_pairs, wanted, of_rows};
        run_phases(5, num_parts, num_threads, [&](int phase, int part) {
            if (phase == 1) return multiply(gate_up_, part, wanted);
            if (phase == 3) return multiply(down_, part, wanted);
            const int count = phase == 4 ? rows.count : num_pairs;
            const int begin = part_begin(count, num_parts[phase], part), end = part_begin(count, num_parts[phase], part + 1);
            if (phase == 4)
                return kernels.add_slots[rows.dtype]({rows.count, hidden, rows.slots, products, places.data(), rows.likelihoods,
                                                      rows.out, rows.out_stride},
                                                     begin, end);
            if (phase == 2) activate(kernels, rows, {num_pairs, ffn, products, 2 * int64_t{ffn}, active, ffn}, begin, end);
            for (int place = begin; place < end; ++place)
                if (phase == 0)
                    take_inputs(gate_up_, place, rows.x + pairs[place] / rows.slots * rows.x_stride * bytes);
                else
                    take_inputs(down_, place, active + place * int64_t{ffn} * bytes);
        });
    }

    void activate(const RowKernels& kernels, const Rows& rows, const SiluAndMul& problem, int begin, int end) const {
        if (clamp_) return kernels.clamped_swiglu[rows.dtype]({problem, clamp_->first, clamp_->second}, begin, end);
        kernels.silu_and_mul[rows.dtype](problem, begin, end);
    }

    std::vector<py::object> owners_;  // of what was lent, and the matrices
    Stack gate_up_, down_;
    std::optional<DType> bias_type_;
    std::optional<std::pair<float, float>> clamp_;  // limit and alpha
    int num_experts_;
};

}  // namespace

void bind_experts(py::module_& module) {
    py::class_<PackedExperts>(module, "PackedExperts")
        .def(py::init<py::tuple, py::tuple, std::optional<std::pair<float, float>>, py::handle, py::handle, py::handle>())
        .def("run", &PackedExperts::run);
}

}  // namespace pacpu
