// Copies between a paged KV cache and buffers that cross to a device in one piece. Bits are copied, of any dtype.
#include <cstring>

#include "checks.h"
#include "divide.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace py = pybind11;

namespace pacpu {
namespace {

// Nobody on this side reads the target soon: stores past the caches neither fetch it first nor push other data out.
void copy_through(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
    constexpr int64_t line = 64, vector = sizeof(__m128i);
    const int64_t before = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (vector - 1));
    std::memcpy(to, from, before);
    to += before, from += before, bytes -= before;
    for (; bytes >= line; to += line, from += line, bytes -= line) {
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
#endif
    std::memcpy(to, from, bytes);
}

// Stores past the caches are seen by others only after this.
void finish_copies() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// With less, waking a thread takes longer than copying.
constexpr int64_t min_bytes_per_thread = 1 << 17;

int useful_threads(int64_t bytes, int num_threads) {
    return static_cast<int>(std::min<int64_t>(num_threads, std::max<int64_t>(1, bytes / min_bytes_per_thread)));
}

void check_contiguous(const Array& array) {
    if (std::count(array.shape.begin(), array.shape.end(), 0) == 0) row_stride(array, false);
}

// K and V of a request's first tokens, from its blocks in one layer.
struct GatherKV {
    int num_kv_heads;
    int64_t block_size, tokens, slot_bytes;
    const char* kv_cache;  // [num_blocks, num_kv_heads, 2, block_size, head_dim]
    const int64_t* blocks;
    char* out;  // [2, num_kv_heads, tokens, head_dim]

    // Units are pairs of a block and a head, block by block: the cache is read in one go.
    void run(int begin, int end) const {
        const int64_t half_bytes = block_size * slot_bytes, head_bytes = tokens * slot_bytes;
        for (int unit = begin; unit < end; ++unit) {
            const int64_t place = unit / num_kv_heads, head = unit % num_kv_heads;
            const char* from = kv_cache + (blocks[place] * num_kv_heads + head) * 2 * half_bytes;
            char* to = out + head * head_bytes + place * half_bytes;
            const int64_t bytes = std::min(half_bytes, head_bytes - place * half_bytes);
            copy_through(to, from, bytes);
            copy_through(to + num_kv_heads * head_bytes, from + half_bytes, bytes);
        }
        finish_copies();
    }
};

void gather_kv(py::handle kv_cache_object, py::handle blocks_object, py::handle out_object, py::handle num_threads_object) {
    const Array kv_cache = read_array("kv_cache", kv_cache_object), blocks = read_array("blocks", blocks_object);
    const Array out = read_array("out", out_object);
    const int num_threads = read_num_threads(num_threads_object);
    if (is_bytes(kv_cache)) return gather_codes(kv_cache, blocks, out, num_threads);
    float_dtype(kv_cache);
    check_dtype(out, kv_cache);
    check_rank(kv_cache, 5, "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    check_shape(kv_cache, {kv_cache.shape[0], kv_cache.shape[1], 2, kv_cache.shape[3], kv_cache.shape[4]},
                "[num_blocks, num_kv_heads, 2, block_size, head_dim]");
    check_rank(out, 4, "[2, num_kv_heads, tokens, head_dim]");
    check_shape(out, {2, kv_cache.shape[1], out.shape[2], kv_cache.shape[4]}, "[2, num_kv_heads, tokens, head_dim]");
    for (const Array* array : {&kv_cache, &out}) {
        check_sizes(*array);
        check_contiguous(*array);
    }
    check_rank(blocks, 1, "[blocks]");
    check_slots(blocks, blocks.shape[0], kv_cache.shape[0]);
    check_writable(out);
    const int64_t block_size = kv_cache.shape[3], tokens = out.shape[2], heads = kv_cache.shape[1];
    if (tokens > blocks.shape[0] * block_size)
        refuse("blocks must have a slot for each of the " + std::to_string(tokens) + " tokens of out, not " +
               std::to_string(blocks.shape[0] * block_size));
    if (tokens * heads * kv_cache.shape[4] == 0) return;
    const int64_t units = (tokens + block_size - 1) / block_size * heads;
    if (units > int_max) refuse("out is too large: shape " + to_string(out.shape));
    const GatherKV problem = {static_cast<int>(heads),
                              block_size,
                              tokens,
                              kv_cache.shape[4] * (kv_cache.type_bits / 8),
                              static_cast<const char*>(kv_cache.data),
                              static_cast<const int64_t*>(blocks.data),
                              static_cast<char*>(out.data)};
    const int threads = useful_threads(2 * heads * tokens * problem.slot_bytes, num_threads);
    divide(static_cast<int>(units), threads, [&](int begin, int end) { problem.run(begin, end); });
}

// `staging` [num_layers, blocks, ...] and the blocks of `pool` [num_layers, num_blocks, ...]: one is copied to the other.
void copy_blocks(const Array& pool, const Array& blocks, const Array& staging, int num_threads, bool gathers) {
    if (is_bytes(pool) && !is_bytes(staging)) return convert_blocks(pool, blocks, staging, num_threads, gathers);
    if (!is_bytes(pool)) float_dtype(pool);
    check_dtype(staging, pool);
    if (pool.shape.size() < 2) refuse("pool must have shape [num_layers, num_blocks, ...], not " + to_string(pool.shape));
    check_rank(blocks, 1, "[blocks]");
    check_slots(blocks, blocks.shape[0], pool.shape[1]);
    std::vector<int64_t> shape = pool.shape;
    shape[1] = blocks.shape[0];
    check_shape(staging, shape, "[num_layers, blocks, ...]");
    check_contiguous(pool);
    check_contiguous(staging);
    check_writable(gathers ? staging : pool);
    int64_t block_bytes = pool.type_bits / 8;
    for (size_t i = 2; i < shape.size(); ++i) block_bytes *= shape[i];
    const int64_t count = shape[1], units = shape[0] * count, pool_blocks = pool.shape[1];
    if (units > int_max) refuse("staging is too large: shape " + to_string(staging.shape));
    if (units * block_bytes == 0) return;
    const auto* ids = static_cast<const int64_t*>(blocks.data);
    auto* const inside = static_cast<char*>(pool.data);
    auto* const outside = static_cast<char*>(staging.data);
    divide(static_cast<int>(units), useful_threads(units * block_bytes, num_threads), [&](int begin, int end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            char* const block = inside + (unit / count * pool_blocks + ids[unit % count]) * block_bytes;
            char* const place = outside + unit * block_bytes;
            copy_through(gathers ? place : block, gathers ? block : place, block_bytes);
        }
        finish_copies();
    });
}

}  // namespace

void bind_kv_copies(py::module_& module) {
    module.def("gather_kv", &gather_kv);
    module.def("gather_blocks", [](py::handle pool, py::handle blocks, py::handle staging, py::handle num_threads) {
        copy_blocks(read_array("pool", pool), read_array("blocks", blocks), read_array("staging", staging),
                    read_num_threads(num_threads), true);
    });
    module.def("scatter_blocks", [](py::handle staging, py::handle pool, py::handle blocks, py::handle num_threads) {
        copy_blocks(read_array("pool", pool), read_array("blocks", blocks), read_array("staging", staging),
                    read_num_threads(num_threads), false);
    });
}

}  // namespace pacpu
