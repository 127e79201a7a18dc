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

// Some rows of a product, and a stretch of a panel's pairs of inputs. `ahead`: memory to fetch, or nullptr.
struct PanelTile {
    int row, rows, first_pair, num_pairs;
    const BFloat16* weights;
    const char* ahead;
};

// Calls multiply(tile) for panel after panel, stretch after stretch, at most `most_rows` rows at a time, and writes each
// panel from `sums` [rows, panel_columns].
template <typename Multiply>
PACPU_INLINE void over_tiles(const Linear& p, int begin_panel, int end_panel, int most_rows, const float* sums,
                             Multiply&& multiply) {
    const int num_pairs = (p.in_features + 1) / 2, num_tiles = (p.rows + most_rows - 1) / most_rows;
    for (int panel = begin_panel; panel < end_panel; ++panel) {
        for (int first = 0; first < num_pairs; first += max_block_pairs) {
            const int count = min_of(max_block_pairs, num_pairs - first);
            const BFloat16* weights = p.packed + (int64_t{panel} * num_pairs + first) * 2 * panel_columns;
            const BFloat16* behind = weights + int64_t{2} * count * panel_columns;
            const bool is_last = panel + 1 == end_panel && first + count == num_pairs;
            for (int tile = 0; tile < num_tiles; ++tile) {
                const int row = p.rows * tile / num_tiles, rows = p.rows * (tile + 1) / num_tiles - row;
                // What comes next is in memory: three tiles fetch a third of its cache lines each.
                const char* ahead = is_last || tile >= 3 ? nullptr : (const char*)behind + 64 * tile;
                multiply(PanelTile{row, rows, first, count, weights, ahead});
            }
        }
        write_panel(p, panel, sums);
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
