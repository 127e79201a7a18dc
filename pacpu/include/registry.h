// Which kernels there are, and the instruction set they use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace pacpu {

// The instruction set in use: the best one of this CPU, until select_isa names another.
Isa current_isa();
const char* isa_name(Isa isa);

// Throws std::invalid_argument if `name` is unknown or this CPU lacks it. Not for use during a call.
void select_isa(const std::string& name);

// Kernels for the current instruction set, best first, unavailable ones included.
const std::vector<Kernel>& all_kernels();

// The kernel used when the caller names none.
const Kernel& default_kernel(DType dtype);

// Throws std::invalid_argument if there is no such kernel or it is unavailable.
const Kernel& find_kernel(const std::string& name);

}  // namespace pacpu
