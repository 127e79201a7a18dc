// The driver of all kernels. The batch's contexts are divided into runs of blocks (contexts.h), which are laid end to end
// and cut into parts of equal cost (flash-decoding; NEO's split, section 3.3). There are up to four parts per thread, so
// that a thread that shares its core leaves its last parts to the others. A run, or a part of one, is a segment for the
// kernel. What is not a row's whole context is kept as a partial softmax state and merged at the end.
//
// The rows of a run stand side by side as query heads, so that memory is read once for all of them.
//
// A segment spans all KV heads if the kernel can use that, for a block's heads lie together and memory is fastest in its
// own order. Otherwise, and where there are few blocks for the threads, the heads are divided into slices, one behind the
// other.
#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "contexts.h"
#include "int8.h"
#include "rows.h"
#include "scratch.h"
#include "thread_team.h"

namespace pacpu {
namespace {

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With fewer, parts could not be nearly equal: a part is a whole number of blocks.
constexpr int64_t min_blocks_per_part = 8;
constexpr int64_t most_parts_per_thread = 4;

// Neighbouring blocks of a run under one slice of the KV heads.
struct Piece {
    const Run* run;
    int slice;
    int64_t block, num_blocks;
    SoftmaxState state;  // of a partial one, else null: it is a row's whole context
};

template <typename T>
class Call {
public:
    Call(const Problem& problem, const Kernel& kernel)
        : p_(problem),
          attend_(problem.int8 ? problem.int8->attend : kernel.attend[dtype_]),
          slot_bytes_(int64_t{sizeof(T)} * p_.head_dim),
          group_(p_.num_heads / p_.num_kv_heads),
          padded_dim_(static_cast<int>(div_up(p_.head_dim, 32) * 32)),
          head_bytes_(p_.int8 ? int8_head_bytes(p_.block_size, p_.head_dim) : int64_t{2} * p_.block_size * slot_bytes_),
          block_bytes_(head_bytes_ * p_.num_kv_heads),
          contexts_(problem) {
        int64_t blocks = 0, cost = 0;
        for (const Run& run : contexts_.runs) {
            blocks += run.blocks();
            cost += run.blocks() * shared_block_cost(p_, run.rows());
        }
        while (num_slices_ < p_.num_kv_heads &&
               (!kernel.spans_kv_heads || p_.num_kv_heads % num_slices_ != 0 ||
                blocks * num_slices_ < min_blocks_per_part * p_.num_threads))
            ++num_slices_;
        kv_heads_ = p_.num_kv_heads / num_slices_;
        heads_ = kv_heads_ * group_;
        total_blocks_ = blocks * num_slices_;
        total_cost_ = cost * num_slices_;
    }

    void run() {
        store_new_tokens();
        num_parts_ = static_cast<int>(std::min(parts(), total_blocks_));
        cut();
        const std::vector<int> merged = keep_partial_states();
        const int num_parts[] = {num_parts_, static_cast<int>(merged.size())};
        run_phases(merged.empty() ? 1 : 2, num_parts, std::min(p_.num_threads, num_parts_), [&](int phase, int part) {
            if (phase == 0)
                attend_part(part);
            else
                merge_row(merged[part]);
        });
    }

private:
    int64_t parts() const {
        if (p_.num_threads == 1) return 1;
        const int64_t whole = total_cost_ / (block_cost * min_blocks_per_part);
        return std::clamp<int64_t>(whole, p_.num_threads, most_parts_per_thread * p_.num_threads);
    }

    void store_new_tokens() const {
        for (int i = 0; i < p_.batch; ++i) {
            const int position = p_.seq_lens[i] - 1;
            const int64_t block = p_.block_tables[i * p_.table_stride + position / p_.block_size];
            char* slot = static_cast<char*>(p_.kv_cache) + block * block_bytes_;
            const char* k = static_cast<const char*>(p_.k) + i * p_.k_stride * int64_t{sizeof(T)};
            const char* v = static_cast<const char*>(p_.v) + i * p_.v_stride * int64_t{sizeof(T)};
            const int at = position % p_.block_size;
            slot += p_.int8 ? at / tile_tokens * tile_bytes(p_.head_dim) : at * slot_bytes_;
            for (int head = 0; head < p_.num_kv_heads; ++head, k += slot_bytes_, v += slot_bytes_, slot += head_bytes_) {
                if (p_.int8) {
                    p_.int8->codecs[dtype_].store(k, v, p_.head_dim, slot, at % tile_tokens);
                    continue;
                }
                std::memcpy(slot, k, slot_bytes_);
                std::memcpy(slot + head_bytes_ / 2, v, slot_bytes_);
            }
        }
    }

