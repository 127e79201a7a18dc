// Chooses the instruction set for the work on rows.
#include "rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "registry.h"

namespace pacpu {
namespace {

#if defined(__x86_64__)

// Runs an instruction many times on eleven independent sums, nothing in memory, and returns the seconds: the least of
// some attempts, since other work may come between. Assembly, for a compiler would keep sums in memory.
#define ON_ELEVEN_SUMS(instruction)                                                                                  \
    "vpxord %%zmm15, %%zmm15, %%zmm15\n\t" ON_SUM(instruction, 0) ON_SUM(instruction, 1) ON_SUM(instruction, 2)        \
        ON_SUM(instruction, 3) ON_SUM(instruction, 4) ON_SUM(instruction, 5) ON_SUM(instruction, 6)                  \
            ON_SUM(instruction, 7) ON_SUM(instruction, 8) ON_SUM(instruction, 9) ON_SUM(instruction, 10)
#define ON_SUM(instruction, i) instruction " %%zmm15, %%zmm15, %%zmm" #i "\n\t"
#define LEAST_SECONDS(instruction)                                                                                   \
    least_seconds([] {                                                                                               \
        asm volatile(ON_ELEVEN_SUMS(instruction)::                                                                   \
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",  \
                           "xmm15");                                                                                 \
    })

template <typename Round>
double least_seconds(Round round) {
    using Clock = std::chrono::steady_clock;
    double least = 1.0;
    for (int attempt = 0; attempt < 7; ++attempt) {
        const auto start = Clock::now();
        for (int i = 0; i < 20000; ++i) round();
        least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
    }
    return least;
}

// A dot product does twice the work of a multiply-add; on Intel's CPUs it takes four times as long.
bool dot_bf16_is_slow() { return LEAST_SECONDS("vdpbf16ps") > 2 * LEAST_SECONDS("vfmadd231ps"); }

#endif

}  // namespace

const RowKernels& row_kernels() {
#if defined(__x86_64__)
    if (current_isa() >= Isa::avx512bf16) {
        static const bool is_slow = dot_bf16_is_slow();  // measured when first asked, in 10 ms
        return is_slow ? rows_avx512 : rows_avx512bf16;
    }
    if (current_isa() == Isa::avx512) return rows_avx512;
    if (current_isa() == Isa::avx2) return rows_avx2;
#endif
    return rows_portable;
}

void norm_heads(const HeadNorms& p, void (*rms_norm)(const RmsNorm&, int, int), int begin, int end) {
    const int64_t head_bytes = p.head_dim * p.element_bytes;
    for (int head = 0; head < p.num_heads; ++head) {
        void* x = static_cast<char*>(p.x) + head * head_bytes;
        const void* weight = static_cast<const char*>(p.weights) + head * head_bytes;
        rms_norm({p.rows, p.head_dim, x, p.x_stride, nullptr, 0, weight, p.eps, x, p.x_stride, p.offset}, begin,
                 end);
    }
}

void store_kv(const StoreKV& p, int begin, int end) {
    const int64_t half_bytes = p.block_size * p.slot_bytes, block_bytes = 2 * half_bytes * p.num_kv_heads;
    for (int row = begin; row < end; ++row) {
        const char* k = p.k + row * p.k_stride_bytes;
        const char* v = p.v + row * p.v_stride_bytes;
        char* slot = p.kv_cache + p.blocks[row] * block_bytes + p.offsets[row] * p.slot_bytes;
        for (int head = 0; head < p.num_kv_heads; ++head, k += p.slot_bytes, v += p.slot_bytes, slot += 2 * half_bytes) {
            std::memcpy(slot, k, p.slot_bytes);
            std::memcpy(slot + half_bytes, v, p.slot_bytes);
        }
    }
}

bool linear_is_fastest() { return row_kernels().linear && isa_problem(Isa::amx); }

}  // namespace pacpu
