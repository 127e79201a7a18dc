// The native kernel's AMX path on an emulation of its instructions, behind a C function: built and called by
// test_native_amx.py, so that the path is tested on CPUs without AMX.
#include "../../pacpu/src/native/amx.cpp"

#include "paged_attention.h"
#include "rows.h"

// Queries and outputs change their format with these.
const pacpu::RowKernels& pacpu::row_kernels() { return rows_avx512; }

extern "C" void emulated_amx(int batch, int num_heads, int num_kv_heads, int head_dim, int block_size, const void* q,
                             const void* k, const void* v, void* out, void* kv_cache, const int32_t* block_tables,
                             int64_t table_stride, const int32_t* seq_lens, float scale, int window,
                             const float* sinks, int num_threads,
                             int prefetch, int shared_row_cost) {
    const int64_t q_stride = int64_t{num_heads} * head_dim, kv_stride = int64_t{num_kv_heads} * head_dim;
    const pacpu::Problem problem = {pacpu::DType::bfloat16,
                                    batch,
                                    num_heads,
                                    num_kv_heads,
                                    head_dim,
                                    block_size,
                                    q,
                                    k,
                                    v,
                                    out,
                                    q_stride,
                                    kv_stride,
                                    kv_stride,
                                    q_stride,
                                    kv_cache,
                                    nullptr,
                                    block_tables,
                                    table_stride,
                                    seq_lens,
                                    scale,
                                    window,
                                    sinks,
                                    num_threads,
                                    static_cast<pacpu::Prefetch>(prefetch),
                                    shared_row_cost};
    pacpu::run(problem, {"amx", {nullptr, nullptr, pacpu::native_amx}, nullptr});
}
