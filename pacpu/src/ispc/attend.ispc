// The kernel that the papers compare with, after NEO's design (section 3.3) and for the contract of AttendSegment in
// kernel.h. The lanes of a core share the head dimension (SPMD). A segment is walked three times in the order of memory,
// block after block and all heads of each: scores, softmax, weighted sum of V. The query heads of a group share every K
// and V that is widened. Scores and sums lie in memory, and nothing is prefetched: `native` is where that is done better.
//
// Compiled once for each element type (-DELEMENT_float32, _float16 or _bfloat16) and target, under the name -DATTEND.
// Pointers are uniform and indexed as (pointer + uniform offset)[programIndex], so that every access is a plain vector
// load: other spellings become gathers with some compiler versions. Performance warnings fail the build.

#if defined(ELEMENT_float32)
typedef float Element;
static inline float widen(Element x) { return x; }
#elif defined(ELEMENT_float16)
typedef unsigned int16 Element;
static inline float widen(Element x) { return half_to_float(x); }
#elif defined(ELEMENT_bfloat16)
typedef unsigned int16 Element;
static inline float widen(Element x) { return floatbits(((unsigned int)x) << 16); }
#endif

#define MAX_HEADS 4 // query heads whose scores are summed in registers at a time
#define MAX_ROWS 2  // rows of K that share a pass over the queries

// Elements [at, at + programCount) of a row; zero beyond its end, which 8 lanes never cross: head_dim is a multiple of 8.
static inline float load(const uniform Element *uniform row, uniform int at, uniform int head_dim) {
    if (programCount <= 8 || at + programCount <= head_dim)
        return widen((row + at)[programIndex]);
    float x = 0;
    if (at + programIndex < head_dim)
        x = widen((row + at)[programIndex]);
    return x;
}

// Scores of `heads` query heads against `rows` rows of K, both literals so that the sums live in registers.
static inline void score_tile(const uniform float *uniform queries, uniform int padded_dim,
                              const uniform Element *uniform keys, uniform int head_dim, uniform float *uniform scores,
                              uniform int row_scores, const uniform int heads, const uniform int rows) {
    float dots[MAX_ROWS * MAX_HEADS];
    #pragma unroll
    for (uniform int i = 0; i < rows * heads; ++i)
        dots[i] = 0;
    for (uniform int at = 0; at < head_dim; at += programCount) {
        #pragma unroll
        for (uniform int t = 0; t < rows; ++t) {
            const float key = load(keys + t * head_dim, at, head_dim);
            #pragma unroll
            for (uniform int h = 0; h < heads; ++h)
                dots[t * heads + h] += key * (queries + h * padded_dim + at)[programIndex];
        }
    }
    #pragma unroll
    for (uniform int t = 0; t < rows; ++t)
        #pragma unroll
        for (uniform int h = 0; h < heads; ++h)
            scores[t * row_scores + h] = reduce_add(dots[t * heads + h]);
}

static inline void score_rows(const uniform float *uniform queries, uniform int padded_dim,
                              const uniform Element *uniform keys, uniform int num_tokens, uniform int head_dim,
                              uniform float *uniform scores, uniform int row_scores, const uniform int heads) {
    uniform int t = 0;
    for (; t + MAX_ROWS <= num_tokens; t += MAX_ROWS)
        score_tile(queries, padded_dim, keys + t * head_dim, head_dim, scores + t * row_scores, row_scores, heads, MAX_ROWS);
    for (; t < num_tokens; ++t)
        score_tile(queries, padded_dim, keys + t * head_dim, head_dim, scores + t * row_scores, row_scores, heads, 1);
}

// Turns scores [num_tokens, row_scores] into weights, a lane for each query head. The rows are as long as whole vectors;
// lanes without a head compute what nobody reads.
static inline void softmax(uniform float *uniform scores, uniform int num_tokens, uniform int row_scores,
                           uniform float *uniform peaks, uniform float *uniform totals) {
    for (uniform int first = 0; first < row_scores; first += programCount) {
        float peak = -floatbits(0x7f800000);
        for (uniform int t = 0; t < num_tokens; ++t)
            peak = max(peak, (scores + (uniform int64)t * row_scores + first)[programIndex]);
        float total = 0;
        for (uniform int t = 0; t < num_tokens; ++t) {
            const float weight = exp((scores + (uniform int64)t * row_scores + first)[programIndex] - peak);
            (scores + (uniform int64)t * row_scores + first)[programIndex] = weight;
            total += weight;
        }
        (peaks + first)[programIndex] = peak;
        (totals + first)[programIndex] = total;
    }
}

