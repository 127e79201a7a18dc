// Linear attention: the gated delta rule, and the causal convolution before it; included once for each instruction set.
#pragma once

#include "elementwise.h"

namespace pacpu {
namespace {

// Columns of a state that are advanced at a time: with 128 keys they take half of a small level-1 cache, beside the queries
// and keys of `state_tokens`.
constexpr int state_columns = 32;

// A token of a head. `key` and `query` have their length; `overlap` is their dot product.
struct StateToken {
    const float* query;
    const float* key;
    const float* value;
    float decay, beta, overlap;
    float* out;
};

// Advances so many vectors of columns by a token, a single one of `count` columns. What the new state has for the query is
// made of what the old one had, so that one loop reads for key and query. `ahead`: memory to fetch.
template <int vectors>
PACPU_INLINE void advance_columns(float* state, int64_t stride, int keys, const StateToken& t, int column, int count,
                                  const float* ahead) {
    Floats of_key[vectors]{}, of_query[vectors]{};
    for (int i = 0; i < keys; ++i) {
        Floats key = splat(t.key[i]), query = splat(t.query[i]);
        pin(key);
        pin(query);
        if (ahead) {
#pragma GCC unroll 8
            for (int at = 0; at < vectors * width; at += 16) __builtin_prefetch(ahead + i * vectors * width + at, 0, 2);
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const float* place = state + i * stride + v * width;
            const Floats old = vectors > 1 ? load(place) : load_some(place, count);
            of_key[v] += key * old;
            of_query[v] += query * old;
        }
    }
    Floats written[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
        written[v] = (load(t.value + column + v * width) - of_key[v] * t.decay) * t.beta;
        const Floats out = of_query[v] * t.decay + written[v] * t.overlap;
        float* place = t.out + column + v * width;
        vectors > 1 ? store(place, out) : store_some(place, out, count);
    }
    Floats decay = splat(t.decay);
    pin(decay);
    for (int i = 0; i < keys; ++i) {
        Floats key = splat(t.key[i]);
        pin(key);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            float* place = state + i * stride + v * width;
            const Floats old = vectors > 1 ? load(place) : load_some(place, count);
            const Floats now = old * decay + key * written[v];
            vectors > 1 ? store(place, now) : store_some(place, now, count);
        }
    }
}

// All columns of a state by some tokens. Columns that do not fill a stretch are advanced vector by vector.
__attribute__((noinline)) void advance_state(float* state, int keys, int columns, const StateToken* tokens, int num_tokens,
                                             const float* ahead) {
    constexpr int vectors = state_columns / width;
    int column = 0;
    for (; column + state_columns <= columns; column += state_columns)
        for (int t = 0; t < num_tokens; ++t) {
            const float* fetched = ahead && t == 0 ? ahead + int64_t{column} * keys : nullptr;
            advance_columns<vectors>(state + column, columns, keys, tokens[t], column, width, fetched);
        }
    for (; column < columns; column += width)
        for (int t = 0; t < num_tokens; ++t)
            advance_columns<1>(state + column, columns, keys, tokens[t], column, min_of(width, columns - column), nullptr);
}

// A vector of length `length` in the direction of x, as floats in whole vectors of which the last is filled with zeros.
template <typename T>
PACPU_INLINE void scale_to_length(const T* x, int size, float length, float* y) {
    Floats squares{};
    for (int i = 0; i < size; i += width) {
        const Floats value = load_some(x + i, size - i);
        squares += value * value;
    }
    const float sum = reduce<1>(squares, [](Floats a, Floats b) { return a + b; })[0];
    const float factor = length / __builtin_sqrtf(sum + 1e-6f);
    for (int i = 0; i < size; i += width) store(y + i, load_some(x + i, size - i) * factor);
}

template <typename T>
void delta_rule(const DeltaRule& p, const StateRun& run, int head, const float* ahead, float* scratch) {
    const int key_head = head / (p.num_value_heads / p.num_key_heads);
    const int64_t state_size = int64_t{p.key_dim} * p.value_dim;
    const int64_t keys_stride = padded_inputs(p.key_dim), values_stride = padded_inputs(p.value_dim);
    float* const queries = scratch;
    float* const keys = queries + state_tokens * keys_stride;
    float* const values = keys + state_tokens * keys_stride;
    float* const padding = values + state_tokens * values_stride;
    float* const state = run.slot < 0 ? padding : p.states + (run.slot * p.num_value_heads + head) * state_size;
    if (run.slot < 0 || run.is_first) __builtin_memset(state, 0, state_size * sizeof(float));
    const float query_length = 1.0f / __builtin_sqrtf(p.key_dim);
    for (int first = 0; first < run.num_rows; first += state_tokens) {
        const int num_tokens = min_of(state_tokens, run.num_rows - first);
        StateToken tokens[state_tokens];
        for (int t = 0; t < num_tokens; ++t) {
            const int64_t row = run.first_row + first + t;
            float* const query = queries + t * keys_stride;
            float* const key = keys + t * keys_stride;
            float* const value = values + t * values_stride;
            scale_to_length((const T*)p.q + row * p.q_stride + key_head * p.key_dim, p.key_dim, query_length, query);
            scale_to_length((const T*)p.k + row * p.k_stride + key_head * p.key_dim, p.key_dim, 1.0f, key);
            const T* const given = (const T*)p.v + row * p.v_stride + head * p.value_dim;
            for (int i = 0; i < p.value_dim; i += width) store(value + i, load_some(given + i, p.value_dim - i));
            Floats products{};
            for (int i = 0; i < p.key_dim; i += width) products += load(query + i) * load(key + i);
            const float overlap = reduce<1>(products, [](Floats a, Floats b) { return a + b; })[0];
            const float decay = __builtin_expf(p.log_decay[row * p.log_decay_stride + head]);
            float* const out = p.out + row * p.out_stride + head * p.value_dim;
            tokens[t] = {query, key, value, decay, p.beta[row * p.beta_stride + head], overlap, out};
        }
        advance_state(state, p.key_dim, p.value_dim, tokens, num_tokens, first == 0 ? ahead : nullptr);
    }
}

// Vector i of the result has element i of each of so many groups of `size` neighbours.
template <typename T>
PACPU_INLINE void load_groups(const T* x, int size, int count, Floats* groups) {
    float flat[max_taps * width] = {}, group[max_taps][width];
    for (int i = 0; i < size * count; i += width) store(flat + i, load_some(x + i, size * count - i));
    for (int i = 0; i < size; ++i)
        for (int lane = 0; lane < width; ++lane) group[i][lane] = flat[lane * size + i];
    for (int i = 0; i < size; ++i) groups[i] = load(group[i]);
}

template <typename T>
PACPU_INLINE void store_groups(T* x, int size, int count, const Floats* groups) {
    float flat[max_taps * width], group[max_taps][width];
    for (int i = 0; i < size; ++i) store(group[i], groups[i]);
    for (int lane = 0; lane < width; ++lane)
        for (int i = 0; i < size; ++i) flat[lane * size + i] = group[i][lane];
    for (int i = 0; i < size * count; i += width) store_some(x + i, load(flat + i), size * count - i);
}

// A vector of channels, of which there are `count`, by a run's rows.
template <typename T>
PACPU_INLINE void convolve_run(const Convolution& p, const StateRun& run, int num_taps, const Floats* taps, int channel,
                               int count) {
    const int earlier = num_taps - 1;
    T* const kept = run.slot < 0 ? nullptr : (T*)p.inputs + (run.slot * p.num_channels + channel) * earlier;
    Floats inputs[max_taps];
    if (!kept || run.is_first)
        for (int i = 0; i < earlier; ++i) inputs[i] = Floats{};
    else
        load_groups(kept, earlier, count, inputs);
    for (int64_t row = run.first_row; row < run.first_row + run.num_rows; ++row) {
        inputs[earlier] = load_some((const T*)p.x + row * p.x_stride + channel, count);
        Floats total = inputs[0] * taps[0];
        for (int i = 1; i <= earlier; ++i) total += inputs[i] * taps[i];
        store_some((T*)p.y + row * p.y_stride + channel, total * sigmoid(total), count);
        for (int i = 0; i < earlier; ++i) inputs[i] = inputs[i + 1];
    }
    if (kept) store_groups(kept, earlier, count, inputs);
}

template <typename T>
void convolve(const Convolution& p, int begin, int end) {
    Floats taps[convolved_channels / width][max_taps];
    for (int first = begin; first < end; first += convolved_channels) {
        const int stop = min_of(end, first + convolved_channels);
        for (int at = first; at < stop; at += width)
            load_groups((const T*)p.weight + int64_t{at} * p.num_taps, p.num_taps, min_of(width, stop - at),
                        taps[(at - first) / width]);
        for (const StateRun* run = p.runs; run != p.runs + p.num_runs; ++run)
            for (int at = first; at < stop; at += width) {
                const int count = min_of(width, stop - at);
                if (p.num_taps == 4 && count == width)
                    convolve_run<T>(p, *run, 4, taps[(at - first) / width], at, width);  // loops of known length
                else
                    convolve_run<T>(p, *run, p.num_taps, taps[(at - first) / width], at, count);
            }
    }
}

}  // namespace
}  // namespace pacpu
