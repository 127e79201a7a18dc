// The Python side of linear attention: checks arguments and divides the work among threads.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "checks.h"
#include "divide.h"
#include "scratch.h"

namespace py = pybind11;

namespace pacpu {
namespace {

void check_float32(const Array& array) {
    if (float_dtype(array) != DType::float32)
        refuse(std::string(array.name) + " must have dtype float32, not " + array.dtype_name());
}

// The runs of chunks, slot, rows and whether they are first, and behind them those of decodes; all have `rows` rows.
std::vector<StateRun> read_runs(const py::sequence& chunks, const Array& decode_slots, int64_t rows, int64_t slots) {
    std::vector<StateRun> runs;
    int64_t row = 0;
    for (const py::handle chunk : chunks) {
        if (!py::isinstance<py::tuple>(chunk) || py::len(chunk) != 3)
            refuse("each of chunks must be a tuple of slot, rows and whether the slot counts as zero");
        const auto parts = py::reinterpret_borrow<py::tuple>(chunk);
        const int64_t slot = read_int("the slot of a chunk", parts[0], -1, slots - 1);
        const int64_t count = read_int("the rows of a chunk", parts[1], 1, rows - row);
        const bool is_first = read_scalar<bool>("whether a chunk is first", parts[2]);
        runs.push_back({slot, static_cast<int>(row), static_cast<int>(count), is_first});
        row += count;
    }
    check_slots(decode_slots, rows - row, slots, -1);
    for (const auto* slot = static_cast<const int64_t*>(decode_slots.data); row < rows; ++row)
        runs.push_back({*slot++, static_cast<int>(row), 1, false});
    return runs;
}

void convolve(py::handle x_object, py::handle weight_object, py::handle inputs_object, const py::sequence& chunks,
              py::handle decode_slots_object, py::handle out_object, py::handle num_threads_object) {
    const Array x = read_array("x", x_object), weight = read_array("weight", weight_object);
    const Array inputs = read_array("inputs", inputs_object), out = read_array("out", out_object);
    const Array decode_slots = read_array("decode_slots", decode_slots_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    for (const Array* array : {&weight, &inputs, &out}) check_dtype(*array, x);
    check_rank(x, 2, "[rows, channels]");
    check_rank(weight, 2, "[channels, width]");
    check_rank(inputs, 3, "[slots, channels, width - 1]");
    check_sizes(x);
    check_sizes(inputs);
    const int64_t rows = x.shape[0], channels = x.shape[1], width = weight.shape[1];
    if (width < 2 || width > max_taps)
        refuse("weight must have a width from 2 to " + std::to_string(max_taps) + ", not " + std::to_string(width));
    check_shape(weight, {channels, width}, "[channels, width]");
    check_shape(inputs, {inputs.shape[0], channels, width - 1}, "[slots, channels, width - 1]");
    check_shape(out, x.shape, "[rows, channels]");
    row_stride(weight, false);
    row_stride(inputs, false);
    check_writable(inputs);
    check_writable(out);
    const std::vector<StateRun> runs = read_runs(chunks, decode_slots, rows, inputs.shape[0]);
    const Convolution problem = {static_cast<int>(channels), static_cast<int>(width), x.data,           row_stride(x),
                                 weight.data,                inputs.data,             out.data,         row_stride(out),
                                 runs.data(),                static_cast<int>(runs.size())};
    const auto kernel = row_kernels().convolve[static_cast<int>(dtype)];
    const int64_t elements = rows * channels, enough = std::max<int64_t>(1, elements / min_elements_per_thread);
    divide(static_cast<int>((channels + convolved_channels - 1) / convolved_channels),
           static_cast<int>(std::min<int64_t>(num_threads, enough)),
           [&](int begin, int end) {
               kernel(problem, begin * convolved_channels, std::min<int>(problem.num_channels, end * convolved_channels));
           },
           elements < min_elements_without_gil);
}

void delta_rule(py::handle q_object, py::handle k_object, py::handle v_object, py::handle log_decay_object,
                py::handle beta_object, py::handle states_object, const py::sequence& chunks, py::handle decode_slots_object,
                py::handle out_object, py::handle num_threads_object) {
    const Array q = read_array("q", q_object), k = read_array("k", k_object), v = read_array("v", v_object);
    const Array log_decay = read_array("log_decay", log_decay_object), beta = read_array("beta", beta_object);
    const Array states = read_array("states", states_object), out = read_array("out", out_object);
    const Array decode_slots = read_array("decode_slots", decode_slots_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(q);
    check_dtype(k, q);
    check_dtype(v, q);
    for (const Array* array : {&log_decay, &beta, &states, &out}) check_float32(*array);
    check_rank(q, 3, "[rows, num_key_heads, key_dim]");
    check_rank(states, 4, "[slots, num_value_heads, key_dim, value_dim]");
    for (const Array* array : {&q, &v, &states}) check_sizes(*array);
    const int64_t rows = q.shape[0], key_heads = q.shape[1], key_dim = q.shape[2];
    const int64_t slots = states.shape[0], value_heads = states.shape[1], value_dim = states.shape[3];
    if (key_heads < 1 || value_heads < 1 || value_heads % key_heads)
        refuse("states must have a multiple of the " + std::to_string(key_heads) + " heads of k, not " +
               std::to_string(value_heads));
    check_shape(k, q.shape, "[rows, num_key_heads, key_dim]");
    check_shape(states, {slots, value_heads, key_dim, value_dim}, "[slots, num_value_heads, key_dim, value_dim]");
    check_shape(v, {rows, value_heads, value_dim}, "[rows, num_value_heads, value_dim]");
    check_shape(out, v.shape, "[rows, num_value_heads, value_dim]");
    check_query_elements(q);
    check_query_elements(v);
    if (rows * value_heads > most_size)
        refuse("v must have at most " + std::to_string(most_size) + " heads of all rows, not " +
               std::to_string(rows * value_heads));
    for (const Array* array : {&log_decay, &beta}) check_shape(*array, {rows, value_heads}, "[rows, num_value_heads]");
    row_stride(states, false);
    check_writable(states);
    check_writable(out);
    const std::vector<StateRun> runs = read_runs(chunks, decode_slots, rows, slots);
    const DeltaRule problem = {static_cast<int>(key_heads),
                               static_cast<int>(value_heads),
                               static_cast<int>(key_dim),
                               static_cast<int>(value_dim),
                               q.data,
                               row_stride(q),
                               k.data,
                               row_stride(k),
                               v.data,
                               row_stride(v),
                               static_cast<const float*>(log_decay.data),
                               row_stride(log_decay),
                               static_cast<const float*>(beta.data),
                               row_stride(beta),
                               static_cast<float*>(states.data),
                               static_cast<float*>(out.data),
                               row_stride(out)};
    const auto kernel = row_kernels().delta_rule[static_cast<int>(dtype)];
    const int64_t state_size = key_dim * value_dim, elements = rows * value_heads * state_size;
    const int64_t enough = std::max<int64_t>(1, elements / min_elements_per_thread);
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, enough));

    // A head of a chunk is a part, and so are some heads of decodes, one after the other.
    const int num_heads = problem.num_value_heads, num_runs = static_cast<int>(runs.size());
    const int chunk_parts = static_cast<int>(py::len(chunks)) * num_heads, decodes = num_runs * num_heads - chunk_parts;
    const int decode_parts = std::min(decodes, threads * parts_per_thread), num_parts = chunk_parts + decode_parts;
    std::optional<py::gil_scoped_release> release;
    if (elements >= min_elements_without_gil) release.emplace();
    run_phases(1, &num_parts, threads, [&](int, int part) {
        static thread_local Scratch scratch;
        float* const memory = scratch.at_least(delta_scratch_floats(problem));
        int head = part, end = part + 1;
        if (part >= chunk_parts) {
            head = chunk_parts + part_begin(decodes, decode_parts, part - chunk_parts);
            end = chunk_parts + part_begin(decodes, decode_parts, part - chunk_parts + 1);
        }
        for (; head < end; ++head) {
            const int64_t slot = head + 1 < end ? runs[(head + 1) / num_heads].slot : -1;
            const float* ahead = slot < 0 ? nullptr : problem.states + (slot * num_heads + (head + 1) % num_heads) * state_size;
            kernel(problem, runs[head / num_heads], head % num_heads, ahead, memory);
        }
    });
}

}  // namespace

void bind_linear_attention(py::module_& module) {
    module.def("convolve", &convolve);
    module.def("delta_rule", &delta_rule);
}

}  // namespace pacpu
