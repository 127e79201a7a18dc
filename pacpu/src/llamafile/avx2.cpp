// The llamafile kernel for AVX2, FMA and F16C.
#define PACPU_SGEMM pacpu_llamafile_sgemm_avx2
#include "attend.h"
#include "variants.h"

namespace pacpu {

const AttendSegment llamafile_avx2[num_dtypes] = {attend<float>, attend<Half>, nullptr};

}  // namespace pacpu
