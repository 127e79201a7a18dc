// Rows and blocks into an int8 KV cache and out of it (int8.h).
#include "int8.h"

#include "checks.h"
#include "divide.h"

namespace pacpu {
namespace {

void check_cache(const Array& cache, int64_t num_kv_heads) {
    check_rank(cache, 3, "[num_blocks, num_kv_heads, head_bytes]");
    check_sizes(cache);
    check_shape(cache, {cache.shape[0], num_kv_heads, cache.shape[2]}, "[num_blocks, num_kv_heads, head_bytes]");
    row_stride(cache, false);
}

const Int8Codec& codec_for(const Array& array) { return int8_kernels().codecs[static_cast<int>(float_dtype(array))]; }

}  // namespace

void store_codes(const Array& k, const Array& v, const Array& kv_cache, const Array& blocks, const Array& offsets, int num_threads) {
    const Int8Codec& codec = codec_for(k);
    const int64_t heads = k.shape[1], head_dim = k.shape[2], element_bytes = k.type_bits / 8;
    check_cache(kv_cache, heads);
    check_writable(kv_cache);
    const int64_t head_bytes = kv_cache.shape[2];
    check_slots(blocks, k.shape[0], kv_cache.shape[0]);
    check_slots(offsets, k.shape[0], int8_block_size(kv_cache, head_dim));
    const int64_t k_stride = row_stride(k) * element_bytes, v_stride = row_stride(v) * element_bytes;
    const auto *block = static_cast<const int64_t*>(blocks.data), *offset = static_cast<const int64_t*>(offsets.data);
    divide_rows(k, num_threads, [&](int begin, int end) {
        for (int64_t row = begin; row < end; ++row) {
            const char* key = static_cast<const char*>(k.data) + row * k_stride;
            const char* value = static_cast<const char*>(v.data) + row * v_stride;
            char* tile = static_cast<char*>(kv_cache.data) + block[row] * heads * head_bytes +
                         offset[row] / tile_tokens * tile_bytes(static_cast<int>(head_dim));
            for (int64_t head = 0; head < heads; ++head, tile += head_bytes)
                codec.store(key + head * head_dim * element_bytes, value + head * head_dim * element_bytes,
                            static_cast<int>(head_dim), tile, static_cast<int>(offset[row] % tile_tokens));
        }
    });
}

void gather_codes(const Array& kv_cache, const Array& blocks, const Array& out, int num_threads) {
    const Int8Codec& codec = codec_for(out);
    check_rank(out, 4, "[2, num_kv_heads, tokens, head_dim]");
    check_sizes(out);
    const int64_t heads = out.shape[1], tokens = out.shape[2], head_dim = out.shape[3], element_bytes = out.type_bits / 8;
    check_shape(out, {2, heads, tokens, head_dim}, "[2, num_kv_heads, tokens, head_dim]");
    check_cache(kv_cache, heads);
    if (tokens > 0 && heads > 0) row_stride(out, false);
    check_writable(out);
    const int64_t head_bytes = kv_cache.shape[2], block_size = int8_block_size(kv_cache, head_dim);
    check_rank(blocks, 1, "[blocks]");
    check_slots(blocks, blocks.shape[0], kv_cache.shape[0]);
    if (tokens > blocks.shape[0] * block_size)
        refuse("blocks must have a slot for each of the " + std::to_string(tokens) + " tokens of out, not " +
               std::to_string(blocks.shape[0] * block_size));
    const int64_t units = (tokens + tile_tokens - 1) / tile_tokens * heads, tiles_per_block = block_size / tile_tokens;
    if (units > int_max) refuse("out is too large: shape " + to_string(out.shape));
    const auto* ids = static_cast<const int64_t*>(blocks.data);
    divide(static_cast<int>(units), num_threads, [&](int begin, int end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t number = unit / heads, head = unit % heads, first = number * tile_tokens;
            const char* tile = static_cast<const char*>(kv_cache.data) +
                               (ids[number / tiles_per_block] * heads + head) * head_bytes +
                               number % tiles_per_block * tile_bytes(static_cast<int>(head_dim));
            char* const key = static_cast<char*>(out.data) + (head * tokens + first) * head_dim * element_bytes;
            codec.unpack(tile, static_cast<int>(head_dim), static_cast<int>(std::min<int64_t>(tile_tokens, tokens - first)), key,
                         key + heads * tokens * head_dim * element_bytes);
        }
    });
}

void convert_blocks(const Array& pool, const Array& blocks, const Array& staging, int num_threads, bool gathers) {
    const Int8Codec& codec = codec_for(staging);
    check_rank(pool, 4, "[num_layers, num_blocks, num_kv_heads, head_bytes]");
    check_rank(staging, 6, "[num_layers, blocks, num_kv_heads, 2, block_size, head_dim]");
    const int64_t count = staging.shape[1], heads = pool.shape[2], head_bytes = pool.shape[3], head_dim = staging.shape[5];
    const int64_t block_size = int8_block_size(pool, head_dim), pool_blocks = pool.shape[1];
    check_rank(blocks, 1, "[blocks]");
    check_slots(blocks, count, pool_blocks);
    check_shape(staging, {pool.shape[0], blocks.shape[0], heads, 2, block_size, head_dim},
                "[num_layers, blocks, num_kv_heads, 2, block_size, head_dim]");
    check_writable(gathers ? staging : pool);
    const int64_t units = pool.shape[0] * count;
    if (units > int_max) refuse("staging is too large: shape " + to_string(staging.shape));
    if (units * heads == 0) return;
    row_stride(pool, false);
    row_stride(staging, false);
    const auto* ids = static_cast<const int64_t*>(blocks.data);
    const int64_t row_bytes = head_dim * (staging.type_bits / 8), half_bytes = block_size * row_bytes;
    divide(static_cast<int>(units), num_threads, [&](int begin, int end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            char* tile = static_cast<char*>(pool.data) + (unit / count * pool_blocks + ids[unit % count]) * heads * head_bytes;
            char* rows = static_cast<char*>(staging.data) + unit * heads * 2 * half_bytes;
            for (int64_t head = 0; head < heads; ++head, rows += 2 * half_bytes)
                for (int64_t token = 0; token < block_size; token += tile_tokens, tile += tile_bytes(static_cast<int>(head_dim))) {
                    char *const k = rows + token * row_bytes, *const v = k + half_bytes;
                    if (gathers)
                        codec.unpack(tile, static_cast<int>(head_dim), tile_tokens, k, v);
                    else
                        codec.pack(k, v, static_cast<int>(head_dim), tile);
                }
        }
    });
}

}  // namespace pacpu
