// APEX's kernel: attention as two matrix products per KV head, S = Q K^T and O = P V, by Mozilla's llamafile sgemm
// (APEX, section 4). Each file that includes this is compiled for one instruction set and names its variant of the
// product in PACPU_SGEMM.
//
// The context is walked in chunks, and within a chunk from KV head to KV head, with an online softmax between the
// products: memory gives all heads of a block far faster than a head of all blocks. The product wants both operands
// contiguous along the summed dimension: K is, V is not. So the V of a chunk is transposed into a scratch that stays in
// the cache, and the KV cache keeps the layout that all kernels share. The product knows nothing of memory, so it is
// called for a few rows at a time, with prefetches of the next chunk in between.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "chunk.h"

extern "C" bool PACPU_SGEMM(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda, const void* b, int64_t ldb, void* c,
                            int64_t ldc, int thread, int num_threads, int a_type, int b_type, int c_type);

namespace pacpu {
namespace {

constexpr int key_rows = 4;       // keys per call of the product, a size for which it has one piece of code
constexpr int value_columns = 4;  // dimensions of V per call of the product, likewise
constexpr int max_heads = 16;     // query heads per pass over a chunk
constexpr int slab_dims = 32;     // dimensions of V that are transposed at a time: a slab stays in the L1 cache
constexpr int transposed_stride = chunk_tokens + 32;  // no power of two, which would crowd a few sets of the cache

// Shares of the prefetches, in percent, about as each step's share of the time: in bursts they would hold up the loads.
constexpr int score_work = 42, transpose_work = 28, weigh_work = 30, all_work = 100;

constexpr int ggml_float32 = 0, ggml_float16 = 1;
template <typename T>
constexpr int ggml_type = ggml_float16;
template <>
constexpr int ggml_type<float> = ggml_float32;

// c[j][i] = <a[i], b[j]> for i < m, j < n; rows of a and b hold k elements.
template <typename T>
bool multiply(int m, int n, int k, const T* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
    return PACPU_SGEMM(m, n, k, a, lda, b, ldb, c, ldc, 0, 1, ggml_type<T>, ggml_float32, ggml_float32);
}

inline float widen(float x) { return x; }
inline float widen(Half x) { return _cvtsh_ss(x.bits); }

// exp(x) for x <= 0 within 2 ulp; zero below -87, where floats run out; NaN stays NaN.
inline float exp_nonpositive(float x) {
    const float y = x < -87.0f ? -87.0f : x;
    const float shifted = y * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // y - n ln 2, with ln 2 in two pieces
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;  // of a NaN, too, which an integer with a sign could not shift
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000 + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

// One step of the online softmax for one head: scores become weights, with zeros up to a multiple of `tile`; returns the
// factor for what was summed before.
inline float softmax_step(float* scores, int num_tokens, float& max, float& sum) {
    int count = num_tokens;
    for (; count % tile; ++count) scores[count] = -__builtin_inff();
    float maxima[tile], sums[tile] = {};
    for (int i = 0; i < tile; ++i) maxima[i] = max;
    for (int t = 0; t < count; t += tile)
        for (int i = 0; i < tile; ++i) maxima[i] = scores[t + i] > maxima[i] ? scores[t + i] : maxima[i];
    float new_max = max;
    for (int i = 0; i < tile; ++i) new_max = maxima[i] > new_max ? maxima[i] : new_max;
    for (int t = 0; t < count; t += tile)
        for (int i = 0; i < tile; ++i) {
            const float weight = exp_nonpositive(scores[t + i] - new_max);
            scores[t + i] = weight;
            sums[i] += weight;
        }
    float chunk_sum = 0;
    for (int i = 0; i < tile; ++i) chunk_sum += sums[i];
    const float correction = exp_nonpositive(max - new_max);
    max = new_max;
    sum = sum * correction + chunk_sum;
    return correction;
}

// 16 rows, `stride` elements apart, become columns: to[d * transposed_stride + t] = from[t * stride + d] for d < dims, a
// multiple of 8.
inline __attribute__((always_inline)) void transpose(const float* from, ptrdiff_t stride, int dims, float* to) {
    for (int d = 0; d < dims; ++d)
        for (int t = 0; t < tile; ++t) to[d * transposed_stride + t] = from[t * stride + d];
}

inline __attribute__((always_inline)) void transpose(const Half* from, ptrdiff_t stride, int dims, Half* to) {
    const auto load = [](const Half* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    for (int d = 0; d < dims; d += 8, to += 8 * transposed_stride) {
        // Rows 0 to 7 in the lower halves, rows 8 to 15 in the upper ones: two 8 x 8 squares side by side, each
        // transposed by interleaving its rows i and i + 4 three times.
        __m256i a[8], b[8];
        for (int i = 0; i < 8; ++i)
            a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(from + i * stride + d)),
                                           load(from + (i + 8) * stride + d), 1);
        const auto interleave = [](const __m256i* in, __m256i* out) {
            for (int i = 0; i < 4; ++i) {
                out[2 * i] = _mm256_unpacklo_epi16(in[i], in[i + 4]);
                out[2 * i + 1] = _mm256_unpackhi_epi16(in[i], in[i + 4]);
            }
        };
        interleave(a, b);
        interleave(b, a);
        interleave(a, b);
        for (int i = 0; i < 8; ++i)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * transposed_stride), b[i]);
    }
}

