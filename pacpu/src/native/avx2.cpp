// The native kernel for AVX2, FMA and F16C.
#include "attend.h"
#include "variants.h"

namespace pacpu {

const AttendSegment native_avx2[num_dtypes] = {attend<InRegisters<Widened<float>>>,
                                               attend<InRegisters<Widened<Half>>>,
                                               attend<InRegisters<Widened<BFloat16>>>};

}  // namespace pacpu
