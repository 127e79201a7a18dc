// Divides the work of a call among threads.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "thread_team.h"

namespace pacpu {

// With fewer, waking a thread takes longer than what it does.
constexpr int64_t min_elements_per_thread = 1 << 15;

// With fewer, a call ends within some 10 us: sooner than another thread that got the GIL gives it back.
constexpr int64_t min_elements_without_gil = 1 << 16;

// Calls function(begin, end) for stretches of [0, count) on so many threads, without the GIL unless `keeps_gil`.
template <typename Function>
void divide(int count, int num_threads, Function&& function, bool keeps_gil = false) {
    std::optional<pybind11::gil_scoped_release> release;
    if (!keeps_gil) release.emplace();
    const int num_parts = num_threads == 1 ? std::min(count, 1) : std::min(count, num_threads * parts_per_thread);
    run_phases(1, &num_parts, num_threads, [&](int, int part) {
        function(part_begin(count, num_parts, part), part_begin(count, num_parts, part + 1));
    });
}

template <typename Function>
void divide_rows(const Array& array, int num_threads, Function&& function) {
    int64_t elements = 1;
    for (const int64_t size : array.shape) elements *= size;
    const int64_t enough = std::max<int64_t>(1, elements / min_elements_per_thread);
    divide(static_cast<int>(array.shape[0]), static_cast<int>(std::min<int64_t>(num_threads, enough)), function,
           elements < min_elements_without_gil);
}

}  // namespace pacpu
