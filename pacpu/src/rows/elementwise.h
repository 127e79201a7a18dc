// Norms, rotations and activations of rows; included once for each instruction set.
#pragma once

#include "elements.h"
#include "rows.h"

namespace pacpu {
namespace {

template <typename T>
void rms_norm(const RmsNorm& p, int begin, int end) {
    const T* weight = (const T*)p.weight;
    for (int r = begin; r < end; ++r) {
        T* x = (T*)p.x + r * p.x_stride;
        const T* addend = p.addend ? (const T*)p.addend + r * p.addend_stride : nullptr;
        T* y = (T*)p.y + r * p.y_stride;
        Floats squares{};
        for (int i = 0; i < p.size; i += width) {
            const int count = min_of(width, p.size - i);
            if (addend) store_some(x + i, load_some(x + i, count) + load_some(addend + i, count), count);
            const Floats value = load_some(x + i, count);
            squares += value * value;
        }
        const Floats sum = reduce<1>(squares, [](Floats a, Floats b) { return a + b; });
        const Floats scale = splat(1.0f / __builtin_sqrtf(sum[0] / p.size + p.eps));
        for (int i = 0; i < p.size; i += width) {
            const int count = min_of(width, p.size - i);
            store_some(y + i, load_some(x + i, count) * scale * (load_some(weight + i, count) + p.offset), count);
        }
    }
}

template <typename T>
void rotary(const Rotary& p, int begin, int end) {
    const int half = p.head_dim / 2;
    for (int r = begin; r < end; ++r) {
        const float* cos = p.angles + r * p.angles_stride;
        const float* sin = cos + p.head_dim;
        T* x = (T*)p.x + r * p.x_stride;
        for (int head = 0; head < p.num_heads; ++head, x += p.head_dim)
            for (int i = 0; i < half; i += width) {
                const int count = min_of(width, half - i);
                const Floats low = load_some(x + i, count), high = load_some(x + half + i, count);
                store_some(x + i, low * load_some(cos + i, count) + high * load_some(sin + i, count), count);
                store_some(x + half + i, high * load_some(cos + half + i, count) + low * load_some(sin + half + i, count),
                           count);
            }
    }
}

PACPU_INLINE Floats sigmoid(Floats x) {
    // exp of -|x| cannot overflow: the sigmoid is 1 / (1 + e), and of a negative x e / (1 + e).
    const Floats e = exp_nonpositive(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

template <typename T>
void silu_and_mul(const SiluAndMul& p, int begin, int end) {
    for (int r = begin; r < end; ++r) {
        const T* gates = (const T*)p.x + r * p.x_stride;
        T* y = (T*)p.y + r * p.y_stride;
        for (int i = 0; i < p.size; i += width) {
            const int count = min_of(width, p.size - i);
            const Floats gate = load_some(gates + i, count);
            store_some(y + i, gate * sigmoid(gate) * load_some(gates + p.size + i, count), count);
        }
    }
}

template <typename T>
void clamped_swiglu(const ClampedSwiGLU& p, int begin, int end) {
    const int size = p.rows.size;
    for (int r = begin; r < end; ++r) {
        const T* gates = (const T*)p.rows.x + r * p.rows.x_stride;
        T* y = (T*)p.rows.y + r * p.rows.y_stride;
        for (int i = 0; i < size; i += width) {
            const int count = min_of(width, size - i);
            Floats gate = load_some(gates + i, count), up = load_some(gates + size + i, count);
            gate = gate > p.limit ? splat(p.limit) : gate;  // NaN stays NaN
            up = up > p.limit ? splat(p.limit) : up < -p.limit ? splat(-p.limit) : up;
            store_some(y + i, (up + 1.0f) * gate * sigmoid(p.alpha * gate), count);
        }
    }
}

template <typename T>
void add_slots(const AddSlots& p, int begin, int end) {
    for (int r = begin; r < end; ++r) {
        T* y = (T*)p.y + r * p.y_stride;
        for (int i = 0; i < p.size; i += width) {
            const int count = min_of(width, p.size - i);
            Floats total{};
            for (int at = r * p.slots; at < (r + 1) * p.slots; ++at)
                if (p.places[at] >= 0)
                    total += load_some((const T*)p.x + int64_t{p.places[at]} * p.size + i, count) * p.factors[at];
            store_some(y + i, total, count);
        }
    }
}

// The first NaN, else the first of the highest values. Whole stretches are compared first, since a maximum takes a fraction
// of the time of its place.
template <typename T>
void argmax(const Argmax& p, int begin, int end) {
    constexpr int stretch = 512;
    for (int r = begin; r < end; ++r) {
        const T* x = (const T*)p.x + r * p.x_stride;
        float highest = 0;
        int from = -1;
        bool has_nan = false;
        for (int first = 0; first < p.size && !has_nan; first += stretch) {
            const int stop = min_of(first + stretch, p.size);
            Floats most = splat(-__builtin_inff()), nan{};
            for (int i = first; i < stop; i += width) {
                // The last lanes repeat an element: zeros would compete.
                const Floats part = load_some(x + i, stop - i);
                Floats value = part;
                for (int lane = stop - i; lane < width; ++lane) value[lane] = part[0];
                most = maximum(value, most);
                nan = value != value ? splat(1.0f) : nan;
            }
            const auto larger = [](Floats a, Floats b) { return maximum(a, b); };
            most = reduce<1>(most, larger);
            has_nan = reduce<1>(nan, larger)[0] > 0;
            if (has_nan || from < 0 || most[0] > highest) {
                highest = most[0];
                from = first;
            }
        }
        for (int i = from, is_found = 0; !is_found; i += width) {
            const Floats value = load_some(x + i, p.size - i);
            for (int lane = 0; lane < width && !is_found; ++lane)
                if (has_nan ? value[lane] != value[lane] : value[lane] == highest) {
                    p.found[r] = i + lane;
                    is_found = 1;
                }
        }
    }
}

template <typename T>
void widen_row(const void* x, int count, float factor, float* y) {
    for (int i = 0; i < count; i += width) store(y + i, load_some((const T*)x + i, count - i) * factor);
}

template <typename T>
void narrow_row(const float* x, int count, float factor, void* y) {
    for (int i = 0; i < count; i += width) store_some((T*)y + i, load_some(x + i, count - i) * factor, count - i);
}

#define PACPU_ROW_KERNELS(linear, pack_panel, attend_prompt, codes) {        \
    linear,                                                                  \
    {rms_norm<float>, rms_norm<Half>, rms_norm<BFloat16>},                   \
    {rotary<float>, rotary<Half>, rotary<BFloat16>},                         \
    {silu_and_mul<float>, silu_and_mul<Half>, silu_and_mul<BFloat16>},       \
    {clamped_swiglu<float>, clamped_swiglu<Half>, clamped_swiglu<BFloat16>}, \
    {add_slots<float>, add_slots<Half>, add_slots<BFloat16>},                \
    {argmax<float>, argmax<Half>, argmax<BFloat16>},                         \
    {delta_rule<float>, delta_rule<Half>, delta_rule<BFloat16>},             \
    {convolve<float>, convolve<Half>, convolve<BFloat16>},                   \
    pack_panel,                                                              \
    attend_prompt,                                                           \
    codes,                                                                   \
    {widen_row<float>, widen_row<Half>, widen_row<BFloat16>},                \
    {narrow_row<float>, narrow_row<Half>, narrow_row<BFloat16>},             \
}

}  // namespace
}  // namespace pacpu
