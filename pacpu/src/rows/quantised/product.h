// Products of rows with packed 4-bit matrices. A stretch of a panel is decoded once and multiplied with all rows.
#pragma once

#include "decode.h"

namespace pacpu {
namespace {

// Accumulators fill three quarters of the registers, or half of 16.
constexpr int code_tile_columns = width == 16 ? 8 : 4, code_tile_rows = width >= 8 ? 3 : 2;

// So many rows have their accumulators in registers while a panel's columns are decoded.
constexpr int rows_while_decoding = width == 16 ? 2 : 1;

// Lane i: the sum of all lanes of v[i].
template <int columns, int bit = 1, int first = 0>
PACPU_INLINE Floats sum_columns(const Floats* v) {
    if constexpr (bit == columns) {
        return v[first];
    } else {
        return fold<bit>(sum_columns<columns, 2 * bit, first>(v), sum_columns<columns, 2 * bit, first + bit>(v),
                         [](Floats a, Floats b) { return a + b; }, std::make_integer_sequence<int, width>{});
    }
}

// Adds the sums of the lanes of vectors, a tile's columns, to as many floats, or sets these.
PACPU_INLINE void add_sums(const Floats* v, float* sums, bool is_first) {
    constexpr int at_once = code_tile_columns < width ? code_tile_columns : width;
    for (int c = 0; c < code_tile_columns; c += at_once) {
        Floats sum = reduce<at_once>(sum_columns<at_once>(v + c), [](Floats a, Floats b) { return a + b; });
        if (!is_first) sum += load_first<at_once>(sums + c);
        __builtin_memcpy(sums + c, &sum, at_once * sizeof(float));
    }
}

// Adds to `sums` [rows, code_columns] (or sets, if `is_first`) the products of some rows with decoded elements.
template <typename Elements, int rows>
__attribute__((noinline)) void multiply_decoded(const typename Elements::Element* x, int64_t x_stride,
                                                const typename Elements::Element* wide, int num_vectors, float* sums,
                                                bool is_first) {
    constexpr int columns = code_tile_columns, lanes = Elements::lanes;
    for (int column = 0; column < code_columns; column += columns) {
        Floats total[rows][columns] = {};
        const auto* weights = wide + column * lanes;
        for (int vector = 0; vector < num_vectors; ++vector) {
            typename Elements::Vector input[rows];
#pragma GCC unroll 3
            for (int r = 0; r < rows; ++r) {
                input[r] = Elements::load_vector(x + r * x_stride + vector * lanes);
                pin(input[r]);
            }
#pragma GCC unroll 8
            for (int c = 0; c < columns; ++c) {
                auto weight = Elements::load_vector(weights + (vector * code_columns + c) * lanes);
                pin(weight);
#pragma GCC unroll 3
                for (int r = 0; r < rows; ++r) total[r][c] = Elements::multiply_add(total[r][c], input[r], weight);
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; ++r) add_sums(total[r], sums + r * code_columns + column, is_first);
    }
}

// The same for few rows: elements are multiplied as they are decoded. The order of sums is that of more rows.
template <typename Elements, int rows>
__attribute__((noinline)) void decode_and_multiply(const typename Elements::Element* x, int64_t x_stride,
                                                   const uint32_t* codes, int num_blocks, const int* group_of_run,
                                                   const Groups& groups, float* sums, bool is_first) {
    static_assert(rows <= 2);
    Floats first_total[code_columns] = {}, second_total[code_columns] = {};  // arrays of arrays would lie in memory
    typename Elements::Vector first_input, second_input;
    Elements::decode(codes, num_blocks, group_of_run, groups, [&](int vector, int c, typename Elements::Vector elements) {
        if (c == 0) {
            first_input = Elements::load_vector(x + vector * Elements::lanes);
            pin(first_input);
            if (rows == 2) {
                second_input = Elements::load_vector(x + x_stride + vector * Elements::lanes);
                pin(second_input);
            }
        }
        first_total[c] = Elements::multiply_add(first_total[c], first_input, elements);
        if (rows == 2) second_total[c] = Elements::multiply_add(second_total[c], second_input, elements);
    });
    for (int c = 0; c < code_columns; c += code_tile_columns) {
        add_sums(first_total + c, sums + c, is_first);
        if (rows == 2) add_sums(second_total + c, sums + code_columns + c, is_first);
    }
}

template <typename Elements>
PACPU_INLINE void multiply_tiles(const typename Elements::Element* x, int64_t x_stride, int rows,
                                 const typename Elements::Element* wide, int num_vectors, float* sums, bool is_first) {
    constexpr decltype(&multiply_decoded<Elements, 1>) by_rows[] = {nullptr, multiply_decoded<Elements, 1>,
                                                                    multiply_decoded<Elements, 2>,
                                                                    multiply_decoded<Elements, code_tile_rows>};
    const int num_tiles = (rows + code_tile_rows - 1) / code_tile_rows;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int row = rows * tile / num_tiles, count = rows * (tile + 1) / num_tiles - row;
        by_rows[count](x + row * x_stride, x_stride, wide, num_vectors, sums + row * code_columns, is_first);
    }
}

// Rounds the sums of a panel [rows, code_columns], bias added, to the product.
template <typename T>
PACPU_INLINE void write_sums(const CodeLinear& p, int panel, const float* sums) {
    const int first = panel * code_columns, count = min_of(code_columns, p.matrix.out_features - first);
    constexpr int step = width < code_columns ? width : code_columns;
    for (int r = 0; r < p.rows; ++r)
        for (int at = 0; at < count; at += step) {
            const int lanes = min_of(step, count - at);
            Floats sum = load_first<step>(sums + r * code_columns + at);
            if (p.bias) sum += load_some((const T*)p.bias + first + at, lanes);
            T padded[width];
            store(padded, sum);
            T* const place = (T*)p.y + r * p.y_stride + first + at;
            if (lanes == step)
                __builtin_memcpy(place, padded, step * sizeof(T));
            else
                for (int i = 0; i < lanes; ++i) place[i] = padded[i];
        }
}

// The product of at most max_code_rows rows.
template <typename T, typename Elements>
void multiply_code_rows(const CodeLinear& p, int begin_panel, int end_panel, const int* group_of_run, float* scratch) {
    const CodeMatrix& m = p.matrix;
    using Element = typename Elements::Element;
    const int64_t stride = code_input_stride(m.in_features);
    const int num_blocks = code_blocks(m.in_features);
    const int at_once = p.rows * stride * int64_t{sizeof(Element)} <= cached_input_bytes ? 1 : panels_at_once;
    auto* const wide = (Element*)scratch;
    float* const sums = scratch + stretch_blocks * block_inputs * code_columns;
    const auto* inputs = (const Element*)p.inputs;
    Groups groups;
    for (int first = begin_panel; first < end_panel; first += at_once) {
        const int last = min_of(first + at_once, end_panel);
        for (int block = 0; block < num_blocks; block += stretch_blocks) {
            const int count = min_of(stretch_blocks, num_blocks - block);
            const int* runs = group_of_run + block * block_runs;
            for (int panel = first; panel < last; ++panel) {
                read_groups(m, panel, runs[0], runs[count * block_runs - 1], groups);
                const auto* x = inputs + block * block_inputs;
                float* const panel_sums = sums + (panel - first) * p.rows * code_columns;
                const uint32_t* codes = codes_of(m, panel, block);
                if (p.rows == 1) {
                    decode_and_multiply<Elements, 1>(x, stride, codes, count, runs, groups, panel_sums, block == 0);
                } else if (p.rows <= rows_while_decoding) {
                    decode_and_multiply<Elements, rows_while_decoding>(x, stride, codes, count, runs, groups, panel_sums,
                                                                       block == 0);
                } else {
                    decode_to<Elements>(codes, count, runs, groups, wide);
                    multiply_tiles<Elements>(x, stride, p.rows, wide, count * block_inputs / Elements::lanes, panel_sums,
                                             block == 0);
                }
            }
        }
        for (int panel = first; panel < last; ++panel)
            write_sums<T>(p, panel, sums + (panel - first) * p.rows * code_columns);
    }
}

template <typename T, typename Elements>
void multiply_codes(const CodeLinear& p, int begin_panel, int end_panel, float* scratch) {
    const int num_runs = code_blocks(p.matrix.in_features) * block_runs;
    int* const group_of_run = (int*)scratch;
    find_groups(p.matrix, group_of_run);
    for (int row = 0; row < p.rows; row += max_code_rows) {
        CodeLinear block = p;
        block.rows = min_of(max_code_rows, p.rows - row);
        block.inputs = (typename Elements::Element*)p.inputs + row * code_input_stride(p.matrix.in_features);
        block.y = (T*)p.y + row * p.y_stride;
        multiply_code_rows<T, Elements>(block, begin_panel, end_panel, group_of_run, scratch + aligned_floats(num_runs));
    }
}

template <typename T, typename Elements>
void take_code_inputs(const CodeLinear& p, int begin, int end) {
    const int64_t stride = code_input_stride(p.matrix.in_features);
    for (int r = begin; r < end; ++r)
        Elements::take_row((const T*)p.x + r * p.x_stride, p.matrix, (typename Elements::Element*)p.inputs + r * stride);
}

template <typename T>
void write_codes_out(const CodeMatrix& m, int begin_panel, int end_panel, void* out, float* scratch) {
    const int num_blocks = code_blocks(m.in_features);
    int* const group_of_run = (int*)scratch;
    find_groups(m, group_of_run);
    float* const wide = scratch + aligned_floats(num_blocks * block_runs);
    Groups groups;
    for (int panel = begin_panel; panel < end_panel; ++panel)
        for (int block = 0; block < num_blocks; block += stretch_blocks) {
            const int count = min_of(stretch_blocks, num_blocks - block);
            const int* runs = group_of_run + block * block_runs;
            read_groups(m, panel, runs[0], runs[count * block_runs - 1], groups);
            decode_to<WideElements<T>>(codes_of(m, panel, block), count, runs, groups, wide);
            const int begin = block * block_inputs, stop = min_of(m.in_features, begin + count * block_inputs);
            for (int c = 0; c < min_of(code_columns, m.out_features - panel * code_columns); ++c) {
                T* const row = (T*)out + (int64_t{panel} * code_columns + c) * m.in_features;
                for (int i = begin; i < stop; i += width)
                    store(row + i, load(wide + (i - begin) * code_columns + c * width));
            }
        }
}

#define PACPU_CODE_KERNELS(BFloat16Elements)                                                                            \
    {                                                                                                                   \
        {sizeof(float), sizeof(float), sizeof(BFloat16Elements::Element)},                                              \
            {take_code_inputs<float, WideElements<float>>, take_code_inputs<Half, WideElements<Half>>,                      \
             take_code_inputs<BFloat16, BFloat16Elements>},                                                             \
            {multiply_codes<float, WideElements<float>>, multiply_codes<Half, WideElements<Half>>,                      \
             multiply_codes<BFloat16, BFloat16Elements>},                                                               \
            {write_codes_out<float>, write_codes_out<Half>, write_codes_out<BFloat16>},                                 \
    }

constexpr CodeKernels code_kernels = PACPU_CODE_KERNELS(WideElements<BFloat16>);

}  // namespace
}  // namespace pacpu
