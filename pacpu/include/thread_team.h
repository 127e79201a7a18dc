// Runs the parts of a call on several threads.
#pragma once

#include <memory>
#include <type_traits>

namespace pacpu {

// Calls function(context, phase, part) once for every part in [0, num_parts[phase]) of every phase, one phase after the
// other, on the calling thread and on up to num_threads - 1 pooled helpers. Returns when all are done. Parts are
// claimed, not assigned: with fewer helpers than hoped for, even none, the caller does the rest, and a helper that comes
// late joins the phase under way. What a phase writes, the next one may read. Several threads may call at once. What the
// function throws, on whatever thread, the call throws: parts that have not begun by then are left out.
void run_phases(int num_phases, const int* num_parts, int num_threads, void (*function)(void*, int, int), void* context);

constexpr int max_phases = 12;

template <typename Function>
void run_phases(int num_phases, const int* num_parts, int num_threads, Function&& function) {
    using Callable = std::remove_reference_t<Function>;
    run_phases(
        num_phases, num_parts, num_threads,
        [](void* context, int phase, int part) { (*static_cast<Callable*>(context))(phase, part); },
        const_cast<void*>(static_cast<const void*>(std::addressof(function))));
}

// A single phase with a thread for each part.
template <typename Function>
void run_parts(int num_parts, Function&& function) {
    run_phases(1, &num_parts, num_parts, [&](int, int part) { function(part); });
}

}  // namespace pacpu
