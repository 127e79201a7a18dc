// The llamafile kernel for AVX-512 F, BW, DQ and VL.
#define PACPU_SGEMM pacpu_llamafile_sgemm_avx512
#include "attend.h"
#include "variants.h"

namespace pacpu {

const AttendSegment llamafile_avx512[num_dtypes] = {attend<float>, attend<Half>, nullptr};

}  // namespace pacpu
