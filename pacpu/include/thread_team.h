// Runs the parts of a call on several threads.
#pragma once

#include <memory>
#include <type_traits>

namespace pacpu {

// Calls function(context, part) once for every part in [0, num_parts), on the calling thread and on up to
// num_parts - 1 pooled helpers, and returns when all are done. Parts are claimed, not assigned: with fewer helpers
// than hoped for, even none, the caller does the rest. Several threads may call at once. The function must not throw.
void run_parts(int num_parts, void (*function)(void*, int), void* context);

template <typename Function>
void run_parts(int num_parts, Function&& function) {
    using Callable = std::remove_reference_t<Function>;
    run_parts(
        num_parts, [](void* context, int part) { (*static_cast<Callable*>(context))(part); },
        const_cast<void*>(static_cast<const void*>(std::addressof(function))));
}

}  // namespace pacpu
