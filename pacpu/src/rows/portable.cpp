#include "elementwise.h"

namespace pacpu {

const RowKernels rows_portable = PACPU_ROW_KERNELS(nullptr, nullptr, nullptr);

}  // namespace pacpu