// Adds a block's weighted V to the outputs of `heads` query heads.
static inline void weigh_rows(const uniform Element *uniform values, uniform int num_tokens, uniform int head_dim,
                              const uniform float *uniform weights, uniform int row_scores, uniform int padded_dim,
                              uniform float *uniform output, const uniform int heads) {
    for (uniform int t = 0; t < num_tokens; ++t)
        for (uniform int at = 0; at < head_dim; at += programCount) {
            const float value = load(values + t * head_dim, at, head_dim);
            #pragma unroll
            for (uniform int h = 0; h < heads; ++h)
                (output + h * padded_dim + at)[programIndex] += weights[t * row_scores + h] * value;
        }
}

// `scores` has room for [num_tokens, row_scores], where row_scores is num_kv_heads * group rounded up to whole vectors.
export void ATTEND(const uniform float queries[], const uniform int8 keys[], uniform int64 head_bytes,
                   uniform int64 block_bytes, const uniform int32 blocks[], uniform int first_slot,
                   uniform int num_tokens, uniform int block_size, uniform int head_dim, uniform int padded_dim, uniform int group,
                   uniform int num_kv_heads, uniform float scores[], uniform int row_scores, uniform float peaks[],
                   uniform float totals[], uniform float output[]) {
    for (uniform int first = 0, n; first < num_tokens; first += n) {
        const uniform int place = first_slot + first;
        const uniform int slot = place % block_size;
        n = min(block_size - slot, num_tokens - first);
        for (uniform int head = 0; head < num_kv_heads; ++head) {
            const uniform Element *uniform rows = (const uniform Element *uniform)(
                keys + blocks[place / block_size] * block_bytes + head * head_bytes) + slot * head_dim;
            for (uniform int h = 0; h < group; h += MAX_HEADS) {
                const uniform int at = head * group + h, heads = min(group - h, MAX_HEADS);
                const uniform float *uniform q = queries + at * padded_dim;
                uniform float *uniform s = scores + (uniform int64)first * row_scores + at;
                if (heads == 1)
                    score_rows(q, padded_dim, rows, n, head_dim, s, row_scores, 1);
                else if (heads == 2)
                    score_rows(q, padded_dim, rows, n, head_dim, s, row_scores, 2);
                else if (heads == 3)
                    score_rows(q, padded_dim, rows, n, head_dim, s, row_scores, 3);
                else
                    score_rows(q, padded_dim, rows, n, head_dim, s, row_scores, 4);
            }
        }
    }
    softmax(scores, num_tokens, row_scores, peaks, totals);
    for (uniform int at = 0; at < num_kv_heads * group * padded_dim; at += programCount)
        (output + at)[programIndex] = 0;
    for (uniform int first = 0, n; first < num_tokens; first += n) {
        const uniform int place = first_slot + first;
        const uniform int slot = place % block_size;
        n = min(block_size - slot, num_tokens - first);
        for (uniform int head = 0; head < num_kv_heads; ++head) {
            const uniform Element *uniform rows = (const uniform Element *uniform)(
                keys + blocks[place / block_size] * block_bytes + head * head_bytes) + slot * head_dim;
            const uniform Element *uniform values = rows + block_size * head_dim;
            for (uniform int h = 0; h < group; h += MAX_HEADS) {
                const uniform int at = head * group + h, heads = min(group - h, MAX_HEADS);
                const uniform float *uniform w = scores + (uniform int64)first * row_scores + at;
                uniform float *uniform out = output + at * padded_dim;
                if (heads == 1)
                    weigh_rows(values, n, head_dim, w, row_scores, padded_dim, out, 1);
                else if (heads == 2)
                    weigh_rows(values, n, head_dim, w, row_scores, padded_dim, out, 2);
                else if (heads == 3)
                    weigh_rows(values, n, head_dim, w, row_scores, padded_dim, out, 3);
                else
                    weigh_rows(values, n, head_dim, w, row_scores, padded_dim, out, 4);
            }
        }
    }
}
