// Chooses the native kernel's variant.
#include "variants.h"

namespace pacpu {

#if defined(__x86_64__)
namespace {

// With a single query head to a KV head a dot product has nothing to share, and multiply-adds are twice as fast (Zen 5).
void attend_bf16_by_group(const Segment& segment, const Segment* next, SoftmaxState state) {
    constexpr int bf16 = static_cast<int>(DType::bfloat16);
    (segment.group == 1 ? native_avx512[bf16] : native_avx512bf16)(segment, next, state);
}

}  // namespace
#endif

Kernel native_kernel(Isa isa) {
    const AttendSegment* attend = native_portable;
    AttendSegment attend_bf16 = nullptr;
#if defined(__x86_64__)
    if (isa == Isa::avx2) attend = native_avx2;
    if (isa >= Isa::avx512) attend = native_avx512;
    if (isa == Isa::avx512bf16) attend_bf16 = attend_bf16_by_group;
    if (isa == Isa::amx) attend_bf16 = native_amx;
#else
    (void)isa;
#endif
    return {"native", {attend[0], attend[1], attend_bf16 ? attend_bf16 : attend[2]}, nullptr, nullptr, true};
}

}  // namespace pacpu
