// The llamafile kernel's entry points, one set per instruction set.
#pragma once

#include "kernel.h"

namespace pacpu {

extern const AttendSegment llamafile_avx2[num_dtypes];
extern const AttendSegment llamafile_avx512[num_dtypes];

}  // namespace pacpu
