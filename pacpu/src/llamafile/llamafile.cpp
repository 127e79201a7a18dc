// Chooses the llamafile kernel's variant. Compiled with PACPU_LLAMAFILE_UNAVAILABLE, the reason, when the source of the
// matrix product was not there.
#include "variants.h"

// A table of the product's library that only its quantised types look at.
extern "C" float ggml_table_f32_f16[1 << 16];
float ggml_table_f32_f16[1 << 16];

namespace pacpu {

Kernel llamafile_kernel(Isa isa) {
#if defined(PACPU_LLAMAFILE_UNAVAILABLE)
    (void)isa;
    return {"llamafile", {}, PACPU_LLAMAFILE_UNAVAILABLE};
#else
    const AttendSegment* attend = isa >= Isa::avx512 ? llamafile_avx512 : isa == Isa::avx2 ? llamafile_avx2 : nullptr;
    if (!attend) return {"llamafile", {}, "it needs AVX2"};
    return {"llamafile", {attend[0], attend[1], attend[2]}, nullptr, "llamafile's matrix product takes no bfloat16", true};
#endif
}

}  // namespace pacpu