    // Lays the runs end to end, slice by slice. A block belongs to the part in which it ends.
    void cut() {
        first_pieces_.assign(num_parts_ + 1, 0);
        int64_t position = 0;
        for (const Run& run : contexts_.runs) {
            const int64_t cost = shared_block_cost(p_, run.rows());
            for (int slice = 0; slice < num_slices_; ++slice)
                for (int64_t block = run.begin_block; block < run.end_block;) {
                    const int64_t part = ((position + cost) * num_parts_ - 1) / total_cost_;
                    const int64_t fitting = (total_cost_ * (part + 1) / num_parts_ - position) / cost;
                    const int64_t num_blocks = std::min(run.end_block - block, fitting);
                    pieces_.push_back({&run, slice, block, num_blocks, {}});
                    first_pieces_[part + 1] = static_cast<int>(pieces_.size());
                    position += num_blocks * cost;
                    block += num_blocks;
                }
        }
        for (int part = 0; part < num_parts_; ++part)  // a part may be smaller than a block
            first_pieces_[part + 1] = std::max(first_pieces_[part], first_pieces_[part + 1]);
    }

    bool is_complete(const Piece& piece) const {
        const Run& run = *piece.run;
        const int row = contexts_.order[run.begin_row];
        const int64_t first = first_block(p_, row);
        return run.rows() == 1 && piece.block == first && piece.num_blocks == blocks_of(p_, row) - first;
    }

    // Gives memory to the states of partial pieces. Returns the rows that have such, as positions in the order.
    std::vector<int> keep_partial_states() {
        size_t num_floats = 0;
        std::vector<bool> is_partial(p_.batch);
        for (const Piece& piece : pieces_) {
            if (is_complete(piece)) continue;
            num_floats += state_floats(piece.run->rows());
            for (int row = piece.run->begin_row; row < piece.run->end_row; ++row) is_partial[row] = true;
        }
        static thread_local Scratch scratch;
        float* memory = scratch.at_least(num_floats);
        for (Piece& piece : pieces_) {
            if (is_complete(piece)) continue;
            piece.state = state_in(memory, piece.run->rows());
            memory += state_floats(piece.run->rows());
        }
        std::vector<int> merged;
        for (int row = 0; row < p_.batch; ++row)
            if (is_partial[row]) merged.push_back(row);
        return merged;
    }

    void attend_part(int part) const {
        const size_t queries = queries_floats(contexts_.most_rows), raw = raw_queries_floats();
        static thread_local Scratch scratch;
        float* memory = scratch.at_least(2 * (queries + raw) + state_floats(1));
        const SoftmaxState working_state = state_in(memory + 2 * (queries + raw), 1);
        const Piece *piece = pieces_.data() + first_pieces_[part], *end = pieces_.data() + first_pieces_[part + 1];
        if (piece == end) return;
        // Two buffers of queries: this segment's and the next one's.
        Segment segment = segment_of(*piece, memory);
        for (int turn = 1; piece != end; ++piece, turn ^= 1) {
            Segment next{};
            if (piece + 1 != end) next = segment_of(piece[1], memory + turn * (queries + raw));
            attend_(segment, piece + 1 == end ? nullptr : &next, piece->state.max ? piece->state : working_state);
            if (!piece->state.max) write_output(*piece, piece->run->begin_row, working_state);
            segment = next;
        }
    }

    // Writes the queries of the piece's rows to `memory`.
    Segment segment_of(const Piece& piece, float* memory) const {
        const Run& run = *piece.run;
        const int64_t end_block = piece.block + piece.num_blocks;
        const int row = contexts_.order[run.begin_row];  // whose blocks are read
        const int64_t end_token = std::min<int64_t>(end_block * p_.block_size, p_.seq_lens[row]);
        const int64_t block_token = piece.block * p_.block_size;
        const int64_t begin_token = std::max<int64_t>(block_token, first_token(p_, row));
        return {memory,
                load_queries(piece, memory),
                static_cast<const char*>(p_.kv_cache) + piece.slice * kv_heads_ * head_bytes_,
                head_bytes_,
                block_bytes_,
                p_.block_tables + row * p_.table_stride + piece.block,
                static_cast<int>(begin_token - block_token),
                static_cast<int>(end_token - begin_token),
                p_.block_size,
                p_.head_dim,
                padded_dim_,
                group_ * run.rows(),
                kv_heads_,
                p_.scale,
                p_.prefetch};
    }

