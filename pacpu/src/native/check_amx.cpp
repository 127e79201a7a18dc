// Permission and proof: AMX registers must be asked for, or the first use kills the process, and a path that has never
// run on the CPU at hand must not produce tokens before it has been compared with one that has.
#include "variants.h"

#if defined(__x86_64__)

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <vector>

#include "numbers.h"

namespace pacpu {
namespace {

constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

// Four heads to a KV head of 96 elements, 45 tokens in blocks of 16 and 7: whole and partial tiles.
bool agrees_with_avx512(int block_size) {
    constexpr int kv_heads = 2, group = 4, heads = kv_heads * group, dim = 96, num_tokens = 45, first_slot = 3;
    const int num_blocks = (first_slot + num_tokens + block_size - 1) / block_size;
    const int64_t head_bytes = int64_t{2} * 2 * block_size * dim, block_bytes = kv_heads * head_bytes;
    uint32_t random = 1;
    const auto next_number = [&] {
        random = random * 1664525 + 1013904223;
        BFloat16 y;
        narrow(float(random >> 8) / (1 << 23) - 1, y);
        return y;
    };
    std::vector<BFloat16> cache(num_blocks * block_bytes / 2), raw_queries(heads * dim);
    std::vector<float> queries(heads * dim);
    std::vector<int32_t> blocks(num_blocks);
    for (BFloat16& x : cache) x = next_number();
    for (int i = 0; i < heads * dim; ++i) queries[i] = widen(raw_queries[i] = next_number());
    for (int i = 0; i < num_blocks; ++i) blocks[i] = num_blocks - 1 - i;
    const Segment segment = {queries.data(), raw_queries.data(), reinterpret_cast<const char*>(cache.data()),
                             head_bytes,     block_bytes,        blocks.data(),
                             first_slot,     num_tokens,         block_size,
                             dim,            dim,                group,
                             kv_heads,       1.0f,               Prefetch::level1};
    alignas(64) float outputs[2][heads * dim];
    float max[2][heads + 16], sum[2][heads + 16];
    native_avx512[static_cast<int>(DType::bfloat16)](segment, nullptr, {max[0], sum[0], outputs[0]});
    native_amx(segment, nullptr, {max[1], sum[1], outputs[1]});
    for (int i = 0; i < heads * dim; ++i)
        if (!(std::fabs(outputs[0][i] / sum[0][i / dim] - outputs[1][i] / sum[1][i / dim]) < 8e-3f)) return false;
    return true;
}

const char* find_problem() {
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return "the operating system does not permit AMX";
    for (const int block_size : {16, 7})
        if (!agrees_with_avx512(block_size)) return "AMX and AVX-512 gave different results on this CPU";
    return nullptr;
}

}  // namespace

const char* native_amx_problem() {
    static const char* const problem = find_problem();
    return problem;
}

}  // namespace pacpu

#else

namespace pacpu {

const char* native_amx_problem() { return "this architecture lacks it"; }

}  // namespace pacpu

#endif
