#include "elementwise.h"

namespace pacpu {

const RowKernels rows_avx2 = PACPU_ROW_KERNELS(nullptr, nullptr, nullptr);

}  // namespace pacpu
