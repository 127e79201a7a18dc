// The driver of all kernels. The batch's contexts are laid end to end, request by request, and cut into parts of equal
// numbers of blocks (flash-decoding; NEO's split, section 3.3). There are up to four parts per thread, so that a thread
// that shares its core leaves its last parts to the others. A stretch that a cut leaves incomplete is kept as a partial
// softmax state and merged at the end.
//
// A segment spans all KV heads if the kernel can use that, for a block's heads lie together and memory is fastest in its
// own order. Otherwise, and where there are few blocks for the threads, the heads are divided into slices, one behind the
// other.
#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "scratch.h"
#include "thread_team.h"

namespace pacpu {
namespace {

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With fewer, parts could not be nearly equal: a part is a whole number of blocks.
constexpr int64_t min_blocks_per_part = 8;
constexpr int64_t most_parts_per_thread = 4;

// A position in the work laid end to end.
struct Cursor {
    int request = 0, slice = 0;
    int64_t block = 0;
};

// An incomplete stretch, waiting to be merged.
struct Partial {
    int request = -1, slice = 0;  // request -1: unused
    SoftmaxState state;
};

template <typename T>
class Call {
public:
    Call(const Problem& problem, const Kernel& kernel)
        : p_(problem),
          attend_(kernel.attend[static_cast<int>(problem.dtype)]),
          slot_bytes_(int64_t{sizeof(T)} * p_.head_dim),
          group_(p_.num_heads / p_.num_kv_heads),
          padded_dim_(static_cast<int>(div_up(p_.head_dim, 32) * 32)),
          head_bytes_(int64_t{2} * p_.block_size * slot_bytes_),
          block_bytes_(head_bytes_ * p_.num_kv_heads) {
        int64_t blocks = 0;
        for (int i = 0; i < p_.batch; ++i) blocks += blocks_of(i);
        while (num_slices_ < p_.num_kv_heads &&
               (!kernel.spans_kv_heads || p_.num_kv_heads % num_slices_ != 0 ||
                blocks * num_slices_ < min_blocks_per_part * p_.num_threads))
            ++num_slices_;
        kv_heads_ = p_.num_kv_heads / num_slices_;
        heads_ = kv_heads_ * group_;
        total_blocks_ = blocks * num_slices_;
    }

    void run() {
        store_new_tokens();
        const int num_parts = static_cast<int>(std::min(parts(), total_blocks_));
        const size_t floats_per_part = 2 * queries_floats() + 3 * state_floats();
        static thread_local Scratch scratch;
        float* memory = scratch.at_least(num_parts * floats_per_part);
        std::vector<Partial> partials(num_parts > 1 ? 2 * num_parts : 0);
        run_phases(1, &num_parts, std::min(p_.num_threads, num_parts), [&](int, int part) {
            run_part(total_blocks_ * part / num_parts, total_blocks_ * (part + 1) / num_parts,
                     memory + part * floats_per_part, partials.data() + (num_parts > 1 ? 2 * part : 0));
        });
        merge(partials);
    }

private:
    int64_t blocks_of(int request) const { return div_up(p_.seq_lens[request], p_.block_size); }

    int64_t parts() const {
        if (p_.num_threads == 1) return 1;
        const int64_t whole = total_blocks_ / min_blocks_per_part;
        return std::clamp<int64_t>(whole, p_.num_threads, most_parts_per_thread * p_.num_threads);
    }

    void store_new_tokens() const {
        for (int i = 0; i < p_.batch; ++i) {
            const int position = p_.seq_lens[i] - 1;
            const int64_t block = p_.block_tables[i * p_.table_stride + position / p_.block_size];
            char* slot = static_cast<char*>(p_.kv_cache) + block * block_bytes_ + position % p_.block_size * slot_bytes_;
            const char* k = static_cast<const char*>(p_.k) + i * p_.k_stride * int64_t{sizeof(T)};
            const char* v = static_cast<const char*>(p_.v) + i * p_.v_stride * int64_t{sizeof(T)};
            for (int head = 0; head < p_.num_kv_heads; ++head, k += slot_bytes_, v += slot_bytes_, slot += head_bytes_) {
                std::memcpy(slot, k, slot_bytes_);
                std::memcpy(slot + head_bytes_ / 2, v, slot_bytes_);
            }
        }
    }

    Cursor find(int64_t position) const {
        Cursor cursor;
        for (; position >= blocks_of(cursor.request) * num_slices_; ++cursor.request)
            position -= blocks_of(cursor.request) * num_slices_;
        cursor.slice = static_cast<int>(position / blocks_of(cursor.request));
        cursor.block = position % blocks_of(cursor.request);
        return cursor;
    }

