// What every way to multiply rows with a packed matrix does.
#pragma once

#include "elements.h"
#include "rows.h"

namespace pacpu {
namespace {

// Rounds the sums of a panel, bias added, to the product.
void write_panel(const Linear& p, int panel, const float* sums) {
    const int column = panel * panel_columns, count = min_of(panel_columns, p.out_features - column);
    for (int r = 0; r < p.rows; ++r)
        for (int at = 0; at < count; at += width) {
            const int lanes = min_of(width, count - at);
            Floats sum = load(sums + r * panel_columns + at);
            if (p.bias) sum += load_some(p.bias + column + at, lanes);
            store_some(p.y + r * p.y_stride + column + at, sum, lanes);
        }
}

// Calls multiply(block) for the product's rows, as many at a time as the level-2 cache holds.
template <typename Multiply>
void in_blocks_of_rows(const Linear& p, Multiply&& multiply) {
    for (int row = 0; row < p.rows; row += max_block_rows) {
        Linear block = p;
        block.rows = min_of(max_block_rows, p.rows - row);
        block.x += row * p.x_stride;
        block.y += row * p.y_stride;
        multiply(block);
    }
}

}  // namespace
}  // namespace pacpu
