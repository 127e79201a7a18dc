// The ISPC kernel, after NEO's design (section 3.3): the lanes of a core share the head dimension (SPMD), the context
// is walked block by block with an online softmax. The contract is that of AttendSegment in kernel.h.
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

#define STRETCH 16  // tokens between two steps of the online softmax
#define MAX_HEADS 4 // query heads that share a pass over K or V in registers
#define CACHE_LINE 64

// Elements [at, at + programCount) of a row; zero beyond its end, which 8 lanes never cross: head_dim is a multiple of 8.
static inline float load(const uniform Element *uniform row, uniform int at, uniform int head_dim) {
    if (programCount <= 8 || at + programCount <= head_dim)
        return widen((row + at)[programIndex]);
    float x = 0;
    if (at + programIndex < head_dim)
        x = widen((row + at)[programIndex]);
    return x;
}

// `heads` is a literal wherever this is called, so that the accumulators live in registers.
static inline void score(const uniform float *uniform queries, uniform int padded_dim, const uniform Element *uniform keys,
                         uniform int num_tokens, uniform int head_dim, const uniform Element *uniform ahead,
                         uniform float *uniform scores, const uniform int heads) {
    for (uniform int t = 0; t < num_tokens; ++t) {
        const uniform Element *uniform row = keys + t * head_dim;
        if (ahead != NULL)
            for (uniform int at = 0; at < head_dim; at += CACHE_LINE / sizeof(uniform Element))
                prefetch_l1((uniform Element * uniform)(ahead + t * head_dim + at));
        float dots[MAX_HEADS];
        #pragma unroll
        for (uniform int h = 0; h < heads; ++h)
            dots[h] = 0;
        for (uniform int at = 0; at < head_dim; at += programCount) {
            const float key = load(row, at, head_dim);
            #pragma unroll
            for (uniform int h = 0; h < heads; ++h)
                dots[h] += key * (queries + h * padded_dim + at)[programIndex];
        }
        #pragma unroll
        for (uniform int h = 0; h < heads; ++h)
            scores[h * STRETCH + t] = reduce_add(dots[h]);
    }
}

// Turns one head's scores into weights; returns the factor for what was summed before.
static inline uniform float softmax_step(uniform float *uniform scores, uniform int num_tokens, uniform float &peak,
                                         uniform float &total) {
    uniform float new_peak = peak;
    for (uniform int t = 0; t < num_tokens; ++t)
        new_peak = scores[t] > new_peak ? scores[t] : new_peak;
    float sums = 0;
    for (uniform int first = 0; first < num_tokens; first += programCount) {
        if (first + programIndex < num_tokens) {
            const float weight = exp((scores + first)[programIndex] - new_peak);
            (scores + first)[programIndex] = weight;
            sums += weight;
        }
    }
    const uniform float correction = peak < new_peak ? exp(peak - new_peak) : 1;
    peak = new_peak;
    total = total * correction + reduce_add(sums);
    return correction;
}

// Adds the weighted V to the output, `columns` vectors at a time; `heads` and `columns` are literals.
static inline uniform int weigh(const uniform Element *uniform values, uniform int num_tokens, uniform int head_dim,
                                const uniform Element *uniform ahead, const uniform float *uniform weights,
                                const uniform float *uniform corrections, uniform int padded_dim, uniform int start,
                                uniform float *uniform output, const uniform int heads, const uniform int columns) {
    uniform int at = start;
    for (; at + (columns - 1) * programCount < head_dim; at += columns * programCount) {
        float sums[MAX_HEADS * 4];
        #pragma unroll
        for (uniform int h = 0; h < heads; ++h)
            #pragma unroll
            for (uniform int c = 0; c < columns; ++c)
                sums[h * columns + c] = (output + h * padded_dim + at + c * programCount)[programIndex] * corrections[h];
        for (uniform int t = 0; t < num_tokens; ++t) {
            if (ahead != NULL)
                for (uniform int line = 0; line < columns * programCount; line += CACHE_LINE / sizeof(uniform Element))
                    prefetch_l1((uniform Element * uniform)(ahead + t * head_dim + at + line));
            #pragma unroll
            for (uniform int c = 0; c < columns; ++c) {
                const float value = load(values + t * head_dim, at + c * programCount, head_dim);
                #pragma unroll
                for (uniform int h = 0; h < heads; ++h)
                    sums[h * columns + c] += weights[h * STRETCH + t] * value;
            }
        }
        #pragma unroll
        for (uniform int h = 0; h < heads; ++h)
            #pragma unroll
            for (uniform int c = 0; c < columns; ++c)
                (output + h * padded_dim + at + c * programCount)[programIndex] = sums[h * columns + c];
    }
    return at;
}

