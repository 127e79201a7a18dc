// Chooses the native kernel's variant.
#include "variants.h"

namespace pacpu {

Kernel native_kernel(Isa isa) {
    const AttendSegment* attend = native_portable;
    AttendSegment attend_bf16 = nullptr;
#if defined(__x86_64__)
    if (isa == Isa::avx2) attend = native_avx2;
    if (isa >= Isa::avx512) attend = native_avx512;
    if (isa == Isa::avx512bf16) attend_bf16 = native_avx512bf16;
    if (isa == Isa::amx) attend_bf16 = native_amx;
#else
    (void)isa;
#endif
    return {"native", {attend[0], attend[1], attend_bf16 ? attend_bf16 : attend[2]}, nullptr, nullptr, true};
}

}  // namespace pacpu
