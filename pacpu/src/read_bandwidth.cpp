// Reads memory as fast as one knows how. A plain loop leaves a quarter of the bandwidth unused, because the hardware
// prefetcher stops at page boundaries, so each thread prefetches some way ahead. Which pattern is fastest depends on the
// processor: one stream prefetched far ahead (Zen 5: 42 GB/s on a core, where four streams read 35), or several streams
// at once (Emerald Rapids). So there are both. Seconds are those that a thread has its core: other work on the machine
// may take cores away, which says nothing about memory, and would make a limit that short calls can pass.
#include "read_bandwidth.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

#include "thread_team.h"

namespace pacpu {
namespace {

constexpr int cache_line = 64;
// Streams a power of two apart would meet in the same banks of memory again and again.
constexpr size_t stagger_lines = 293;
constexpr int words_per_line = cache_line / sizeof(uint64_t);

// The sum of all 64-bit words of whole cache lines, in one accumulator per word of a line so that no addition waits.
// Each of the streams is prefetched so many bytes ahead.
template <int streams, int ahead>
uint64_t sum_lines(const char* data, size_t num_lines) {
    uint64_t sums[words_per_line] = {};
    const auto add_line = [&](const char* line) {
        uint64_t words[words_per_line];
        std::memcpy(words, line, cache_line);
        for (int i = 0; i < words_per_line; ++i) sums[i] += words[i];
    };
    const size_t even_share = num_lines / streams;
    const size_t stagger = streams > 1 && even_share > 64 * stagger_lines ? stagger_lines : 0;
    const size_t lines_per_stream = even_share - stagger;
    const size_t stream_bytes = lines_per_stream * cache_line;
    for (size_t at = 0; at < stream_bytes; at += cache_line)
        for (int s = 0; s < streams; ++s) {
            const char* line = data + s * stream_bytes + at;
            __builtin_prefetch(line + ahead);
            add_line(line);
        }
    for (size_t i = streams * lines_per_stream; i < num_lines; ++i) add_line(data + i * cache_line);
    uint64_t sum = 0;
    for (const uint64_t part : sums) sum += part;
    return sum;
}

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

template <typename SumLines>
double seconds_with(SumLines sum_lines, const void* data, size_t num_bytes, int num_threads) {
    const size_t num_lines = num_bytes / cache_line;
    const int num_parts = static_cast<int>(std::min<size_t>(num_threads, num_lines));
    static std::atomic<uint64_t> sink;  // makes the sums count, so that the compiler keeps the reads
    std::vector<double> seconds(std::max(num_parts, 1));
    run_parts(num_parts, [&](int part) {
        const size_t begin = num_lines * part / num_parts, end = num_lines * (part + 1) / num_parts;
        const double start = thread_seconds();
        sink.fetch_add(sum_lines(static_cast<const char*>(data) + begin * cache_line, end - begin), std::memory_order_relaxed);
        seconds[part] = thread_seconds() - start;
    });
    return std::max(*std::max_element(seconds.begin(), seconds.end()), 1e-9);
}

}  // namespace

double read_seconds(const void* data, size_t num_bytes, int num_threads) {
    return std::min(seconds_with(sum_lines<1, 8192>, data, num_bytes, num_threads),
                    seconds_with(sum_lines<4, 2048>, data, num_bytes, num_threads));
}

}  // namespace pacpu
