#include "attend_prompt.h"
#include "dot.h"
#include "elementwise.h"

namespace pacpu {

const RowKernels rows_avx512bf16 = PACPU_ROW_KERNELS(dot_linear, pack_panel, attend_prompt);

}  // namespace pacpu
