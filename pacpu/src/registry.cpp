#include "registry.h"

#include <stdexcept>

namespace pacpu {
namespace {

constexpr const char* isa_names[num_isas] = {"portable", "avx2", "avx512"};

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512) return avx512;
#endif
    return isa == Isa::portable;
}

struct Registry {
    Isa isa;
    std::vector<Kernel> kernels;

    explicit Registry(Isa isa) : isa(isa), kernels{native_kernel(isa), ispc_kernel(isa)} {}
};

Isa best_isa() { return cpu_has(Isa::avx512) ? Isa::avx512 : cpu_has(Isa::avx2) ? Isa::avx2 : Isa::portable; }

Registry& registry() {
    static Registry instance(best_isa());
    return instance;
}

}  // namespace

Isa current_isa() { return registry().isa; }

const char* isa_name(Isa isa) { return isa_names[static_cast<int>(isa)]; }

void select_isa(const std::string& name) {
    for (int i = 0; i < num_isas; ++i) {
        if (name != isa_names[i]) continue;
        const Isa isa = static_cast<Isa>(i);
        if (!cpu_has(isa))
            throw std::invalid_argument("instruction set '" + name + "' is not supported by this CPU; the best it has is '" +
                                        isa_name(best_isa()) + "'");
        registry() = Registry(isa);
        return;
    }
    throw std::invalid_argument("unknown instruction set '" + name + "'; use portable, avx2 or avx512");
}

const std::vector<Kernel>& all_kernels() { return registry().kernels; }

const Kernel& default_kernel(DType) {
    for (const Kernel& kernel : all_kernels())
        if (!kernel.unavailable) return kernel;
    throw std::logic_error("the native kernel is always available");
}

const Kernel& find_kernel(const std::string& name) {
    std::string available;
    for (const Kernel& kernel : all_kernels()) {
        if (name == kernel.name) {
            if (!kernel.unavailable) return kernel;
            throw std::invalid_argument("kernel '" + name + "' is unavailable: " + kernel.unavailable);
        }
        if (!kernel.unavailable) available += available.empty() ? kernel.name : std::string(", ") + kernel.name;
    }
    throw std::invalid_argument("kernel '" + name + "' is unknown; available: " + available);
}

}  // namespace pacpu
