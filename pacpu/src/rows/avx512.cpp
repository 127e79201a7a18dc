#include "elementwise.h"
#include "widening.h"

namespace pacpu {

const RowKernels rows_avx512 = PACPU_ROW_KERNELS(widening_linear, nullptr, nullptr);

}  // namespace pacpu
