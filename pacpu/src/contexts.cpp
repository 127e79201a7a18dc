#include "contexts.h"

#include <algorithm>
#include <numeric>

namespace pacpu {
namespace {

// A shared run must save each of its rows more than so many tokens, for each query head to a KV head: a row keeps and
// merges one more state, and short runs of blocks stay in the cache from row to row anyway. Measured on a Zen 3 with
// AVX2, where eight rows of MHA break even at 128 tokens.
constexpr int least_saved_tokens = 80;

class Division {
public:
    Division(const Problem& problem, Contexts& contexts)
        : p_(problem),
          to_(contexts),
          group_(p_.num_heads / p_.num_kv_heads),
          most_rows_(rows_per_read(p_.num_heads, p_.num_kv_heads)) {}

    // Divides the rest from block `from` on of rows order[begin, end), whose first `common` full blocks are the same.
    void divide(int begin, int end, int64_t from, int64_t common) {
        if (end - begin == 1) {
            const int row = to_.order[begin];
            return add(begin, end, std::max(from, first_block(p_, row)), blocks_of(p_, row));
        }
        const int32_t* first = table(to_.order[begin]);
        int64_t shared = full_blocks(to_.order[begin]);
        for (int i = begin + 1; i < end; ++i) {
            const int row = to_.order[i];
            shared = std::min(shared, full_blocks(row));
            shared = std::mismatch(first + common, first + shared, table(row) + common).first - first;
        }
        if (pays(end - begin, shared - from)) {
            add(begin, end, from, shared);
            from = shared;
        }
        const auto next_block = [&](int row) { return full_blocks(row) > shared ? table(row)[shared] : -1; };
        std::sort(to_.order.begin() + begin, to_.order.begin() + end, [&](int a, int b) {
            const int32_t next_a = next_block(a), next_b = next_block(b);
            return next_a != next_b ? next_a < next_b : a < b;
        });
        for (int last; begin < end; begin = last) {
            const int32_t block = next_block(to_.order[begin]);
            last = begin + 1;
            while (block >= 0 && last < end && next_block(to_.order[last]) == block) ++last;
            divide(begin, last, from, shared + 1);
        }
    }

private:
    const int32_t* table(int row) const { return p_.block_tables + row * p_.table_stride; }
    // Those that it may share.
    int64_t full_blocks(int row) const { return first_token(p_, row) ? 0 : p_.seq_lens[row] / p_.block_size; }
    int runs_of(int rows) const { return (rows + most_rows_ - 1) / most_rows_; }

    bool pays(int rows, int64_t blocks) const {
        const int64_t saved_per_block = int64_t{rows - runs_of(rows)} * (block_cost - p_.shared_row_cost);
        return saved_per_block * blocks * p_.block_size > int64_t{rows} * least_saved_tokens * group_ * block_cost;
    }

    void add(int begin, int end, int64_t from, int64_t to) {
        if (from == to) return;
        const int count = runs_of(end - begin);
        for (int i = 0; i < count; ++i) {
            const auto place = [&](int64_t i) { return begin + static_cast<int>((end - begin) * i / count); };
            const Run run = {place(i), place(i + 1), from, to};
            to_.most_rows = std::max(to_.most_rows, run.rows());
            to_.runs.push_back(run);
        }
    }

    const Problem& p_;
    Contexts& to_;
    const int group_, most_rows_;
};

}  // namespace

Contexts::Contexts(const Problem& p) : order(p.batch) {
    std::iota(order.begin(), order.end(), 0);
    if (p.batch > 1 && p.shared_row_cost < block_cost) Division(p, *this).divide(0, p.batch, 0, 0);
    if (most_rows > 1) return;
    std::iota(order.begin(), order.end(), 0);
    runs.clear();
    for (int i = 0; i < p.batch; ++i) runs.push_back({i, i + 1, first_block(p, i), blocks_of(p, i)});
}

}  // namespace pacpu
