// Chooses the ISPC kernel's variant. Compiled with PACPU_ISPC_UNAVAILABLE, the reason, when ISPC could not be used.
#include "kernel.h"

#if !defined(PACPU_ISPC_UNAVAILABLE)

namespace {

// attend.ispc as it looks from C.
using Attend = void(const float* queries, const char* keys, int64_t block_bytes, const int32_t* blocks, int32_t num_tokens,
                    int32_t block_size, int32_t head_dim, int32_t padded_dim, int32_t group, float* max, float* sum,
                    float* output);

}  // namespace

extern "C" {
Attend pacpu_ispc_avx2_float32, pacpu_ispc_avx2_float16, pacpu_ispc_avx2_bfloat16;
Attend pacpu_ispc_avx512_float32, pacpu_ispc_avx512_float16, pacpu_ispc_avx512_bfloat16;
}

#endif

namespace pacpu {

#if defined(PACPU_ISPC_UNAVAILABLE)

Kernel ispc_kernel(Isa) { return {"ispc", {}, PACPU_ISPC_UNAVAILABLE}; }

#else

namespace {

template <Attend* function>
void attend(const Segment& s, const Segment*, SoftmaxState state) {
    function(s.queries, s.keys, s.block_bytes, s.blocks, s.num_tokens, s.block_size, s.head_dim, s.padded_dim, s.group,
             state.max, state.sum, state.output);
}

}  // namespace

Kernel ispc_kernel(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return {"ispc",
                    {attend<pacpu_ispc_avx512_float32>, attend<pacpu_ispc_avx512_float16>,
                     attend<pacpu_ispc_avx512_bfloat16>},
                    nullptr};
        case Isa::avx2:
            return {"ispc",
                    {attend<pacpu_ispc_avx2_float32>, attend<pacpu_ispc_avx2_float16>, attend<pacpu_ispc_avx2_bfloat16>},
                    nullptr};
        default: break;
    }
    return {"ispc", {}, "it needs AVX2"};
}

#endif

}  // namespace pacpu
