// Memory that is written for the first time.
#pragma once

#include <cstddef>

namespace pacpu {

// Writes zeros, on `num_threads` threads at most. They take pieces of 2 MiB in turn, each a huge page where the system
// grants them. A page lies on the NUMA node of the thread that writes it first: so pages are spread over the nodes of all
// threads, any of which may read any block later.
void zero(void* data, size_t num_bytes, int num_threads);

}  // namespace pacpu
