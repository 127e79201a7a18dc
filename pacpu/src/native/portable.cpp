// The native kernel for the compiler's default target, so on every CPU.
#include "attend.h"
#include "variants.h"

namespace pacpu {

const AttendSegment native_portable[num_dtypes] = {attend<InRegisters<Widened<float>>>,
                                                   attend<InRegisters<Widened<Half>>>,
                                                   attend<InRegisters<Widened<BFloat16>>>};

}  // namespace pacpu
