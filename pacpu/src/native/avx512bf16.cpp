// The native kernel for AVX-512 BF16, in bf16. In the other types it is that of AVX-512.
#include "dot_bf16.h"
#include "variants.h"

namespace pacpu {

const AttendSegment native_avx512bf16 = attend<InRegisters<DotBF16>>;

}  // namespace pacpu