    // Scaled queries go to `queries`: those of a KV head side by side, row by row. Returns the raw ones in this order.
    const T* load_queries(const Piece& piece, float* queries) const {
        const Run& run = *piece.run;
        T* const raw = reinterpret_cast<T*>(queries + queries_floats(contexts_.most_rows));
        T* to = raw;
        for (int first = 0; first < heads_; first += group_)
            for (int row = run.begin_row; row < run.end_row; ++row) {
                const T* query = query_row(row, piece.slice) + int64_t{first} * p_.head_dim;
                if (run.rows() > 1) to = std::copy_n(query, group_ * p_.head_dim, to);
                for (int h = 0; h < group_; ++h, query += p_.head_dim, queries += padded_dim_) {
                    std::fill_n(queries + p_.head_dim, padded_dim_ - p_.head_dim, 0.0f);
                    rows_.widen[dtype_](query, p_.head_dim, p_.scale, queries);
                }
            }
        return run.rows() > 1 ? raw : query_row(run.begin_row, piece.slice);
    }

    // Adds a row's partial states up, in the order of its context, and writes its output. No two rows touch the same.
    void merge_row(int row) const {
        std::vector<const Piece*> sums(num_slices_);
        for (const Piece& piece : pieces_) {
            if (row < piece.run->begin_row || row >= piece.run->end_row) continue;
            if (const Piece* sum = sums[piece.slice])
                add(*sum, piece, row);
            else
                sums[piece.slice] = &piece;
        }
        for (const Piece* sum : sums)
            if (sum->state.max) write_output(*sum, row, sum->state);
    }

    void add(const Piece& to, const Piece& from, int row) const {
        for (int h = 0; h < heads_; ++h) {
            const int i = head_in(to, row, h), j = head_in(from, row, h);
            const float max = std::max(to.state.max[i], from.state.max[j]);
            const float scale_to = std::exp(to.state.max[i] - max), scale_from = std::exp(from.state.max[j] - max);
            to.state.max[i] = max;
            to.state.sum[i] = to.state.sum[i] * scale_to + from.state.sum[j] * scale_from;
            float* sum = to.state.output + size_t(i) * padded_dim_;
            const float* addend = from.state.output + size_t(j) * padded_dim_;
            for (int d = 0; d < p_.head_dim; ++d) sum[d] = sum[d] * scale_to + addend[d] * scale_from;
        }
    }

    // Where in a piece's state a row's query head is.
    int head_in(const Piece& piece, int row, int head) const {
        const Run& run = *piece.run;
        return (head / group_ * run.rows() + row - run.begin_row) * group_ + head % group_;
    }

    size_t queries_floats(int rows) const { return size_t(rows) * heads_ * padded_dim_; }
    // Of the raw queries, which only rows side by side need, in floats and whole cache lines.
    size_t raw_queries_floats() const {
        return contexts_.most_rows == 1 ? 0 : div_up(contexts_.most_rows * heads_ * slot_bytes_, 64) * 16;
    }
    size_t padded_heads(int rows) const { return div_up(int64_t{rows} * heads_, 16) * 16 + 16; }
    size_t state_floats(int rows) const { return queries_floats(rows) + 2 * padded_heads(rows); }

    SoftmaxState state_in(float* memory, int rows) const {
        float* const max = memory + queries_floats(rows);
        return {max, max + padded_heads(rows), memory};
    }

    const T* query_row(int row, int slice) const {
        return static_cast<const T*>(p_.q) + contexts_.order[row] * p_.q_stride + int64_t{slice} * heads_ * p_.head_dim;
    }

    void write_output(const Piece& piece, int row, SoftmaxState state) const {
        T* out = static_cast<T*>(p_.out) + contexts_.order[row] * p_.out_stride + int64_t{piece.slice} * heads_ * p_.head_dim;
        for (int h = 0; h < heads_; ++h, out += p_.head_dim) {
            const int i = head_in(piece, row, h);
            const float* output = state.output + size_t(i) * padded_dim_;
            const float sink = p_.sinks ? std::exp(p_.sinks[piece.slice * heads_ + h] - state.max[i]) : 0;
            const float factor = 1 / (state.sum[i] + sink);
            rows_.narrow[dtype_](output, p_.head_dim, factor, out);
        }
    }

    const Problem& p_;
    const int dtype_ = static_cast<int>(p_.dtype);
    const RowKernels& rows_ = row_kernels();
    const AttendSegment attend_;
    const int64_t slot_bytes_;  // one token's K of one head
    const int group_, padded_dim_;
    const int64_t head_bytes_, block_bytes_;
    const Contexts contexts_;
    int num_slices_ = 1, kv_heads_, heads_;  // slices of the KV heads; KV heads and query heads of each
    int64_t total_blocks_, total_cost_;      // of the work laid end to end
    int num_parts_ = 0;
    std::vector<Piece> pieces_;
    std::vector<int> first_pieces_;  // of each part, and the end
};

}  // namespace

void run(const Problem& problem, const Kernel& kernel) {
    switch (problem.dtype) {
        case DType::float32: return Call<float>(problem, kernel).run();
        case DType::float16: return Call<Half>(problem, kernel).run();
        case DType::bfloat16: return Call<BFloat16>(problem, kernel).run();
    }
}

}  // namespace pacpu