static inline void attend_heads(const uniform float *uniform queries, const uniform Element *uniform keys,
                                uniform int value_offset, const uniform Element *uniform ahead, uniform int num_tokens,
                                uniform int head_dim, uniform int padded_dim, uniform float *uniform peaks,
                                uniform float *uniform totals, uniform float *uniform output, const uniform int heads) {
    uniform float scores[MAX_HEADS * STRETCH];
    uniform float corrections[MAX_HEADS];
    score(queries, padded_dim, keys, num_tokens, head_dim, ahead, scores, heads);
    for (uniform int h = 0; h < heads; ++h)
        corrections[h] = softmax_step(scores + h * STRETCH, num_tokens, peaks[h], totals[h]);
    const uniform Element *uniform values = keys + value_offset;
    const uniform Element *uniform values_ahead = ahead;
    if (ahead != NULL)
        values_ahead = ahead + value_offset;
    const uniform int rest = weigh(values, num_tokens, head_dim, values_ahead, scores, corrections, padded_dim, 0, output,
                                   heads, heads > 2 ? 2 : 4);
    weigh(values, num_tokens, head_dim, values_ahead, scores, corrections, padded_dim, rest, output, heads, 1);
}

export void ATTEND(const uniform float queries[], const uniform int8 keys[], uniform int64 block_bytes,
                   const uniform int32 blocks[], uniform int num_tokens, uniform int block_size, uniform int head_dim,
                   uniform int padded_dim, uniform int group, uniform float peaks[], uniform float totals[],
                   uniform float output[]) {
    for (uniform int h = 0; h < group; ++h) {
        peaks[h] = -floatbits(0x7f800000);
        totals[h] = 0;
    }
    for (uniform int at = 0; at < group * padded_dim; at += programCount)
        (output + at)[programIndex] = 0;
    for (uniform int first = 0; first < num_tokens; first += block_size) {
        const uniform int block = first / block_size;
        const uniform Element *uniform rows = (const uniform Element *uniform)(keys + blocks[block] * block_bytes);
        const uniform Element *uniform next_rows = NULL;
        if (first + block_size < num_tokens)
            next_rows = (const uniform Element *uniform)(keys + blocks[block + 1] * block_bytes);
        const uniform int in_block = min(block_size, num_tokens - first);
        for (uniform int slot = 0; slot < in_block; slot += STRETCH) {
            const uniform int n = min(in_block - slot, STRETCH);
            const uniform Element *uniform stretch = rows + slot * head_dim;
            const uniform Element *uniform ahead = next_rows;
            if (next_rows != NULL)
                ahead = next_rows + slot * head_dim;
            const uniform int value_offset = block_size * head_dim;
            for (uniform int h = 0; h < group; h += MAX_HEADS) {
                const uniform float *uniform q = queries + h * padded_dim;
                uniform float *uniform out = output + h * padded_dim;
                const uniform int heads = min(group - h, MAX_HEADS);
                if (heads == 1)
                    attend_heads(q, stretch, value_offset, ahead, n, head_dim, padded_dim, peaks + h, totals + h, out, 1);
                else if (heads == 2)
                    attend_heads(q, stretch, value_offset, ahead, n, head_dim, padded_dim, peaks + h, totals + h, out, 2);
                else if (heads == 3)
                    attend_heads(q, stretch, value_offset, ahead, n, head_dim, padded_dim, peaks + h, totals + h, out, 3);
                else
                    attend_heads(q, stretch, value_offset, ahead, n, head_dim, padded_dim, peaks + h, totals + h, out, 4);
                ahead = NULL;
            }
        }
    }
}