    // The longest segment at the cursor within `budget` blocks; moves the cursor behind it.
    Segment take_segment(Cursor& cursor, int64_t& budget, float* queries) const {
        const int64_t last = std::min(blocks_of(cursor.request), cursor.block + budget);
        const int64_t end_token = std::min<int64_t>(last * p_.block_size, p_.seq_lens[cursor.request]);
        load_queries(cursor.request, cursor.slice, queries);
        const Segment segment = {queries,
                                 query_row(cursor.request, cursor.slice),
                                 static_cast<const char*>(p_.kv_cache) + cursor.slice * kv_heads_ * head_bytes_,
                                 head_bytes_,
                                 block_bytes_,
                                 p_.block_tables + cursor.request * p_.table_stride + cursor.block,
                                 static_cast<int>(end_token - cursor.block * p_.block_size),
                                 p_.block_size,
                                 p_.head_dim,
                                 padded_dim_,
                                 group_,
                                 kv_heads_,
                                 p_.scale,
                                 p_.prefetch};
        budget -= last - cursor.block;
        cursor.block = last;
        if (cursor.block == blocks_of(cursor.request)) {
            cursor.block = 0;
            if (++cursor.slice == num_slices_) {
                cursor.slice = 0;
                ++cursor.request;
            }
        }
        return segment;
    }

    // Attends the blocks [begin, end) of the work laid end to end. `memory` holds two buffers of queries, this segment's
    // and the next one's, and three states. At most the first and the last segment are incomplete: two partials.
    void run_part(int64_t begin, int64_t end, float* memory, Partial* partial) const {
        float* queries[2] = {memory, memory + queries_floats()};
        float* states = memory + 2 * queries_floats();
        const SoftmaxState working_state = state_in(states);
        Cursor cursor = find(begin), start = cursor;
        int64_t budget = end - begin;
        Segment segment = take_segment(cursor, budget, queries[0]);
        for (int turn = 1;; turn ^= 1) {
            const bool is_last = budget == 0;
            const bool is_complete = start.block == 0 && cursor.block == 0;
            const Cursor next_start = cursor;
            Segment next{};
            if (!is_last) next = take_segment(cursor, budget, queries[turn]);
            if (is_complete) {
                attend_(segment, is_last ? nullptr : &next, working_state);
                write_output(start.request, start.slice, working_state);
            } else {
                *partial = {start.request, start.slice, state_in(states += state_floats())};
                attend_(segment, is_last ? nullptr : &next, partial->state);
                ++partial;
            }
            if (is_last) return;
            segment = next;
            start = next_start;
        }
    }

    // Partials of the same request and slice are neighbours.
    void merge(const std::vector<Partial>& partials) const {
        const Partial* merged = nullptr;
        for (const Partial& partial : partials) {
            if (partial.request < 0) continue;
            if (merged && merged->request == partial.request && merged->slice == partial.slice) {
                add(merged->state, partial.state);
                continue;
            }
            if (merged) write_output(merged->request, merged->slice, merged->state);
            merged = &partial;
        }
        if (merged) write_output(merged->request, merged->slice, merged->state);
    }

    void add(SoftmaxState to, SoftmaxState from) const {
        for (int h = 0; h < heads_; ++h) {
            const float max = std::max(to.max[h], from.max[h]);
            const float scale_to = std::exp(to.max[h] - max), scale_from = std::exp(from.max[h] - max);
            to.max[h] = max;
            to.sum[h] = to.sum[h] * scale_to + from.sum[h] * scale_from;
            float* sum = to.output + size_t(h) * padded_dim_;
            const float* addend = from.output + size_t(h) * padded_dim_;
            for (int d = 0; d < p_.head_dim; ++d) sum[d] = sum[d] * scale_to + addend[d] * scale_from;
        }
    }

    size_t queries_floats() const { return size_t(heads_) * padded_dim_; }
    size_t padded_heads() const { return div_up(heads_, 16) * 16 + 16; }
    size_t state_floats() const { return queries_floats() + 2 * padded_heads(); }

    SoftmaxState state_in(float* memory) const {
        return {memory + queries_floats(), memory + queries_floats() + padded_heads(), memory};
    }

    const T* query_row(int request, int slice) const {
        return static_cast<const T*>(p_.q) + request * p_.q_stride + int64_t{slice} * heads_ * p_.head_dim;
    }

    void load_queries(int request, int slice, float* queries) const {
        const T* row = query_row(request, slice);
        for (int h = 0; h < heads_; ++h, row += p_.head_dim, queries += padded_dim_) {
            for (int d = 0; d < p_.head_dim; ++d) queries[d] = widen(row[d]) * p_.scale;
            for (int d = p_.head_dim; d < padded_dim_; ++d) queries[d] = 0;
        }
    }

    void write_output(int request, int slice, SoftmaxState state) const {
        T* row = static_cast<T*>(p_.out) + request * p_.out_stride + int64_t{slice} * heads_ * p_.head_dim;
        for (int h = 0; h < heads_; ++h, row += p_.head_dim) {
            const float* output = state.output + size_t(h) * padded_dim_;
            const float factor = 1 / state.sum[h];
            for (int d = 0; d < p_.head_dim; ++d) narrow(output[d] * factor, row[d]);
        }
    }

    const Problem& p_;
    const AttendSegment attend_;
    const int64_t slot_bytes_;  // one token's K of one head
    const int group_, padded_dim_;
    const int64_t head_bytes_, block_bytes_;
    int num_slices_ = 1, kv_heads_, heads_;  // slices of the KV heads; KV heads and query heads of each
    int64_t total_blocks_;                   // of the work laid end to end
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