// Scores of a chunk: scores[h * chunk_tokens + t]. False if the product refused.
template <typename T>
bool score(const Chunk<T>& chunk, ptrdiff_t key_offset, const float* queries, int padded_dim, int heads,
           Prefetcher<T>& prefetcher, float* scores) {
    const int dim = chunk.head_dim, whole = dim / tile * tile;
    bool done = true;
    for (int t = 0, rows; t < chunk.num_tokens; t += rows) {
        rows = chunk.run(t, key_rows);
        const T* keys = chunk.keys[t] + key_offset;  // of tokens one after another
        done &= multiply(rows, heads, whole, keys, dim, queries, padded_dim, scores + t, chunk_tokens);
        // The product sums multiples of 16, head_dim is one of 8.
        for (int h = 0; whole < dim && h < heads; ++h)
            for (int i = 0; i < rows; ++i)
                for (int d = whole; d < dim; ++d)
                    scores[h * chunk_tokens + t + i] += queries[h * padded_dim + d] * widen(keys[i * dim + d]);
        prefetcher.advance(score_work * dim * rows / chunk.num_tokens);
    }
    return done;
}

// product[h * slab_dims + i] = sum_t weights[h * chunk_tokens + t] V_t[first_dim + i] for i < dims. False if the product
// refused.
template <typename T>
bool weigh(const Chunk<T>& chunk, ptrdiff_t key_offset, int first_dim, int dims, const float* weights, int heads,
           Prefetcher<T>& prefetcher, float* product) {
    alignas(64) T transposed[slab_dims * transposed_stride], packed[tile * slab_dims];
    const int num_tokens = chunk.num_tokens;
    int count = 0;
    for (; count < num_tokens; count += tile) {
        const T* const* keys = chunk.keys + count;
        const ptrdiff_t offset = key_offset + chunk.value_offset + first_dim;
        if (chunk.run(count, tile) == tile && dims == slab_dims) {  // a constant, so that the loop is unrolled
            transpose(keys[0] + offset, chunk.head_dim, slab_dims, transposed + count);
        } else {
            for (int t = 0; t < tile; ++t)
                for (int d = 0; d < dims; ++d)
                    packed[t * slab_dims + d] = count + t < num_tokens ? keys[t][offset + d] : T{};
            transpose(packed, slab_dims, dims, transposed + count);
        }
        prefetcher.advance(transpose_work * dims * tile / num_tokens);
    }
    bool done = true;
    for (int d = 0; d < dims; d += value_columns) {
        const int columns = dims - d < value_columns ? dims - d : value_columns;
        done &= multiply(columns, heads, count, transposed + d * transposed_stride, transposed_stride, weights, chunk_tokens,
                         product + d, slab_dims);
        prefetcher.advance(weigh_work * columns);
    }
    return done;
}

