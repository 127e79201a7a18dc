// From 4-bit codes to elements. Where vectors can be looked up in, that is done among the 16 values of a group, which are
// rounded once.
#pragma once

#include <type_traits>

#include "../elements.h"
#include "quantised.h"

namespace pacpu {
namespace {

constexpr int parts_per_run = run_inputs / width;
constexpr int most_groups = stretch_blocks * block_runs;  // of a stretch

// By code: a number of integers, and of MXFP4.
alignas(64) constexpr float integer_numbers[1 << 4] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr float mxfp4_numbers[1 << 4] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The scales and zero points of a panel's groups, from `first` on, as floats, and the numbers of their codes.
struct Groups {
    const float* numbers;
    int first;
    float scales[most_groups * code_columns], zeros[most_groups * code_columns];  // [groups, code_columns]
};

typedef uint8_t Bytes __attribute__((vector_size(width)));

PACPU_INLINE Floats load(const uint8_t* p) { return __builtin_convertvector(load_bits<Bytes>(p), Floats); }

// A scale of MXFP4.
struct PowerOfTwo {
    uint8_t exponent;
};

PACPU_INLINE Floats load(const PowerOfTwo* p) {
    const Floats exponents = load(&p->exponent);
    const Floats powers = (Floats)(__builtin_convertvector(exponents, Ints) << 23);
    return exponents == 0.0f ? splat(0x1p-127f) : exponents == 255.0f ? splat(__builtin_nanf("")) : powers;
}

// Like load_some, by fewer instructions.
template <int count, typename T>
PACPU_INLINE Floats load_first(const T* p) {
    T padded[width] = {};
    __builtin_memcpy(padded, p, (count < width ? count : width) * sizeof(T));
    return load(padded);
}

// `count`: a multiple of code_columns.
template <typename T>
PACPU_INLINE void widen(const T* from, int count, float* to) {
    int i = 0;
    for (; i + width <= count; i += width) store(to + i, load(from + i));
    if (width > code_columns && i < count) {
        const Floats last = load_first<code_columns>(from + i);
        __builtin_memcpy(to + i, &last, code_columns * sizeof(float));
    }
}

PACPU_INLINE void read_groups(const CodeMatrix& m, int panel, int first, int last, Groups& groups) {
    const int num_groups = m.in_features / m.group_size, count = (last - first + 1) * code_columns;
    const int64_t offset = (int64_t{panel} * num_groups + first) * code_columns;
    groups.first = first;
    groups.numbers = m.zeros ? integer_numbers : mxfp4_numbers;
    if (!m.zeros) {
        widen((const PowerOfTwo*)m.scales + offset, count, groups.scales);
        for (int i = 0; i < count; ++i) groups.zeros[i] = 0;
        return;
    }
    if (m.scale_type == DType::float32) widen((const float*)m.scales + offset, count, groups.scales);
    if (m.scale_type == DType::float16) widen((const Half*)m.scales + offset, count, groups.scales);
    if (m.scale_type == DType::bfloat16) widen((const BFloat16*)m.scales + offset, count, groups.scales);
    widen(m.zeros + offset, count, groups.zeros);
}

// The group of each run of a matrix; runs behind the last input take the last one.
PACPU_INLINE void find_groups(const CodeMatrix& m, int* group_of_run) {
    const int last = m.in_features / m.group_size - 1, num_runs = code_blocks(m.in_features) * block_runs;
    for (int run = 0, group = 0; run < num_runs; ++run) {
        if (run * run_inputs == (group + 1) * m.group_size && group < last) ++group;
        group_of_run[run] = group;
    }
}

template <typename T>
PACPU_INLINE Floats rounded(Floats x) {
    T narrowed[width];
    store(narrowed, x);
    return load(narrowed);
}
template <>
PACPU_INLINE Floats rounded<float>(Floats x) {
    return x;
}

// The values of codes `first` to `first + width - 1`.
PACPU_INLINE Floats values_of(const float* numbers, float scale, float zero, int first) {
    return (load(numbers + first) - zero) * scale;
}

// A group of an output: elements of type T as floats, by the lowest four bits of words.
template <typename T>
struct Values {
    alignas(64) float table[1 << 4] = {};

    PACPU_INLINE void set(const float* numbers, float scale, float zero) {
        const bool is_exact = numbers == mxfp4_numbers && !std::is_same_v<T, Half>;
        for (int first = 0; first < 1 << 4; first += width) {
            const Floats values = values_of(numbers, scale, zero, first);
            store(table + first, is_exact ? values : rounded<T>(values));
        }
    }

