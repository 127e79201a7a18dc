#include "zero.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "thread_team.h"

namespace pacpu {
namespace {

constexpr uintptr_t piece_bytes = uintptr_t{2} << 20;

}  // namespace

void zero(void* data, size_t num_bytes, int num_threads) {
    if (!num_bytes) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + num_bytes;
    const uintptr_t first = begin / piece_bytes;
    const int num_pieces = static_cast<int>((end - 1) / piece_bytes - first + 1);
    run_phases(1, &num_pieces, num_threads, [&](int, int piece) {
        const uintptr_t from = std::max(begin, (first + piece) * piece_bytes);
        const uintptr_t to = std::min(end, (first + piece + 1) * piece_bytes);
        std::memset(reinterpret_cast<void*>(from), 0, to - from);
    });
}

}  // namespace pacpu
