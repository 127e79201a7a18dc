// Chooses the native kernel's variant.
#include "variants.h"

namespace pacpu {

Kernel native_kernel(Isa isa) {
    const AttendSegment* attend = native_portable;
#if defined(__x86_64__)
    if (isa == Isa::avx2) attend = native_avx2;
    if (isa == Isa::avx512) attend = native_avx512;
#else
    (void)isa;
#endif
    return {"native", {attend[0], attend[1], attend[2]}, nullptr};
}

}  // namespace pacpu
