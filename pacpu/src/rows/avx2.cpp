#include "elementwise.h"
#include "linear_attention.h"
#include "quantised/product.h"

namespace pacpu {

const RowKernels rows_avx2 = PACPU_ROW_KERNELS(nullptr, nullptr, nullptr, code_kernels);

}  // namespace pacpu
