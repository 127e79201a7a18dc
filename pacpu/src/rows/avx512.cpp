#include "elementwise.h"
#include "linear.h"

namespace pacpu {

const RowKernels rows_avx512 = PACPU_ROW_KERNELS(linear);

}  // namespace pacpu
