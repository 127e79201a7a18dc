// The Python side of the work on rows: checks arguments and divides the work among threads.
#include <pybind11/stl.h>

#include <algorithm>

#include "checks.h"
#include "divide.h"
#include "scratch.h"

namespace py = pybind11;

namespace pacpu {

DType float_dtype(const Array& array) {
    const std::optional<DType> dtype = dtype_of(array);
    if (!dtype) refuse(std::string(array.name) + " must have dtype float32, float16 or bfloat16, not " + array.dtype_name());
    return *dtype;
}

void check_bfloat16(const Array& array) {
    if (float_dtype(array) != DType::bfloat16)
        refuse(std::string(array.name) + " must have dtype bfloat16, not " + array.dtype_name());
}

std::vector<int64_t> packed_shape(int64_t out_features, int64_t in_features) {
    for (const auto& [name, size] : {std::pair{"out_features", out_features}, {"in_features", in_features}})
        if (size < 1 || size > most_size)
            refuse(std::string("a packed matrix must have from 1 to ") + std::to_string(most_size) + " " + name + ", not " +
                   std::to_string(size));
    return {(out_features + panel_columns - 1) / panel_columns, (in_features + 1) / 2, panel_columns, 2};
}

void check_slots(const Array& array, int64_t rows, int64_t limit, int64_t least) {
    if (!is_int(array, 64)) refuse(std::string(array.name) + " must have dtype int64, not " + array.dtype_name());
    check_shape(array, {rows}, "[rows]");
    row_stride(array, false);
    const auto* values = static_cast<const int64_t*>(array.data);
    for (int64_t i = 0; i < rows; ++i)
        if (values[i] < least || values[i] >= limit)
            refuse(std::string(array.name) + "[" + std::to_string(i) + "] must be below " + std::to_string(limit) + ", not " +
                   std::to_string(values[i]));
}

namespace {

void pack_matrix(py::handle weight_object, py::handle packed_object) {
    const Array weight = read_array("weight", weight_object), packed = read_array("packed", packed_object);
    check_bfloat16(weight);
    check_bfloat16(packed);
    check_rank(weight, 2, "[out_features, in_features]");
    check_sizes(weight);
    const int64_t out_features = weight.shape[0], in_features = weight.shape[1], stride = row_stride(weight);
    check_shape(packed, packed_shape(out_features, in_features), "packed_shape(out_features, in_features)");
    row_stride(packed, false);
    check_writable(packed);
    const auto* from = static_cast<const BFloat16*>(weight.data);
    auto* to = static_cast<BFloat16*>(packed.data);
    py::gil_scoped_release release;
    for (int64_t panel = 0; panel < packed.shape[0]; ++panel)
        for (int64_t pair = 0; pair < packed.shape[1]; ++pair)
            for (int64_t column = panel * panel_columns; column < (panel + 1) * panel_columns; ++column)
                for (int64_t i = 2 * pair; i < 2 * pair + 2; ++i)
                    *to++ = column < out_features && i < in_features ? from[column * stride + i] : BFloat16{0};
}

void linear(py::handle x_object, py::handle packed_object, py::handle bias_object, py::handle out_object,
            py::handle num_threads_object) {
    const Array x = read_array("x", x_object), packed = read_array("packed", packed_object);
    const Array out = read_array("out", out_object);
    const int num_threads = read_num_threads(num_threads_object);
    for (const Array* array : {&x, &packed, &out}) check_bfloat16(*array);
    check_rank(x, 2, "[rows, in_features]");
    check_rank(out, 2, "[rows, out_features]");
    check_sizes(x);
    check_sizes(out);
    check_shape(out, {x.shape[0], out.shape[1]}, "[rows, out_features]");
    check_shape(packed, packed_shape(out.shape[1], x.shape[1]), "packed_shape(out_features, in_features)");
    row_stride(packed, false);
    check_writable(out);
    Linear problem = {static_cast<int>(x.shape[0]),
                      static_cast<int>(x.shape[1]),
                      static_cast<int>(out.shape[1]),
                      static_cast<const BFloat16*>(x.data),
                      row_stride(x),
                      static_cast<const BFloat16*>(packed.data),
                      nullptr,
                      static_cast<BFloat16*>(out.data),
                      row_stride(out)};
    std::optional<Array> bias;
    if (!bias_object.is_none()) {
        bias = read_array("bias", bias_object);
        check_bfloat16(*bias);
        check_shape(*bias, {out.shape[1]}, "[out_features]");
        row_stride(*bias, false);
        problem.bias = static_cast<const BFloat16*>(bias->data);
    }
    const auto kernel = row_kernels().linear;
    if (!kernel) refuse("linear needs AVX-512; the instruction set in use is another: multiply by other means");
    if (x.shape[0])
        divide(static_cast<int>(packed.shape[0]), num_threads, [&](int begin, int end) {
            static thread_local Scratch scratch;
            kernel(problem, begin, end, scratch.at_least(linear_scratch_floats(problem)));
        });
}

void rms_norm(py::handle x_object, py::handle weight_object, py::handle eps_object, py::handle out_object,
              py::handle addend_object, py::handle offset_object, py::handle num_threads_object) {
    const Array x = read_array("x", x_object), weight = read_array("weight", weight_object);
    const Array out = read_array("out", out_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    check_dtype(weight, x);
    check_dtype(out, x);
    check_rank(x, 2, "[rows, size]");
    check_sizes(x);
    check_shape(weight, {x.shape[1]}, "[size]");
    check_shape(out, x.shape, "[rows, size]");
    row_stride(weight, false);
    check_writable(out);
    RmsNorm problem = {static_cast<int>(x.shape[0]),
                       static_cast<int>(x.shape[1]),
                       x.data,
                       row_stride(x),
                       nullptr,
                       0,
                       weight.data,
                       static_cast<float>(read_scalar<double>("eps", eps_object)),
                       out.data,
                       row_stride(out),
                       static_cast<float>(read_scalar<double>("offset", offset_object))};
    std::optional<Array> addend;
    if (!addend_object.is_none()) {
        addend = read_array("addend", addend_object);
        check_dtype(*addend, x);
        check_shape(*addend, x.shape, "[rows, size]");
        check_writable(x);
        problem.addend = addend->data;
        problem.addend_stride = row_stride(*addend);
    }
    const auto kernel = row_kernels().rms_norm[static_cast<int>(dtype)];
    divide_rows(x, num_threads, [&](int begin, int end) { kernel(problem, begin, end); });
}

void norm_heads(py::handle x_object, py::handle weights_object, py::handle eps_object, py::handle offset_object,
                py::handle num_threads_object) {
    const Array x = read_array("x", x_object), weights = read_array("weights", weights_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    check_dtype(weights, x);
    check_rank(x, 3, "[rows, heads, head_dim]");
    check_sizes(x);
    check_shape(weights, {x.shape[1], x.shape[2]}, "[heads, head_dim]");
    row_stride(weights, false);
    check_writable(x);
    const int heads = static_cast<int>(x.shape[1]), head_dim = static_cast<int>(x.shape[2]);
    const float eps = static_cast<float>(read_scalar<double>("eps", eps_object));
    const float offset = static_cast<float>(read_scalar<double>("offset", offset_object));
    const HeadNorms problem = {static_cast<int>(x.shape[0]), heads,        head_dim, x.data, row_stride(x),
                               x.type_bits / 8,              weights.data, eps,      offset};
    const auto kernel = row_kernels().rms_norm[static_cast<int>(dtype)];
    divide_rows(x, num_threads, [&](int begin, int end) { norm_heads(problem, kernel, begin, end); });
}

void rotary(py::handle x_object, py::handle angles_object, py::handle num_threads_object) {
    const Array x = read_array("x", x_object), angles = read_array("angles", angles_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    check_rank(x, 3, "[rows, heads, head_dim]");
    check_sizes(x);
    if (x.shape[2] % 2) refuse("x must have an even head_dim, not " + std::to_string(x.shape[2]));
    if (float_dtype(angles) != DType::float32) refuse("angles must have dtype float32, not " + angles.dtype_name());
    check_shape(angles, {x.shape[0], 2, x.shape[2]}, "[rows, 2, head_dim]");
    check_writable(x);
    const Rotary problem = {static_cast<int>(x.shape[0]),
                            static_cast<int>(x.shape[1]),
                            static_cast<int>(x.shape[2]),
                            x.data,
                            row_stride(x),
                            static_cast<const float*>(angles.data),
                            row_stride(angles)};
    const auto kernel = row_kernels().rotary[static_cast<int>(dtype)];
    divide_rows(x, num_threads, [&](int begin, int end) { kernel(problem, begin, end); });
}

void silu_and_mul(py::handle x_object, py::handle out_object, py::handle num_threads_object) {
    const Array x = read_array("x", x_object), out = read_array("out", out_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    check_dtype(out, x);
    check_rank(x, 2, "[rows, 2 size]");
    check_rank(out, 2, "[rows, size]");
    check_sizes(x);
    check_shape(x, {out.shape[0], 2 * out.shape[1]}, "[rows, 2 size]");
    check_writable(out);
    const SiluAndMul problem = {static_cast<int>(out.shape[0]), static_cast<int>(out.shape[1]), x.data, row_stride(x), out.data,
                                row_stride(out)};
    const auto kernel = row_kernels().silu_and_mul[static_cast<int>(dtype)];
    divide_rows(x, num_threads, [&](int begin, int end) { kernel(problem, begin, end); });
}

void argmax(py::handle x_object, py::handle out_object, py::handle num_threads_object) {
    const Array x = read_array("x", x_object), out = read_array("out", out_object);
    const int num_threads = read_num_threads(num_threads_object);
    const DType dtype = float_dtype(x);
    check_rank(x, 2, "[rows, size]");
    check_sizes(x);
    if (x.shape[1] < 1) refuse("x must have at least one column");
    if (!is_int(out, 64)) refuse("out must have dtype int64, not " + out.dtype_name());
    check_shape(out, {x.shape[0]}, "[rows]");
    row_stride(out, false);
    check_writable(out);
    const Argmax problem = {static_cast<int>(x.shape[0]), static_cast<int>(x.shape[1]), x.data, row_stride(x),
                            static_cast<int64_t*>(out.data)};
    const auto kernel = row_kernels().argmax[static_cast<int>(dtype)];
    divide_rows(x, num_threads, [&](int begin, int end) { kernel(problem, begin, end); });
}

void store(py::handle k_object, py::handle v_object, py::handle kv_cache_object, py::handle blocks_object,
           py::handle offsets_object, py::handle num_threads_object) {
    const Array k = read_array("k", k_object), v = read_array("v", v_object);
    const Array kv_cache = read_array("kv_cache", kv_cache_object);
    const Array blocks = read_array("blocks", blocks_object), offsets = read_array("offsets", offsets_object);
    const int num_threads = read_num_threads(num_threads_object);
    float_dtype(k);
    check_dtype(v, k);
    check_rank(k, 3, "[rows, num_kv_heads, head_dim]");
    check_sizes(k);
    check_shape(v, k.shape, "[rows, num_kv_heads, head_dim]");
    if (is_bytes(kv_cache)) return store_codes(k, v, kv_cache, blocks, offsets, num_threads);
    check_dtype(kv_cache, k);
    check_rank(kv_cache, 5, "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    check_sizes(kv_cache);
    check_shape(kv_cache, {kv_cache.shape[0], k.shape[1], 2, kv_cache.shape[3], k.shape[2]},
                "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    row_stride(kv_cache, false);
    check_writable(kv_cache);
    check_slots(blocks, k.shape[0], kv_cache.shape[0]);
    check_slots(offsets, k.shape[0], kv_cache.shape[3]);
    const int64_t element_bytes = k.type_bits / 8;
    const StoreKV problem = {static_cast<int>(k.shape[0]),
                             static_cast<int>(k.shape[1]),
                             static_cast<int>(kv_cache.shape[3]),
                             k.shape[2] * element_bytes,
                             static_cast<const char*>(k.data),
                             static_cast<const char*>(v.data),
                             row_stride(k) * element_bytes,
                             row_stride(v) * element_bytes,
                             static_cast<char*>(kv_cache.data),
                             static_cast<const int64_t*>(blocks.data),
                             static_cast<const int64_t*>(offsets.data)};
    divide_rows(k, num_threads, [&](int begin, int end) { store_kv(problem, begin, end); });
}

// Rows that a part of a prompt's attention computes: with the heads of a group some tiles, and parts enough for the threads.

// Packed K and V of the prompts of a job, unless one prompt alone has more: 64 MiB.
constexpr size_t max_packed_floats = size_t{1} << 24;

bool has_prompt_attention() { return row_kernels().attend_prompt; }

// Adds to `owners` what keeps its arrays alive.
Prompt read_prompt(const py::tuple& arrays, float scale, int window, const std::optional<Array>& sinks,
                   std::vector<py::object>& owners) {
    if (arrays.size() != 4) refuse("each of prompts must be q, k, v and out, not " + std::to_string(arrays.size()) + " arrays");
    const Array q = read_array("q", arrays[0]), k = read_array("k", arrays[1]), v = read_array("v", arrays[2]);
    const Array out = read_array("out", arrays[3]);
    for (const Array* array : {&q, &k, &v, &out}) check_bfloat16(*array);
    check_rank(q, 3, "[rows, num_heads, head_dim]");
    check_rank(k, 3, "[num_kv_heads, context, head_dim]");
    check_sizes(q);
    check_sizes(k);
    check_query_elements(q);
    const int64_t heads = q.shape[1], kv_heads = k.shape[0];
    if (kv_heads * k.shape[1] > most_size)
        refuse("k must have at most " + std::to_string(most_size) + " tokens of all heads (num_kv_heads * context), not " +
               std::to_string(kv_heads * k.shape[1]));
    check_shape(k, {kv_heads, k.shape[1], q.shape[2]}, "[num_kv_heads, context, head_dim]");
    check_shape(v, k.shape, "[num_kv_heads, context, head_dim]");
    check_shape(out, q.shape, "[rows, num_heads, head_dim]");
    if (q.shape[2] < 2 || q.shape[2] % 2) refuse("q must have an even head_dim, not " + std::to_string(q.shape[2]));
    if (heads < 1 || kv_heads < 1 || heads % kv_heads)
        refuse("q must have a multiple of k's " + std::to_string(kv_heads) + " heads, not " + std::to_string(heads));
    if (k.shape[1] < q.shape[0])
        refuse("k must have a context of at least " + std::to_string(q.shape[0]) + " tokens, q's rows, not " +
               std::to_string(k.shape[1]));
    for (const Array* array : {&k, &v})
        if (array->strides[2] != 1) refuse(std::string(array->name) + " must be contiguous within a token");
    check_writable(out);
    if (sinks) check_sinks(*sinks, heads);
    for (const Array* array : {&q, &k, &v, &out}) owners.push_back(array->owner);
    return {static_cast<int>(q.shape[0]),
            static_cast<int>(heads),
            static_cast<int>(kv_heads),
            static_cast<int>(k.shape[1]),
            static_cast<int>(q.shape[2]),
            scale,
            static_cast<const BFloat16*>(q.data),
            row_stride(q),
            static_cast<const BFloat16*>(k.data),
            k.strides[0],
            k.strides[1],
            static_cast<const BFloat16*>(v.data),
            v.strides[0],
            v.strides[1],
            static_cast<BFloat16*>(out.data),
            row_stride(out),
            window,
            sinks ? static_cast<const float*>(sinks->data) : nullptr,
            nullptr};
}

// One job: K and V of all prompts are packed, then their rows are attended. Parts of both phases are numbered through.
void attend_prompts(Prompt* prompts, int count, size_t packed_floats, int num_threads) {
    static thread_local Scratch packed;
    BFloat16* place = reinterpret_cast<BFloat16*>(packed.at_least(packed_floats));
    std::vector<int> first[2] = {{0}, {0}};  // by phase: each prompt's first part, and the number of parts
    for (Prompt* p = prompts; p != prompts + count; ++p) {
        p->packed = place;
        place += 2 * p->packed_floats();
        first[0].push_back(first[0].back() + p->num_kv_heads * p->num_panels());
        first[1].push_back(first[1].back() +
                           p->num_kv_heads * ((p->rows + prompt_rows_at_once - 1) / prompt_rows_at_once));
    }
    const RowKernels& kernels = row_kernels();
    const int num_parts[] = {first[0].back(), first[1].back()};
    run_phases(2, num_parts, num_threads, [&](int phase, int part) {
        const auto next = std::upper_bound(first[phase].begin(), first[phase].end(), part);
        const Prompt& prompt = prompts[next - first[phase].begin() - 1];
        part -= next[-1];
        if (phase == 0) return kernels.pack_panel(prompt, part / prompt.num_panels(), part % prompt.num_panels());
        static thread_local Scratch scratch;
        // The last rows see most of the context: they go first, so that no thread is left with much at the end.
        const int end = prompt.rows - part / prompt.num_kv_heads * prompt_rows_at_once;
        kernels.attend_prompt(prompt, part % prompt.num_kv_heads, std::max(0, end - prompt_rows_at_once), end,
                              scratch.at_least(prompt.scratch_floats(prompt_rows_at_once)));
    });
}

void prompt_attention(const py::sequence& prompts_object, py::handle scale_object, py::handle window_object,
                      py::handle sinks_object, py::handle num_threads_object) {
    const float scale = static_cast<float>(read_scalar<double>("scale", scale_object));
    const int window = read_window(window_object);
    const std::optional<Array> sinks = read_optional("sinks", sinks_object);
    const int num_threads = read_num_threads(num_threads_object);
    std::vector<Prompt> prompts;
    std::vector<py::object> owners;
    for (const py::handle arrays : prompts_object) {
        const Prompt prompt = read_prompt(py::cast<py::tuple>(arrays), scale, window, sinks, owners);
        if (prompt.rows) prompts.push_back(prompt);
    }
    if (!has_prompt_attention()) refuse("prompt_attention needs AVX-512 BF16; the instruction set in use is another");
    py::gil_scoped_release release;
    for (size_t begin = 0, end = 0; begin < prompts.size(); begin = end) {
        size_t packed_floats = 0;
        do packed_floats += prompts[end++].packed_floats();
        while (end < prompts.size() && packed_floats + prompts[end].packed_floats() <= max_packed_floats);
        attend_prompts(&prompts[begin], static_cast<int>(end - begin), packed_floats, num_threads);
    }
}

}  // namespace

void bind_rows(py::module_& module) {
    module.def("packed_shape", [](py::handle out_features, py::handle in_features) {
        const int64_t outputs = read_int("out_features", out_features, 1, most_size);
        return py::tuple(py::cast(packed_shape(outputs, read_int("in_features", in_features, 1, most_size))));
    });
    module.def("pack_matrix", &pack_matrix);
    module.def("linear", &linear);
    module.def("rms_norm", &rms_norm);
    module.def("norm_heads", py::overload_cast<py::handle, py::handle, py::handle, py::handle, py::handle>(&norm_heads));
    module.def("rotary", &rotary);
    module.def("silu_and_mul", &silu_and_mul);
    module.def("argmax", &argmax);
    module.def("store_kv", &store);
    module.def("has_prompt_attention", &has_prompt_attention);
    module.def("prompt_attention", &prompt_attention);
    module.def("linear_is_fastest", &linear_is_fastest);
    bind_linear_attention(module);
    bind_kv_copies(module);
    bind_codes(module);
    bind_experts(module);
    bind_crossing(module);
}

}  // namespace pacpu
