// How the contexts of a call are divided into runs of blocks, so that blocks which several rows share are read once.
#pragma once

#include <cstdint>
#include <vector>

#include "paged_attention.h"

namespace pacpu {

// Costs are in eighths of those of one row's block.
constexpr int block_cost = 8;

// Blocks [begin_block, end_block) of each of the rows order[begin_row, end_row), which have these blocks in common.
struct Run {
    int begin_row, end_row;
    int64_t begin_block, end_block;

    int rows() const { return end_row - begin_row; }
    int64_t blocks() const { return end_block - begin_block; }
};

struct Contexts {
    std::vector<int> order;  // of the rows
    std::vector<Run> runs;   // those of a row in the order of its context
    int most_rows = 1;       // of a run

    // Rows share full blocks with the same ids at the same places from the first one on, where that pays. Rows without
    // such blocks keep their order. A row that does not reach back to its first token shares none.
    explicit Contexts(const Problem& problem);
};

// Of a shared run's query heads per KV head: the rows of an AMX tile, and states that the level-2 cache holds.
constexpr int most_shared_heads = 16;

// How many rows at most share a run, of a model with so many heads; num_kv_heads divides num_heads.
constexpr int rows_per_read(int num_heads, int num_kv_heads) {
    const int rows = most_shared_heads / (num_heads / num_kv_heads);
    return rows > 1 ? rows : 1;
}

// What a block that so many rows share costs.
inline int shared_block_cost(const Problem& p, int rows) { return block_cost + (rows - 1) * p.shared_row_cost; }

// The first token that a row attends to, and its block.
inline int first_token(const Problem& p, int row) { return p.seq_lens[row] > p.window ? p.seq_lens[row] - p.window : 0; }
inline int64_t first_block(const Problem& p, int row) { return first_token(p, row) / p.block_size; }

inline int64_t blocks_of(const Problem& p, int row) { return (int64_t{p.seq_lens[row]} + p.block_size - 1) / p.block_size; }

}  // namespace pacpu
