// The Python module: checks arguments and calls the driver.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "arguments.h"
#include "contexts.h"
#include "int8.h"
#include "paged_attention.h"
#include "read_bandwidth.h"
#include "registry.h"
#include "zero.h"

namespace py = pybind11;

namespace pacpu {

void bind_rows(py::module_& module);  // rows/binding.cpp

namespace {

void check_tables(const Problem& p, int64_t max_blocks, int64_t num_blocks) {
    for (int i = 0; i < p.batch; ++i) {
        const int64_t seq_len = p.seq_lens[i], most = std::min(max_blocks * p.block_size, most_size);
        if (seq_len < 1 || seq_len > most)
            refuse("seq_lens[" + std::to_string(i) + "] must be between 1 and " + std::to_string(most) +
                   (most < most_size ? " (max_blocks_per_seq * block_size), not " : ", not ") + std::to_string(seq_len));
        const int32_t* table = p.block_tables + i * p.table_stride;
        for (int64_t j = first_block(p, i); j * p.block_size < seq_len; ++j)
            if (table[j] < 0 || table[j] >= num_blocks)
                refuse("block_tables[" + std::to_string(i) + ", " + std::to_string(j) + "] must be a block id below " +
                       std::to_string(num_blocks) + ", not " + std::to_string(table[j]));
    }
}

void paged_attention(py::handle q_object, py::handle k_object, py::handle v_object, py::handle kv_cache_object,
                     py::handle block_tables_object, py::handle seq_lens_object, py::handle out_object, py::handle scale_object,
                     py::handle window_object, py::handle sinks_object, py::handle num_threads_object,
                     py::handle kernel_object) {
    const Array q = read_array("q", q_object), k = read_array("k", k_object), v = read_array("v", v_object);
    const Array kv_cache = read_array("kv_cache", kv_cache_object), out = read_array("out", out_object);
    const Array block_tables = read_array("block_tables", block_tables_object);
    const Array seq_lens = read_array("seq_lens", seq_lens_object);
    const auto scale = read_scalar<double>("scale", scale_object);
    const int num_threads = read_num_threads(num_threads_object);
    const int window = read_window(window_object);
    const std::optional<Array> sinks = read_optional("sinks", sinks_object);

    const std::optional<DType> dtype = dtype_of(q);
    if (!dtype) refuse("q must have dtype float32, float16 or bfloat16, not " + q.dtype_name());
    const bool is_int8 = is_bytes(kv_cache);
    for (const Array* array : {&k, &v, &out}) check_dtype(*array, q);
    if (!is_int8) check_dtype(kv_cache, q);
    for (const Array* array : {&block_tables, &seq_lens})
        if (!is_int(*array, 32)) refuse(std::string(array->name) + " must have dtype int32, not " + array->dtype_name());

    check_rank(q, 3, "[batch, num_heads, head_dim]");
    check_rank(kv_cache, is_int8 ? 3 : 5,
               is_int8 ? "[num_blocks, num_kv_heads, head_bytes]" : "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    check_rank(block_tables, 2, "[batch, max_blocks_per_seq]");
    const int64_t batch = q.shape[0], num_heads = q.shape[1], head_dim = q.shape[2];
    const int64_t num_blocks = kv_cache.shape[0], num_kv_heads = kv_cache.shape[1];
    const int64_t max_blocks = block_tables.shape[1];
    for (const Array* array : {&q, &kv_cache, &block_tables}) check_sizes(*array);
    check_query_elements(q);
    if (head_dim < 8 || head_dim % 8) refuse("q must have a head_dim that is a multiple of 8, not " + std::to_string(head_dim));
    if (num_kv_heads < 1 || num_heads < 1 || num_heads % num_kv_heads)
        refuse("q must have a multiple of kv_cache's " + std::to_string(num_kv_heads) + " KV heads, not " +
               std::to_string(num_heads) + " heads");
    const int64_t block_size = is_int8 ? int8_block_size(kv_cache, head_dim) : kv_cache.shape[3];
    if (block_size < 1) refuse("kv_cache must have a block_size of at least 1, not " + std::to_string(block_size));
    check_shape(k, {batch, num_kv_heads, head_dim}, "[batch, num_kv_heads, head_dim]");
    check_shape(v, {batch, num_kv_heads, head_dim}, "[batch, num_kv_heads, head_dim]");
    if (!is_int8)
        check_shape(kv_cache, {num_blocks, num_kv_heads, 2, block_size, head_dim},
                    "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    check_shape(block_tables, {batch, max_blocks}, "[batch, max_blocks_per_seq]");
    check_shape(seq_lens, {batch}, "[batch]");
    check_shape(out, q.shape, "[batch, num_heads, head_dim]");
    if (sinks) check_sinks(*sinks, num_heads);
    row_stride(kv_cache, false);
    row_stride(seq_lens, false);
    check_writable(kv_cache);
    check_writable(out);

    const Kernel* kernel = nullptr;
    try {
        kernel = kernel_object.is_none() ? &default_kernel(*dtype)
                                         : &find_kernel(read_scalar<std::string>("kernel", kernel_object), *dtype);
    } catch (const std::invalid_argument& error) {
        refuse(error.what());
    }
    if (is_int8 && kernel != &all_kernels().front())
        refuse(std::string("kernel '") + kernel->name + "' does not compute in int8; 'native' does");

    const CacheType cache_type = is_int8 ? CacheType::int8 : static_cast<CacheType>(*dtype);
    const Way& way_in_use = way(cache_type, num_heads > num_kv_heads);
    const Problem problem = {*dtype,
                             static_cast<int>(batch),
                             static_cast<int>(num_heads),
                             static_cast<int>(num_kv_heads),
                             static_cast<int>(head_dim),
                             static_cast<int>(block_size),
                             q.data,
                             k.data,
                             v.data,
                             out.data,
                             row_stride(q),
                             row_stride(k),
                             row_stride(v),
                             row_stride(out),
                             kv_cache.data,
                             is_int8 ? &int8_kernels(way_in_use.is_narrow) : nullptr,
                             static_cast<const int32_t*>(block_tables.data),
                             row_stride(block_tables),
                             static_cast<const int32_t*>(seq_lens.data),
                             static_cast<float>(scale),
                             window,
                             sinks ? static_cast<const float*>(sinks->data) : nullptr,
                             num_threads,
                             way_in_use.prefetch,
                             shared_row_cost(cache_type, num_heads > num_kv_heads)};
    check_tables(problem, max_blocks, num_blocks);
    py::gil_scoped_release release;
    run(problem, *kernel);
}

int rows_per_read_of(py::handle num_heads_object, py::handle num_kv_heads_object) {
    constexpr int64_t least = std::numeric_limits<int64_t>::min();
    const int64_t num_heads = read_int("num_heads", num_heads_object, least, most_size);
    const int64_t num_kv_heads = read_int("num_kv_heads", num_kv_heads_object, least, most_size);
    if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads)
        refuse("num_heads must be a multiple of num_kv_heads, both at least 1, not " + std::to_string(num_heads) + " and " +
               std::to_string(num_kv_heads));
    return rows_per_read(static_cast<int>(num_heads), static_cast<int>(num_kv_heads));
}

// Of a contiguous array.
size_t bytes_of(const Array& array) {
    if (array.shape.empty()) refuse("array must have a dimension");
    row_stride(array, false);
    size_t num_bytes = array.type_bits / 8;
    for (const int64_t size : array.shape) num_bytes *= size;
    return num_bytes;
}

void zero_array(py::handle object, py::handle num_threads_object) {
    const Array array = read_array("array", object);
    const int num_threads = read_num_threads(num_threads_object);
    const size_t num_bytes = bytes_of(array);
    check_writable(array);
    py::gil_scoped_release release;
    zero(array.data, num_bytes, num_threads);
}

double read_bandwidth(py::handle object, py::handle num_threads_object) {
    const Array array = read_array("array", object);
    const int num_threads = read_num_threads(num_threads_object);
    const size_t num_bytes = bytes_of(array);
    py::gil_scoped_release release;
    return num_bytes / read_seconds(array.data, num_bytes, num_threads);
}

DType dtype_named(const std::string& name) {
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
        if (name == dtype_name(dtype)) return dtype;
    refuse("dtype must be float32, float16 or bfloat16, not " + name);
}

CacheType cache_type_named(const std::string& name) {
    return name == cache_type_name(CacheType::int8) ? CacheType::int8 : static_cast<CacheType>(dtype_named(name));
}

bool is_shared_in(const std::string& heads) {
    if (heads != "MHA" && heads != "GQA") refuse("heads must be MHA or GQA, not " + heads);
    return heads == "GQA";
}

std::vector<std::string> get_prefetches(const std::string& dtype, const std::string& heads) {
    return way_names(cache_type_named(dtype), is_shared_in(heads));
}

const char* get_prefetch(const std::string& dtype, const std::string& heads) {
    return way(cache_type_named(dtype), is_shared_in(heads)).name;
}

void choose_prefetch(const std::string& dtype, const std::string& heads, const std::string& name) {
    set_way(cache_type_named(dtype), is_shared_in(heads), name);
}

double get_shared_row_cost(const std::string& dtype, const std::string& heads) {
    return static_cast<double>(shared_row_cost(cache_type_named(dtype), is_shared_in(heads))) / block_cost;
}

void choose_shared_row_cost(const std::string& dtype, const std::string& heads, double cost) {
    if (!(cost > 0 && cost <= 1)) refuse("cost must be above 0 and at most 1, not " + std::string(py::str(py::float_(cost))));
    set_shared_row_cost(cache_type_named(dtype), is_shared_in(heads), std::max(1, static_cast<int>(std::lround(cost * block_cost))));
}

py::list kernels(const std::optional<std::string>& dtype) {
    py::list names;
    for (const Kernel& kernel : all_kernels())
        if (dtype ? computes(kernel, dtype_named(*dtype)) : !kernel.unavailable) names.append(kernel.name);
    return names;
}

py::dict unavailable_isas() {
    py::dict reasons;
    for (int i = 0; i < num_isas; ++i)
        if (const char* problem = isa_problem(static_cast<Isa>(i))) reasons[isa_name(static_cast<Isa>(i))] = problem;
    return reasons;
}

py::dict unavailable() {
    py::dict reasons;
    for (const Kernel& kernel : all_kernels())
        if (kernel.unavailable) reasons[kernel.name] = kernel.unavailable;
    return reasons;
}

const char* default_kernel_name(const std::string& dtype) { return default_kernel(dtype_named(dtype)).name; }

}  // namespace
}  // namespace pacpu

PYBIND11_MODULE(_pacpu, module) {
    if (const char* isa = std::getenv("PACPU_ISA"); isa && *isa) {
        try {
            pacpu::select_isa(isa);
        } catch (const std::invalid_argument& error) {
            throw py::import_error(std::string("PACPU_ISA: ") + error.what());
        }
    }
    module.def("paged_attention", &pacpu::paged_attention);
    module.def("read_bandwidth", &pacpu::read_bandwidth);
    module.def("zero", &pacpu::zero_array);
    module.def("kernels", &pacpu::kernels);
    module.def("unavailable", &pacpu::unavailable);
    module.def("unavailable_isas", &pacpu::unavailable_isas);
    module.def("default_kernel", &pacpu::default_kernel_name);
    module.def("isa", [] { return pacpu::isa_name(pacpu::current_isa()); });
    module.def("select_isa", &pacpu::select_isa);
    module.def("prefetches", &pacpu::get_prefetches);
    module.def("prefetch", &pacpu::get_prefetch);
    module.def("set_prefetch", &pacpu::choose_prefetch);
    module.def("rows_per_read", &pacpu::rows_per_read_of);
    module.def("shared_row_cost", &pacpu::get_shared_row_cost);
    module.def("set_shared_row_cost", &pacpu::choose_shared_row_cost);
    pacpu::bind_rows(module);
}
