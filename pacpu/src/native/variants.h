// The native kernel's entry points, one set per instruction set.
#pragma once

#include "kernel.h"

namespace pacpu {

extern const AttendSegment native_portable[num_dtypes];
#if defined(__x86_64__)
extern const AttendSegment native_avx2[num_dtypes];
extern const AttendSegment native_avx512[num_dtypes];
extern const AttendSegment native_avx512bf16;  // bfloat16 only, as the next
extern const AttendSegment native_amx;         // only if native_amx_problem() finds none
#endif

}  // namespace pacpu
