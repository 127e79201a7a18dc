// Chooses the ISPC kernel's variant. Compiled with PACPU_ISPC_UNAVAILABLE, the reason, when ISPC could not be used.
#include "kernel.h"
#include "scratch.h"

#if !defined(PACPU_ISPC_UNAVAILABLE)

namespace {

// attend.ispc as it looks from C.
using Attend = void(const float* queries, const char* keys, int64_t head_bytes, int64_t block_bytes, const int32_t* blocks,
                    int32_t first_slot, int32_t num_tokens, int32_t block_size, int32_t head_dim, int32_t padded_dim,
                    int32_t group, int32_t num_kv_heads, float* scores, int32_t row_scores, float* max, float* sum,
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

constexpr int lanes = 16;  // of the widest target

template <Attend* function>
void attend(const Segment& s, const Segment*, SoftmaxState state) {
    // The scores of all tokens are kept between the passes, as in NEO: 128 KB for 1,024 tokens of 32 heads.
    static thread_local Scratch scratch;
    const int row_scores = (s.num_kv_heads * s.group + lanes - 1) / lanes * lanes;
    function(s.queries, s.keys, s.head_bytes, s.block_bytes, s.blocks, s.first_slot, s.num_tokens, s.block_size, s.head_dim,
             s.padded_dim, s.group, s.num_kv_heads, scratch.at_least(size_t(s.num_tokens) * row_scores), row_scores,
             state.max, state.sum, state.output);
}

}  // namespace

Kernel ispc_kernel(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return {"ispc",
                    {attend<pacpu_ispc_avx512_float32>, attend<pacpu_ispc_avx512_float16>,
                     attend<pacpu_ispc_avx512_bfloat16>},
                    nullptr,
                    nullptr,
                    true};
        case Isa::avx2:
            return {"ispc",
                    {attend<pacpu_ispc_avx2_float32>, attend<pacpu_ispc_avx2_float16>, attend<pacpu_ispc_avx2_bfloat16>},
                    nullptr,
                    nullptr,
                    true};
        default: break;
    }
    return {"ispc", {}, "it needs AVX2"};
}

#endif

}  // namespace pacpu
