#include "registry.h"

#include <algorithm>
#include <stdexcept>

#include "contexts.h"
#include "int8.h"

namespace pacpu {
namespace {

constexpr const char* cache_type_names[num_cache_types] = {"float32", "float16", "bfloat16", "int8"};
constexpr Way ways[] = {{"none", Prefetch::none, false},
                        {"L2", Prefetch::level2, false},
                        {"L1", Prefetch::level1, false},
                        {"L2 AVX2", Prefetch::level2, true},
                        {"L1 AVX2", Prefetch::level1, true}};
constexpr const char* isa_names[num_isas] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)
bool cpu_has(Isa isa) {
    switch (isa) {
        case Isa::portable: return true;
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case Isa::avx512:
            return cpu_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
        case Isa::avx512bf16: return cpu_has(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
        case Isa::amx:
            return cpu_has(Isa::avx512bf16) && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
    }
    return false;
}
#else
bool cpu_has(Isa isa) { return isa == Isa::portable; }
#endif

// What the kernels without bf16 instructions make of an instruction set.
Isa plain(Isa isa) { return isa > Isa::avx512 ? Isa::avx512 : isa; }

struct Registry {
    Isa isa;
    std::vector<Kernel> kernels;

    explicit Registry(Isa isa) : isa(isa), kernels{native_kernel(isa), llamafile_kernel(plain(isa)), ispc_kernel(plain(isa))} {}
};

Isa best_isa() {
    for (int i = num_isas; i-- > 0;)
        if (!isa_problem(static_cast<Isa>(i))) return static_cast<Isa>(i);
    return Isa::portable;
}

Registry& registry() {
    static Registry instance(best_isa());
    return instance;
}

struct Setting {
    const Way* way = &ways[2];
    int shared_row_cost = block_cost;
};

Setting& setting(CacheType type, bool is_shared) {
    static Setting settings[num_isas][num_cache_types][2];
    return settings[static_cast<int>(current_isa())][static_cast<int>(type)][is_shared];
}

}  // namespace

Isa current_isa() { return registry().isa; }

const char* isa_problem(Isa isa) {
    if (!cpu_has(isa)) return "this CPU lacks it";
    return isa == Isa::amx ? native_amx_problem() : nullptr;
}

const char* isa_name(Isa isa) { return isa_names[static_cast<int>(isa)]; }

void select_isa(const std::string& name) {
    for (int i = 0; i < num_isas; ++i) {
        if (name != isa_names[i]) continue;
        const Isa isa = static_cast<Isa>(i);
        if (const char* problem = isa_problem(isa))
            throw std::invalid_argument("instruction set '" + name + "' cannot be used: " + problem + "; the best is '" +
                                        isa_name(best_isa()) + "'");
        registry() = Registry(isa);
        return;
    }
    throw std::invalid_argument("unknown instruction set '" + name + "'; use portable, avx2, avx512, avx512bf16 or amx");
}

std::vector<std::string> way_names(CacheType type, bool is_shared) {
    std::vector<std::string> names;
    for (const Way& way : ways)
        if (!way.is_narrow || (type == CacheType::int8 && !is_shared)) names.push_back(way.name);
    return names;
}

const Way& way(CacheType type, bool is_shared) { return *setting(type, is_shared).way; }

void set_way(CacheType type, bool is_shared, const std::string& name) {
    const std::vector<std::string> names = way_names(type, is_shared);
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end())
        throw std::invalid_argument("prefetch must be none, L2 or L1, for int8 MHA also L2 AVX2 or L1 AVX2, not " + name);
    setting(type, is_shared).way = &ways[found - names.begin()];
}

int shared_row_cost(CacheType type, bool is_shared) { return setting(type, is_shared).shared_row_cost; }

void set_shared_row_cost(CacheType type, bool is_shared, int cost) { setting(type, is_shared).shared_row_cost = cost; }

const Int8Kernels& int8_kernels(bool is_narrow) {
#if defined(__x86_64__)
    static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
    if (current_isa() >= Isa::avx512 && has_vnni && !is_narrow) return int8_avx512vnni;
    if (current_isa() >= Isa::avx2) return int8_avx2;
#endif
    return int8_portable;
}

const std::vector<Kernel>& all_kernels() { return registry().kernels; }

const char* cache_type_name(CacheType type) { return cache_type_names[static_cast<int>(type)]; }

const char* dtype_name(DType dtype) { return cache_type_names[static_cast<int>(dtype)]; }

bool computes(const Kernel& kernel, DType dtype) { return !kernel.unavailable && kernel.attend[static_cast<int>(dtype)]; }

const Kernel& default_kernel(DType dtype) {
    for (const Kernel& kernel : all_kernels())
        if (computes(kernel, dtype)) return kernel;
    throw std::logic_error("the native kernel is always available");
}

const Kernel& find_kernel(const std::string& name, DType dtype) {
    std::string available;
    for (const Kernel& kernel : all_kernels()) {
        if (name == kernel.name) {
            if (computes(kernel, dtype)) return kernel;
            if (kernel.unavailable) throw std::invalid_argument("kernel '" + name + "' is unavailable: " + kernel.unavailable);
            throw std::invalid_argument("kernel '" + name + "' does not compute in " + dtype_name(dtype) + ": " + kernel.limit);
        }
        if (computes(kernel, dtype)) available += available.empty() ? kernel.name : std::string(", ") + kernel.name;
    }
    throw std::invalid_argument("kernel '" + name + "' is unknown; available: " + available);
}

}  // namespace pacpu
