// The native kernel for AVX-512 F, BW, DQ and VL.
#include "attend.h"
#include "variants.h"

namespace pacpu {

const AttendSegment native_avx512[num_dtypes] = {attend<InRegisters<Widened<float>>>,
                                                 attend<InRegisters<Widened<Half>>>,
                                                 attend<InRegisters<Widened<BFloat16>>>};

}  // namespace pacpu
