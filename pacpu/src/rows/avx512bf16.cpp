#include "attend_prompt.h"
#include "dot.h"
#include "elementwise.h"
#include "linear_attention.h"
#include "quantised/dot.h"

namespace pacpu {

const RowKernels rows_avx512bf16 = PACPU_ROW_KERNELS(dot_linear, pack_panel, attend_prompt, dot_code_kernels);

}  // namespace pacpu
