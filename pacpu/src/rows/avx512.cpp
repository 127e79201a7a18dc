#include "elementwise.h"
#include "linear_attention.h"
#include "quantised/product.h"
#include "widening.h"

namespace pacpu {

const RowKernels rows_avx512 = PACPU_ROW_KERNELS(widening_linear, nullptr, nullptr, code_kernels);

}  // namespace pacpu
