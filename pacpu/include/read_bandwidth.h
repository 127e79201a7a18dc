// The yardstick of every kernel: how fast memory can be read.
#pragma once

#include <cstddef>

namespace pacpu {

// Seconds that `num_threads` threads take to read `num_bytes` of host memory once, each a share of its own, in the faster
// of two patterns; both are tried. Each thread has a core of its own, and the time counts while it has it.
double read_seconds(const void* data, size_t num_bytes, int num_threads);

}  // namespace pacpu
