// Chooses the ISPC kernel's variant. Built with PACPU_ISPC_UNAVAILABLE, the reason, when there is no ISPC compiler.
#include "kernel.h"

namespace pacpu {

Kernel ispc_kernel(Isa) {
#ifndef PACPU_ISPC_UNAVAILABLE
#define PACPU_ISPC_UNAVAILABLE "TODO"
#endif
    return {"ispc", {}, PACPU_ISPC_UNAVAILABLE};
}

}  // namespace pacpu
