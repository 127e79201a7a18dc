// Which kernels there are, and the instruction set they use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace pacpu {

// The instruction set in use: the best one of this CPU, until select_isa names another.
Isa current_isa();
const char* isa_name(Isa isa);

// Why an instruction set cannot be used here, or nullptr.
const char* isa_problem(Isa isa);

// Throws std::invalid_argument if `name` is unknown or this CPU lacks it. Not for use during a call.
void select_isa(const std::string& name);

// What a KV cache holds: elements of a type, or codes.
enum class CacheType { float32, float16, bfloat16, int8 };
constexpr int num_cache_types = 4;
static_assert(static_cast<int>(CacheType::bfloat16) == static_cast<int>(DType::bfloat16));

const char* cache_type_name(CacheType type);

// How calls read K and V: what they prefetch, and whether those over codes multiply in AVX2's vectors, although there is
// VNNI: their prefetches are further apart, which suits some processors where a KV head has a single query head.
struct Way {
    const char* name;
    Prefetch prefetch;
    bool is_narrow;
};

// Names of those that there are for calls, by the cache's type and by whether query heads share KV heads. The narrow ones,
// for int8 where none are shared, come last.
std::vector<std::string> way_names(CacheType type, bool is_shared);

// With the instruction set in use, by the same: L1 until set_way says otherwise. Not to be set during a call.
const Way& way(CacheType type, bool is_shared);
// Throws std::invalid_argument if there is no such way.
void set_way(CacheType type, bool is_shared, const std::string& name);

// What calls take for Problem::shared_row_cost, by the same: 8 until set_shared_row_cost says otherwise. Not to be set
// during a call.
int shared_row_cost(CacheType type, bool is_shared);
void set_shared_row_cost(CacheType type, bool is_shared, int cost);

// Kernels for the current instruction set, unavailable ones included. The native one, the fastest on every machine
// measured, comes first. Which of the others is second depends on the machine, and since native computes in every type
// and everywhere, their order decides nothing.
const std::vector<Kernel>& all_kernels();

const char* dtype_name(DType dtype);

// Whether a kernel can be used here for this type.
bool computes(const Kernel& kernel, DType dtype);

// The kernel used when the caller names none: the first of all_kernels() that computes in this type.
const Kernel& default_kernel(DType dtype);

// Throws std::invalid_argument if there is no such kernel, it is unavailable or does not compute in this type.
const Kernel& find_kernel(const std::string& name, DType dtype);

}  // namespace pacpu