// Takes a chunk into the state of `heads` query heads from `first_head` on, whose KV head lies key_offset elements behind
// the first one. False if the product refused.
template <typename T>
bool attend_heads(const Segment& segment, int first_head, int heads, const Chunk<T>& chunk, ptrdiff_t key_offset,
                  Prefetcher<T>& prefetcher, SoftmaxState state) {
    const ptrdiff_t offset = static_cast<ptrdiff_t>(first_head) * segment.padded_dim;
    alignas(64) float scores[max_heads * chunk_tokens], product[max_heads * slab_dims];
    float corrections[max_heads];
    bool done = score(chunk, key_offset, segment.queries + offset, segment.padded_dim, heads, prefetcher, scores);
    for (int h = 0; h < heads; ++h)
        corrections[h] = softmax_step(scores + h * chunk_tokens, chunk.num_tokens, state.max[first_head + h],
                                      state.sum[first_head + h]);
    for (int first_dim = 0; first_dim < segment.head_dim; first_dim += slab_dims) {
        const int rest = segment.head_dim - first_dim, dims = rest < slab_dims ? rest : slab_dims;
        done &= weigh(chunk, key_offset, first_dim, dims, scores, heads, prefetcher, product);
        for (int h = 0; h < heads; ++h) {
            float* output = state.output + offset + static_cast<ptrdiff_t>(h) * segment.padded_dim + first_dim;
            for (int d = 0; d < dims; ++d) output[d] = output[d] * corrections[h] + product[h * slab_dims + d];
        }
    }
    return done;
}

template <typename T>
void attend(const Segment& segment, const Segment* next, SoftmaxState state) {
    const int num_heads = segment.num_kv_heads * segment.group;
    for (int h = 0; h < num_heads; ++h) {
        state.max[h] = -__builtin_inff();
        state.sum[h] = 0;
    }
    for (int i = 0; i < num_heads * segment.padded_dim; ++i) state.output[i] = 0;
    bool done = true;
    Chunk<T> chunks[2];
    chunks[0] = Chunk<T>(segment, 0);
    const ptrdiff_t head_elements = segment.head_bytes / static_cast<ptrdiff_t>(sizeof(T));
    for (int token = 0, turn = 0; token < segment.num_tokens; token += chunks[turn].num_tokens, turn ^= 1) {
        const int next_token = token + chunks[turn].num_tokens;
        if (next_token < segment.num_tokens) {
            chunks[turn ^ 1] = Chunk<T>(segment, next_token);
        } else if (next) {
            chunks[turn ^ 1] = Chunk<T>(*next, 0);
        } else {
            chunks[turn ^ 1].num_tokens = 0;
        }
        for (int kv_head = 0; kv_head < segment.num_kv_heads; ++kv_head) {
            const bool is_last = kv_head == segment.num_kv_heads - 1;
            Prefetcher<T> prefetcher(chunks[is_last ? turn ^ 1 : turn], is_last ? 0 : (kv_head + 1) * head_elements,
                                     all_work * segment.head_dim);
            for (int head = 0; head < segment.group; head += max_heads) {
                const int heads = segment.group - head < max_heads ? segment.group - head : max_heads;
                done &= attend_heads(segment, kv_head * segment.group + head, heads, chunks[turn],
                                     kv_head * head_elements, prefetcher, state);
            }
        }
    }
    if (!done)  // cannot be, since shapes and types are all of the kind that it takes; if ever, nobody shall miss it
        for (int h = 0; h < num_heads; ++h) state.sum[h] = __builtin_nanf("");
}

}  // namespace
}  // namespace pacpu