    PACPU_INLINE Floats of(Words words) const {
#if defined(__AVX512F__)
        return _mm512_maskz_permutexvar_ps((__mmask16)-1, (__m512i)words, load(table));  // masked as in vectors.h
#elif defined(__AVX2__)
        const __m256 low = _mm256_permutevar8x32_ps(load(table), (__m256i)words);
        const __m256 high = _mm256_permutevar8x32_ps(load(table + 8), (__m256i)words);
        return _mm256_blendv_ps(low, high, (__m256)(words << 28));
#else
        Floats found;
        for (int lane = 0; lane < width; ++lane) found[lane] = table[words[lane] & 15];
        return found;
#endif
    }
};

#if !defined(__AVX2__)

// Where vectors cannot be looked up in, arithmetic is faster, unless each element must be rounded.
template <>
struct Values<float> {
    const float* numbers = nullptr;
    float scale = 0, zero = 0;

    PACPU_INLINE void set(const float* new_numbers, float new_scale, float new_zero) {
        numbers = new_numbers;
        scale = new_scale;
        zero = new_zero;
    }

    PACPU_INLINE Floats of(Words words) const {
        const Words codes = words & 15;
        Floats found = __builtin_convertvector((Ints)codes, Floats);
        if (numbers != integer_numbers)
            for (int lane = 0; lane < width; ++lane) found[lane] = numbers[codes[lane]];
        return (found - zero) * scale;
    }
};

#endif

// A run of inputs in the order of codes: where it is, or in `gathered`; zeros behind the last one.
template <typename T>
PACPU_INLINE const T* run_of(const T* x, const CodeMatrix& m, int first, T* gathered) {
    if (first < m.in_features && !m.order) return x + first;
    for (int i = 0; i < run_inputs; ++i) gathered[i] = first < m.in_features ? x[m.order[first + i]] : T{};
    return gathered;
}

// Elements of type T as floats, for products in float32.
template <typename T>
struct WideElements {
    using Element = float;
    using Vector = Floats;
    static constexpr int lanes = width;

    static PACPU_INLINE void store_vector(float* p, Vector v) { store(p, v); }
    static PACPU_INLINE Vector load_vector(const float* p) { return load(p); }
    static PACPU_INLINE Floats multiply_add(Floats sum, Vector x, Vector y) { return sum + x * y; }

    // Calls take(vector, column, elements) for a panel's elements, vector of inputs by vector of inputs.
    template <typename Take>
    static PACPU_INLINE void decode(const uint32_t* codes, int num_blocks, const int* group_of_run, const Groups& groups,
                                    Take&& take) {
        const char* ahead = (const char*)(codes + num_blocks * code_columns * block_words);
        Values<T> values[code_columns];
        int group = -1;
        for (int block = 0; block < num_blocks; ++block, codes += code_columns * block_words)
#pragma GCC unroll 8
            for (int run = 0; run < block_runs; ++run) {
                __builtin_prefetch(ahead + (block * block_runs + run) * 64, 0, 2);
                if (group_of_run[block * block_runs + run] != group) {
                    group = group_of_run[block * block_runs + run];
                    const float* scales = groups.scales + (group - groups.first) * code_columns;
                    const float* zeros = groups.zeros + (group - groups.first) * code_columns;
                    for (int c = 0; c < code_columns; ++c) values[c].set(groups.numbers, scales[c], zeros[c]);
                }
#pragma GCC unroll 4
                for (int part = 0; part < parts_per_run; ++part)
#pragma GCC unroll 8
                    for (int c = 0; c < code_columns; ++c)
                        take((block * block_runs + run) * parts_per_run + part, c,
                             values[c].of(load_bits<Words>(codes + c * block_words + part * width) >> 4 * run));
            }
    }

    // A row as floats, in the order of codes.
    static PACPU_INLINE void take_row(const T* x, const CodeMatrix& m, float* inputs) {
        T gathered[run_inputs];
        for (int first = 0; first < code_blocks(m.in_features) * block_inputs; first += run_inputs) {
            const T* run = run_of(x, m, first, gathered);
            for (int i = 0; i < run_inputs; i += width) store(inputs + first + i, load(run + i));
        }
    }
};

// Writes decoded elements to `wide` [vectors, code_columns, lanes].
template <typename Elements>
__attribute__((noinline)) void decode_to(const uint32_t* codes, int num_blocks, const int* group_of_run, const Groups& groups,
                                         typename Elements::Element* wide) {
    Elements::decode(codes, num_blocks, group_of_run, groups, [&](int vector, int c, typename Elements::Vector elements) {
        Elements::store_vector(wide + (vector * code_columns + c) * Elements::lanes, elements);
    });
}

}  // namespace
}  // namespace pacpu
