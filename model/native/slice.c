/* The layers of a stage: one call computes a segment in all of them.
 *
 * A layer is RMS norms, rotary positions, attention with grouped heads over a tree cache, and a gated feed-forward by
 * SiLU or GELU. Scores may have a soft cap, and the output of a block a norm and a factor. A row's bits depend on its
 * own path only: each sum has a fixed order (lanes.h), and attention adds the slots that the row sees in the order of
 * its path. So other rows, the number of threads and the processor change nothing.
 * `slice_run` first compares the indices and counts of a segment with the sizes of slots and layers (`is_sound`), since
 * they come over a wire. Pointers, and all sizes of `slice_multiply`, are those of the caller's own tensors.
 *
 * Here a head is an attention head, a group some inputs of a weight that share a scale, a block sixteen outputs of a
 * weight, a chunk up to eight rows of one request, and a path the slots that a row sees, in the order of the text.
 *
 * Shapes: T rows of a segment, D hidden size, H heads, K key/value heads, E head dimension, R rotated dimensions of a
 * head, N outputs and I inputs of a weight, G groups of inputs, S slots of a cache, P slots that a row sees.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "lanes.h"
#include "pool.h"

#define EXPORTED __attribute__((visibility("default")))

enum Form { FLOAT32, BFLOAT16, INT8, INT4, GROUPS8, HALVES8, GROUPS4 };

/* A weight `[N, I]` in blocks of sixteen outputs; inputs are padded to groups in all forms but the first two, outputs to
 * blocks.
 * FLOAT32, BFLOAT16: numbers `[N / 16, I, 16]`.
 * INT8: numbers `[N / 16, I / UNIT8, 16, UNIT8]`, scales float `[N]`.
 * INT4: codes `[N / 16, G, 16 * GROUP / 2]`, where a byte has a code of the first half of a group's units in its low
 *   bits, one of the second half in its high bits; scales and offsets bfloat16 `[N / 16, G, 2, 16]`: a weight is
 *   (code - 8) * scale + offset.
 * The other forms are those of GGUF files, with floats for each group:
 * GROUPS8: numbers as in INT8, scales `[N / 16, G, 1, 16]`: a weight is number * scale.
 * HALVES8: numbers as in INT8, scales of a group's halves and a least value `[N / 16, G, 3, 16]`: number * scale + least.
 * GROUPS4: codes as in INT4, scales and least values `[N / 16, G, 2, 16]`: a weight is code * scale + least. */
typedef struct {
    int64_t form, outputs, inputs;
    const void *numbers, *scales;
    const float *bias; /* `[N]`, or NULL */
} Weight;

/* The slots of a request for the layers with one window: keys and values `[layers, K, room, E]`, from the slot `first`
 * on; whole numbers of 8 bits if there are scales `[layers, K, room]`. */
typedef struct {
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t layers, first, room;
} Slots;

typedef struct {
    const float *attention_norm, *mlp_norm; /* `[D]` */
    const float *q_norm, *k_norm; /* `[E]`, or NULL */
    Weight qkv, o, gate_up, down;
    int64_t window, rotates; /* positions that a row sees, 0 for all; whether queries and keys are rotated */
    int64_t slots, layer_in_slots; /* the index of its Slots, and this layer's index in them */
    const float *after_attention, *after_mlp; /* `[D]`: norms of what a block adds, or NULL */
    int64_t local; /* whether the segment's local tables rotate queries and keys */
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, rotated, intermediate, layers;
    float eps, scale; /* of norms; of attention scores */
    const Layer *layer;
    const float *norm; /* `[D]` of the model's last norm, or NULL */
    Pool *pool;
    int64_t gelu; /* whether the gate's activation is GELU by tanh, not SiLU */
    float residual, score_cap; /* the factor of what a block adds; the soft cap of scores, or 0 */
} Model;

/* The rows of one request, which were admitted to its cache: `sees` `[rows, stride]` says for each row which of the
 * `tail` slots behind the `settled` ones it sees. The rows' own slots are the last ones. */
typedef struct {
    int64_t rows, settled, tail, stride;
    const uint8_t *sees;
    const Slots *slots; /* `[windows]` */
    int64_t windows; /* the number of different windows of the layers */
} Request;

typedef struct {
    int64_t rows, requests;
    float *x; /* `[T, D]`: the input, then the output */
    const float *cos, *sin; /* `[T, R]`; the sines of the first half are negative */
    const Request *request;
    float *const *inputs; /* of each layer, and behind the last one: where to copy the rows; NULL for nowhere */
    int32_t (*still_needed)(void); /* asked before each layer */
    const float *local_cos, *local_sin; /* as cos and sin, for layers with local positions; NULL if there are none */
} Segment;

enum Result { DONE, GIVEN_UP, NO_MEMORY, WRONG };

/* A row, quantized for products of whole numbers: G groups of inputs, each with a scale, and the sums of its halves. */
typedef struct {
    number8 *numbers8;
    number4 *numbers4; /* instead of numbers8, for codes of 4 bits */
    float *scales;
    int32_t *sums;
} Quantized;

#define AT_ONCE 8 /* rows of a chunk, at most */

/* Rows of one request, for which one item of the attention computes a key/value head. */
typedef struct {
    const Request *request;
    int64_t row, rows; /* the first one, in the segment, and how many */
    int64_t slot; /* of the first one; the others follow */
} Chunk;

/* One segment under way. Each row has its part of these arrays. */
typedef struct {
    const Model *model;
    const Segment *segment;
    const Layer *layer;
    const Weight *weight; /* of the product under way */
    const float *in; /* `[T, in_stride]`: the rows of the product under way */
    float *out; /* `[T, N]`: where the sums of the product under way are written, or added */
    int64_t in_stride, items;
    bool adds;
    float *normed, *qkv, *attended, *gate_up, *gated;
    float *added; /* `[T, D]`: what attention or feed-forward adds to the rows */
    const float *after; /* `[D]`: the norm of what is added, or NULL */
    number8 *numbers8;
    number4 *numbers4;
    float *scales;
    int32_t *sums;
    int64_t wide, groups; /* inputs and groups of the widest weight */
    int32_t *seen, *seen_count; /* of each row: the slots of the tail that it sees, `[tail]`, and how many */
    int64_t tail, longest; /* the longest tail, and the most slots of a request, in whole eights */
    Chunk *chunk;
    int64_t chunks;
    float *scores; /* of each thread: `[AT_ONCE, H / K, longest]` */
} Run;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Write the RMS norm of x `[size]`, times the weight `[size]`; `to` may be x. */
static void norm(const float *x, const float *weight, int64_t size, float eps, float *to) {
    f8 squares = all8(0);
    int64_t whole = size / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8) squares += load8(x + i) * load8(x + i);
    f8 rest = load_rest8(x + whole, size - whole);
    squares += rest * rest;
    float factor = 1.0f / sqrtf(sum8(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i++) to[i] = weight[i] * (x[i] * factor);
}

/* Rotate a head x `[E]` by its position, given its cosines and sines `[size]`. */
static void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[half + i];
        x[i] = low * cos[i] + high * sin[i];
        x[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

/* GELU by tanh: x * (1 + tanh(y)) / 2 is x / (1 + exp(-2 * y)). */
INLINE f8 gelu8(f8 x) {
    f8 inner = x * 0.797884561f * (x * x * 0.044715f + 1.0f);
    return x / (exp8(inner * -2.0f) + 1.0f);
}

/* Write SiLU(gate) * up, or GELU(gate) * up; all are `[size]`. */
static void gate(const float *gate, const float *up, int64_t size, bool gelu, float *to) {
    for (int64_t i = 0; i < size; i += 8) {
        int64_t count = least(8, size - i);
        f8 g = count == 8 ? load8(gate + i) : load_rest8(gate + i, count);
        f8 u = count == 8 ? load8(up + i) : load_rest8(up + i, count);
        f8 made = (gelu ? gelu8(g) : g / (exp8(-g) + 1.0f)) * u;
        for (int64_t lane = 0; lane < count; lane++) to[i + lane] = made[lane];
    }
}

/* Return the largest magnitude of x `[size]`; NaN if there is one, as its bits are above those of all numbers. */
static float magnitude(const float *x, int64_t size) {
    i8 largest = {0};
    for (int64_t i = 0; i < size; i += 8) {
        f8 part = size - i < 8 ? load_rest8(x + i, size - i) : load8(x + i);
        i8 bits = to_bits8(part) & 0x7fffffff, above = bits > largest;
        largest = (above & bits) | (~above & largest);
    }
    int32_t bits = 0;
    for (int lane = 0; lane < 8; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Return x rounded to a whole number, half to even; x is below 2^22 in magnitude. */
INLINE int32_t rounded(float x) {
    float shifted = x + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000;
}

/* Quantize x `[size]` by groups to numbers of 8 bits: number * scale. Inputs behind the last one are 0. */
static void quantize(const float *x, int64_t size, const Quantized *to) {
    for (int64_t group = 0; group < parts_of(size, GROUP); group++) {
        const float *in = x + group * GROUP;
        int64_t count = least(GROUP, size - group * GROUP), at = group * GROUP;
        float largest = magnitude(in, count);
        float inverse = largest == 0 ? 0 : 127 / largest;
        int32_t sums[2] = {0};
        for (int64_t i = 0; i < GROUP; i++) {
            int32_t number = i < count ? rounded(in[i] * inverse) : 0;
            sums[i / HALF] += (int8_t)number;
            if (to->numbers4) to->numbers4[at + i] = (int8_t)number;
            else to->numbers8[at + i] = (int8_t)number;
        }
        to->scales[group] = largest / 127;
        memcpy(to->sums + 2 * group, sums, sizeof sums);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

#define AHEAD 512 /* numbers of a weight in float32 that are fetched ahead, since a row's sums keep the processor busy */
#define UNROLL _Pragma("GCC unroll 16")
#define PART(i) UNROLL for (int i = 0; i < PARTS; i++)
#define ROW(r) UNROLL for (int r = 0; r < rows; r++)

/* Products of `rows` rows from `t` on with a block of sixteen outputs, in each form. `rows` is a constant where these
 * are inlined, so that the sums stay in registers. */

INLINE void float_block(const Run *run, int64_t block, int64_t t, int rows, bool half, fw total[ROWS][PARTS]) {
    const Weight *w = run->weight;
    const float *x = run->in + t * run->in_stride;
    const float *whole = (const float *)w->numbers + block * w->inputs * BLOCK;
    const uint16_t *halves = (const uint16_t *)w->numbers + block * w->inputs * BLOCK;
    for (int64_t input = 0; input < w->inputs; input++) {
        __builtin_prefetch(half ? (const void *)(halves + (input + 2 * AHEAD / BLOCK) * BLOCK)
                                : (const void *)(whole + (input + AHEAD / BLOCK) * BLOCK));
        fw weight[PARTS];
        PART(i) {
            int64_t at = input * BLOCK + i * WIDTH;
            weight[i] = half ? load_halves(halves + at) : load_floats(whole + at);
        }
        ROW(r) PART(i) total[r][i] += weight[i] * x[r * run->in_stride + input];
    }
}

/* Return the sum of the numbers of a group of a row; `at` counts the groups of all rows. */
INLINE int32_t group_sum(const Run *run, int64_t at) { return run->sums[2 * at] + run->sums[2 * at + 1]; }

/* Add the products of `units` units of 8-bit weights `w` with those of the rows from `x` on. */
INLINE void add_units8(const Run *run, const uint8_t *w, const number8 *x, int units, int rows, iw sum[ROWS][PARTS]) {
    for (int unit = 0; unit < units; unit++, w += BLOCK * UNIT8) {
        weights part[PARTS];
        __builtin_prefetch(w + 4 * AHEAD);
        PART(i) part[i] = load_weights8(w + i * WIDTH * UNIT8);
        ROW(r) PART(i) sum[r][i] = dot8(sum[r][i], part[i], x + r * run->wide + unit * UNIT8);
    }
}

INLINE void int8_block(const Run *run, int64_t block, int64_t t, int rows, fw total[ROWS][PARTS]) {
    int64_t groups = parts_of(run->weight->inputs, GROUP);
    const uint8_t *w = (const uint8_t *)run->weight->numbers + block * groups * GROUP * BLOCK;
    const number8 *x = run->numbers8 + t * run->wide;
    for (int64_t group = 0; group < groups; group++, w += GROUP * BLOCK) {
        iw sum[ROWS][PARTS] = {0};
        add_units8(run, w, x + group * GROUP, GROUP / UNIT8, rows, sum);
        ROW(r) {
            int64_t at = (t + r) * run->groups + group;
            PART(i) total[r][i] += to_floats(sum[r][i] - OFFSET8 * group_sum(run, at)) * run->scales[at];
        }
    }
    const float *scales = (const float *)run->weight->scales + block * BLOCK;
    ROW(r) PART(i) total[r][i] *= load_floats(scales + i * WIDTH);
}

/* GROUPS8, or HALVES8 if `halved`. */
INLINE void grouped8_block(const Run *run, int64_t block, int64_t t, int rows, bool halved, fw total[ROWS][PARTS]) {
    int64_t groups = parts_of(run->weight->inputs, GROUP);
    const int spans = halved ? 2 : 1, span = GROUP / spans, floats = halved ? 3 : 1;
    const uint8_t *w = (const uint8_t *)run->weight->numbers + block * groups * GROUP * BLOCK;
    const float *scales = (const float *)run->weight->scales + block * groups * floats * BLOCK;
    for (int64_t group = 0; group < groups; group++, scales += floats * BLOCK) {
        const number8 *x = run->numbers8 + t * run->wide + group * GROUP;
        fw steps[ROWS][PARTS] = {0};
        for (int half = 0; half < spans; half++, w += span * BLOCK, x += span) {
            iw sum[ROWS][PARTS] = {0};
            add_units8(run, w, x, span / UNIT8, rows, sum);
            ROW(r) {
                int64_t at = (t + r) * run->groups + group;
                int32_t numbers = halved ? run->sums[2 * at + half] : group_sum(run, at);
                PART(i) steps[r][i] += to_floats(sum[r][i] - OFFSET8 * numbers)
                                       * load_floats(scales + half * BLOCK + i * WIDTH);
            }
        }
        ROW(r) {
            int64_t at = (t + r) * run->groups + group;
            if (halved) PART(i) steps[r][i] += load_floats(scales + 2 * BLOCK + i * WIDTH) * (float)group_sum(run, at);
            PART(i) total[r][i] += steps[r][i] * run->scales[at];
        }
    }
}

/* INT4, or GROUPS4 if the codes begin at 0 and have scales in float32. */
INLINE void codes4_block(const Run *run, int64_t block, int64_t t, int rows, bool from_0, fw total[ROWS][PARTS]) {
    int64_t groups = parts_of(run->weight->inputs, GROUP);
    const int half = GROUP / UNIT4 / 2;
    const uint8_t *w = (const uint8_t *)run->weight->numbers + block * groups * BLOCK * GROUP / 2;
    const float *whole = (const float *)run->weight->scales + block * groups * 2 * BLOCK;
    const uint16_t *halves = (const uint16_t *)run->weight->scales + block * groups * 2 * BLOCK;
    for (int64_t group = 0; group < groups; group++, whole += 2 * BLOCK, halves += 2 * BLOCK) {
        const number4 *x = run->numbers4 + t * run->wide + group * GROUP;
        sum4 sum[ROWS][PARTS] = {0};
        for (int unit = 0; unit < half; unit++, w += BLOCK * UNIT4) {
            __builtin_prefetch(w + 4 * AHEAD);
            PART(i) {
                weights low = low_codes(w + i * WIDTH * UNIT4), high = high_codes(w + i * WIDTH * UNIT4);
                ROW(r) {
                    sum[r][i] = dot4(sum[r][i], low, x + r * run->wide + unit * UNIT4);
                    sum[r][i] = dot4(sum[r][i], high, x + r * run->wide + (half + unit) * UNIT4);
                }
            }
        }
        PART(i) {
            int64_t first = i * WIDTH, second = BLOCK + i * WIDTH;
            fw scale = from_0 ? load_floats(whole + first) : load_halves(halves + first);
            fw offset = from_0 ? load_floats(whole + second) : load_halves(halves + second);
            ROW(r) {
                int64_t at = (t + r) * run->groups + group;
                int32_t numbers = group_sum(run, at);
                fw steps = to_floats(closed4(sum[r][i]) - (from_0 ? 0 : 8 * numbers)) * scale;
                total[r][i] += (steps + offset * (float)numbers) * run->scales[at];
            }
        }
    }
}

/* Compute `rows` rows of a block, and write them with the bias, or add them. */
INLINE void block_rows(const Run *run, int64_t block, int64_t t, int rows) {
    const Weight *w = run->weight;
    fw total[ROWS][PARTS] = {0};
    if (w->form == FLOAT32) float_block(run, block, t, rows, false, total);
    if (w->form == BFLOAT16) float_block(run, block, t, rows, true, total);
    if (w->form == INT8) int8_block(run, block, t, rows, total);
    if (w->form == INT4) codes4_block(run, block, t, rows, false, total);
    if (w->form == GROUPS4) codes4_block(run, block, t, rows, true, total);
    if (w->form == GROUPS8) grouped8_block(run, block, t, rows, false, total);
    if (w->form == HALVES8) grouped8_block(run, block, t, rows, true, total);

    int64_t first = block * BLOCK, count = least(BLOCK, w->outputs - first);
    ROW(r) {
        float made[BLOCK], *to = run->out + (t + r) * w->outputs + first;
        PART(i) store_floats(made + i * WIDTH, total[r][i]);
        if (w->bias) for (int64_t i = 0; i < count; i++) made[i] += w->bias[first + i];
        for (int64_t i = 0; i < count; i++) to[i] = run->adds ? to[i] + made[i] : made[i];
    }
}

/* Compute all rows for one of the `items` shares of a weight's blocks. */
static void product_item(void *job, int64_t item, int64_t thread) {
    (void)thread;
    const Run *run = job;
    int64_t blocks = parts_of(run->weight->outputs, BLOCK);
    int64_t last = (item + 1) * blocks / run->items;
    for (int64_t block = item * blocks / run->items; block < last; block++) {
        int64_t t = 0;
        for (; t + ROWS <= run->segment->rows; t += ROWS) block_rows(run, block, t, ROWS);
        switch (run->segment->rows - t) {
#if ROWS > 4
        case 7: block_rows(run, block, t, 7); break;
        case 6: block_rows(run, block, t, 6); break;
        case 5: block_rows(run, block, t, 5); break;
        case 4: block_rows(run, block, t, 4); break;
#endif
#if ROWS > 2
        case 3: block_rows(run, block, t, 3); break;
        case 2: block_rows(run, block, t, 2); break;
#endif
        case 1: block_rows(run, block, t, 1); break;
        }
    }
}

static bool is_quantized(const Weight *w) { return w->form >= INT8; }
static bool has_4_bits(const Weight *w) { return w->form == INT4 || w->form == GROUPS4; }

/* Quantize a row for the product that comes next. */
static void quantize_row(const Run *run, int64_t t, const Weight *w, const float *x) {
    if (!is_quantized(w)) return;
    bool four = has_4_bits(w);
    Quantized to = {four ? NULL : run->numbers8 + t * run->wide, four ? run->numbers4 + t * run->wide : NULL,
                    run->scales + t * run->groups, run->sums + 2 * t * run->groups};
    quantize(x, w->inputs, &to);
}

static void before_product(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    (void)thread;
    quantize_row(run, t, run->weight, run->in + t * run->in_stride);
}

/* Multiply the rows `in` `[T, I]` (or the quantized ones) with a weight; write the results to `out`, or add them. */
static void product(Run *run, const Weight *w, const float *in, float *out, bool adds) {
    run->weight = w;
    run->in = in;
    run->in_stride = w->inputs;
    run->out = out;
    run->adds = adds;
    run->items = least(parts_of(w->outputs, BLOCK), 4 * pool_size(run->model->pool));
    pool_run(run->model->pool, product_item, run, run->items);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Write a row's keys or values of one head `[E]` to its slot; in 8 bits with a scale. */
static void write_slot(const float *x, int64_t size, void *to, float *scales, int64_t at) {
    if (!scales) {
        memcpy((float *)to + at * size, x, (size_t)size * sizeof *x);
        return;
    }
    float scale = magnitude(x, size);
    scale = (scale < 1e-20f ? 1e-20f : scale) / 127;
    scales[at] = scale;
    for (int64_t i = 0; i < size; i++) ((int8_t *)to)[at * size + i] = (int8_t)rounded(x[i] / scale);
}

/* The keys or values of one head. */
typedef struct {
    const void *numbers; /* `[room, E]` */
    const float *scales; /* `[room]`, or NULL */
} Held;

INLINE f8 load_held(Held held, int64_t at, bool small) {
    return small ? load_codes8((const int8_t *)held.numbers + at) : load8((const float *)held.numbers + at);
}

/* Write the scores of a query `[E]` for eight slots, with the model's factor and soft cap. */
INLINE void scores_of(const float *q, const Model *m, Held keys, const int64_t slot[8], bool small, float *scores) {
    int64_t size = m->head_dim;
    f8 sum[8] = {0};
    for (int64_t i = 0; i < size; i += 8) {
        f8 part = load8(q + i);
        UNROLL for (int j = 0; j < 8; j++) sum[j] += part * load_held(keys, slot[j] * size + i, small);
    }
    f8 made = sums8(sum) * m->scale;
    if (small) for (int j = 0; j < 8; j++) made[j] *= keys.scales[slot[j]];
    if (m->score_cap != 0) made = tanh8(made / m->score_cap) * m->score_cap;
    store8(scores, made);
}

/* Turn scores `[first, count)` into weights that add up to 1; scores before `first`, in its eight lanes, become 0. */
static void softmax(float *scores, int64_t first, int64_t count) {
    int64_t begin = first / 8 * 8;
    for (int64_t j = begin; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = count; j % 8; j++) scores[j] = -INFINITY;
    f8 top = load8(scores + begin);
    for (int64_t j = begin; j < count; j += 8) top = max8(load8(scores + j), top);
    float largest = top[0];
    for (int lane = 1; lane < 8; lane++) largest = top[lane] > largest ? top[lane] : largest;

    f8 sum = all8(0);
    for (int64_t j = begin; j < count; j += 8) {
        f8 score = load8(scores + j);
        f8 weight = pick8(score == all8(-INFINITY), all8(0), exp8(score - largest));
        store8(scores + j, weight);
        sum += weight;
    }
    float inverse = 1 / sum8(sum);
    for (int64_t j = begin; j < count; j += 8) store8(scores + j, load8(scores + j) * inverse);
}

/* Add the weighted values of `count` consecutive slots of a path to `out` `[E]`, in the order of the path. */
INLINE void add_values(const float *weights, Held values, const int64_t *slot, int64_t count, int64_t size, bool small,
                       float *out) {
    for (int64_t i = 0; i < size; i += 64) {
        f8 sum[8];
        int parts = (int)least(8, (size - i) / 8);
        for (int part = 0; part < parts; part++) sum[part] = load8(out + i + 8 * part);
        for (int64_t j = 0; j < count; j++) {
            float weight = small ? weights[j] * values.scales[slot[j]] : weights[j];
            int64_t at = slot[j] * size + i;
            if (parts == 8) {
                UNROLL for (int part = 0; part < 8; part++)
                    sum[part] += weight * load_held(values, at + 8 * part, small);
            } else {
                for (int part = 0; part < parts; part++) sum[part] += weight * load_held(values, at + 8 * part, small);
            }
        }
        for (int part = 0; part < parts; part++) store8(out + i + 8 * part, sum[part]);
    }
}

/* One key/value head of a chunk. */
typedef struct {
    const Run *run;
    const Chunk *chunk;
    Held keys, values;
    int64_t head, first; /* the first slot that the cache holds */
    float *scores; /* `[AT_ONCE, H / K, longest]` */
} Task;

/* Return the number of slots that a row of a chunk sees: the indices in its path are the numbers from 0 below it. */
INLINE int64_t path_length(const Task *task, int64_t r) {
    return task->chunk->request->settled + task->run->seen_count[task->chunk->row + r];
}

/* Return the first index of a path of `count` slots that is in the window of its row. */
INLINE int64_t window_start(const Task *task, int64_t count) {
    int64_t window = task->run->layer->window;
    return window ? most(0, count - window) : 0;
}

/* Write the slots of eight indices of a row's path, from j on; behind its end, the last one again. */
INLINE void slots_of(const Task *task, int64_t r, int64_t j, int64_t slot[8]) {
    int64_t settled = task->chunk->request->settled, last = path_length(task, r) - 1;
    const int32_t *seen = task->run->seen + (task->chunk->row + r) * task->run->tail;
    for (int64_t i = 0; i < 8; i++) {
        int64_t path_index = least(j + i, last);
        int64_t at = path_index < settled ? path_index : settled + seen[path_index - settled];
        slot[i] = most(at - task->first, 0); /* a dropped slot is outside of the window */
    }
}

INLINE float *scores_at(const Task *task, int64_t r, int64_t g) {
    const Model *m = task->run->model;
    return task->scores + (r * (m->heads / m->kv_heads) + g) * task->run->longest;
}

/* Write the scores of row r of a chunk for eight numbers of its path, from j on. */
INLINE void score_row(const Task *task, int64_t r, int64_t j, bool small) {
    const Run *run = task->run;
    const Model *m = run->model;
    int64_t group = m->heads / m->kv_heads, slot[8];
    const float *q = run->qkv + (task->chunk->row + r) * run->layer->qkv.outputs + task->head * group * m->head_dim;
    slots_of(task, r, j, slot);
    for (int64_t g = 0; g < group; g++)
        scores_of(q + g * m->head_dim, m, task->keys, slot, small, scores_at(task, r, g) + j);
}

/* Add the weighted values of the numbers `[j, last)` of the path of row r, at most eight, to its output. */
INLINE void value_row(const Task *task, int64_t r, int64_t j, int64_t last, bool small) {
    const Run *run = task->run;
    const Model *m = run->model;
    int64_t group = m->heads / m->kv_heads, slot[8];
    float *out = run->attended + ((task->chunk->row + r) * m->heads + task->head * group) * m->head_dim;
    slots_of(task, r, j, slot);
    for (int64_t g = 0; g < group; g++)
        add_values(scores_at(task, r, g) + j, task->values, slot, last - j, m->head_dim, small, out + g * m->head_dim);
}

/* Compute the attention of a task. Eight numbers of the paths are computed for all rows, since their slots are mostly
 * the same. */
INLINE void attend(const Task *task, bool small) {
    const Model *m = task->run->model;
    int64_t group = m->heads / m->kv_heads, rows = task->chunk->rows, longest = 0;
    for (int64_t r = 0; r < rows; r++) longest = most(longest, path_length(task, r));

    for (int64_t j = 0; j < longest; j += 8) {
        for (int64_t r = 0; r < rows; r++) {
            int64_t count = path_length(task, r);
            if (j < count && j + 8 > window_start(task, count)) score_row(task, r, j, small);
        }
    }

    for (int64_t r = 0; r < rows; r++) {
        int64_t count = path_length(task, r);
        for (int64_t g = 0; g < group; g++) softmax(scores_at(task, r, g), window_start(task, count), count);
        float *out = task->run->attended + ((task->chunk->row + r) * m->heads + task->head * group) * m->head_dim;
        memset(out, 0, (size_t)(group * m->head_dim) * sizeof *out);
    }

    for (int64_t j = 0; j < longest; j += 8) {
        for (int64_t r = 0; r < rows; r++) {
            int64_t count = path_length(task, r);
            int64_t from = most(j, window_start(task, count)), last = least(j + 8, count);
            if (from < last) value_row(task, r, from, last, small);
        }
    }
}

static Held head_of(const Layer *l, const Slots *slots, void *numbers, float *scales, const Model *m, int64_t head) {
    int64_t at = (l->layer_in_slots * m->kv_heads + head) * slots->room;
    char *begin = (char *)numbers + at * m->head_dim * (int64_t)(scales ? 1 : sizeof(float));
    return (Held){begin, scales ? scales + at : NULL};
}

/* Compute one key/value head of a chunk. */
static void attention_item(void *job, int64_t item, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    const Layer *l = run->layer;
    int64_t head = item % m->kv_heads;
    const Chunk *chunk = &run->chunk[item / m->kv_heads];
    const Slots *slots = &chunk->request->slots[l->slots];
    float *scores = run->scores + thread * AT_ONCE * (m->heads / m->kv_heads) * run->longest;
    Held keys = head_of(l, slots, slots->keys, slots->key_scales, m, head);
    Held values = head_of(l, slots, slots->values, slots->value_scales, m, head);
    Task task = {run, chunk, keys, values, head, slots->first, scores};
    if (slots->key_scales) attend(&task, true);
    else attend(&task, false);
}

/* --- the steps of a layer, between two products ------------------------------------------------------------------- */

static void before_qkv(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *normed = run->normed + t * m->hidden;
    (void)thread;
    norm(run->segment->x + t * m->hidden, run->layer->attention_norm, m->hidden, m->eps, normed);
    quantize_row(run, t, &run->layer->qkv, normed);
}

/* Norm and rotate the queries and keys of a chunk, and write its keys and values to their slots. */
static void into_cache(void *job, int64_t item, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    const Layer *l = run->layer;
    const Chunk *chunk = &run->chunk[item];
    const Slots *slots = &chunk->request->slots[l->slots];
    (void)thread;
    for (int64_t t = chunk->row; t < chunk->row + chunk->rows; t++) {
        const float *cos = (l->local ? run->segment->local_cos : run->segment->cos) + t * m->rotated;
        const float *sin = (l->local ? run->segment->local_sin : run->segment->sin) + t * m->rotated;
        float *row = run->qkv + t * l->qkv.outputs;
        int64_t slot = chunk->slot + t - chunk->row - slots->first;
        for (int64_t head = 0; head < m->heads + m->kv_heads; head++) {
            float *x = row + head * m->head_dim;
            const float *weight = head < m->heads ? l->q_norm : l->k_norm;
            if (weight) norm(x, weight, m->head_dim, m->eps, x);
            if (l->rotates) rotate(x, cos, sin, m->rotated);
        }
        for (int64_t head = 0; head < m->kv_heads; head++) {
            const float *key = row + (m->heads + head) * m->head_dim, *value = key + m->kv_heads * m->head_dim;
            int64_t at = (l->layer_in_slots * m->kv_heads + head) * slots->room + slot;
            write_slot(key, m->head_dim, slots->keys, slots->key_scales, at);
            write_slot(value, m->head_dim, slots->values, slots->value_scales, at);
        }
    }
}

static void before_o(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    (void)thread;
    quantize_row(run, t, &run->layer->o, run->attended + t * run->layer->o.inputs);
}

static void before_gate_up(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *normed = run->normed + t * m->hidden;
    (void)thread;
    norm(run->segment->x + t * m->hidden, run->layer->mlp_norm, m->hidden, m->eps, normed);
    quantize_row(run, t, &run->layer->gate_up, normed);
}

static void before_down(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    int64_t size = run->model->intermediate;
    const float *both = run->gate_up + t * 2 * size;
    float *gated = run->gated + t * size;
    (void)thread;
    gate(both, both + size, size, run->model->gelu, gated);
    quantize_row(run, t, &run->layer->down, gated);
}

static void last_norm(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    float *x = run->segment->x + t * run->model->hidden;
    (void)thread;
    norm(x, run->model->norm, run->model->hidden, run->model->eps, x);
}

/* Add to a row what a block adds, normed and scaled. */
static void add_block(void *job, int64_t t, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *x = run->segment->x + t * m->hidden, *added = run->added + t * m->hidden;
    (void)thread;
    if (run->after) norm(added, run->after, m->hidden, m->eps, added);
    for (int64_t i = 0; i < m->hidden; i++) x[i] += added[i] * m->residual;
}

/* Compute the last product of a block, and add it to the rows; `after` is the norm of what is added, or NULL. */
static void last_product(Run *run, const Weight *w, const float *in, const float *after) {
    if (!after && run->model->residual == 1) {
        product(run, w, in, run->segment->x, true);
        return;
    }
    product(run, w, in, run->added, false);
    run->after = after;
    pool_run(run->model->pool, add_block, run, run->segment->rows);
}

/* Compute one layer: x += o(attention(norm(x))), then x += down(gated(gate_up(norm(x)))). */
static void layer(Run *run, const Layer *l) {
    Pool *pool = run->model->pool;
    int64_t rows = run->segment->rows;
    run->layer = l;

    pool_run(pool, before_qkv, run, rows);
    product(run, &l->qkv, run->normed, run->qkv, false);
    pool_run(pool, into_cache, run, run->chunks);
    pool_run(pool, attention_item, run, run->chunks * run->model->kv_heads);
    if (is_quantized(&l->o)) pool_run(pool, before_o, run, rows);
    last_product(run, &l->o, run->attended, l->after_attention);

    pool_run(pool, before_gate_up, run, rows);
    product(run, &l->gate_up, run->normed, run->gate_up, false);
    pool_run(pool, before_down, run, rows);
    last_product(run, &l->down, run->gated, l->after_mlp);
}

/* --- a segment ---------------------------------------------------------------------------------------------------- */

/* A slice with its threads and its memory, which is kept from segment to segment. */
typedef struct {
    Model model;
    char *memory;
    int64_t size;
} Slice;

/* Return whether the sizes of a request fit the memory of its cache and the rows of the segment. */
static bool is_sound(const Model *m, const Request *request) {
    if (request->rows < 1 || request->tail < request->rows || request->stride < request->tail) return false;
    if (request->settled < 0 || request->settled > INT32_MAX || request->tail > INT32_MAX) return false;
    int64_t end = request->settled + request->tail;
    for (int64_t i = 0; i < m->layers; i++) {
        if (m->layer[i].slots >= request->windows) return false;
        const Slots *slots = &request->slots[m->layer[i].slots];
        if (m->layer[i].layer_in_slots >= slots->layers) return false;
        if (slots->first < 0 || slots->first > end - request->rows || end - slots->first > slots->room) return false;
    }
    return true;
}

/* Give the arrays of a run their places behind `memory`; return the bytes that they need. */
static int64_t lay_out(Run *run, char *memory) {
    const Model *m = run->model;
    int64_t rows = run->segment->rows, at = 0;
    int64_t group = m->heads / m->kv_heads;
#define TAKE(array, count) \
    do { \
        run->array = memory ? (void *)(memory + at) : NULL; \
        at += parts_of((int64_t)sizeof *run->array * (count), 64) * 64; \
    } while (0)
    TAKE(normed, rows * m->hidden);
    TAKE(qkv, rows * (m->heads + 2 * m->kv_heads) * m->head_dim);
    TAKE(attended, rows * m->heads * m->head_dim);
    TAKE(gate_up, rows * 2 * m->intermediate);
    TAKE(gated, rows * m->intermediate);
    TAKE(added, rows * m->hidden);
    TAKE(numbers8, rows * run->wide);
    TAKE(numbers4, rows * run->wide);
    TAKE(scales, rows * run->groups);
    TAKE(sums, 2 * rows * run->groups);
    TAKE(seen, rows * run->tail);
    TAKE(seen_count, rows);
    TAKE(chunk, rows);
    TAKE(scores, pool_size(m->pool) * AT_ONCE * group * run->longest);
#undef TAKE
    return at;
}

/* Measure what a run needs, whose widest weight has `widest` inputs. */
static void measure(Run *run, int64_t widest) {
    run->groups = parts_of(widest, GROUP);
    run->wide = run->groups * GROUP;
    for (int64_t i = 0; i < run->segment->requests; i++) {
        const Request *request = &run->segment->request[i];
        run->tail = most(run->tail, request->tail);
        run->longest = most(run->longest, parts_of(request->settled + request->tail, 8) * 8);
    }
}

/* List the chunks, and the slots of the tail that each row sees; return whether each row sees its own slot. */
static bool list_rows(Run *run) {
    int64_t t = 0;
    for (int64_t i = 0; i < run->segment->requests; i++) {
        const Request *request = &run->segment->request[i];
        int64_t own = request->tail - request->rows;
        for (int64_t row = 0; row < request->rows; row++, t++, own++) {
            const uint8_t *sees = request->sees + row * request->stride;
            int32_t *seen = run->seen + t * run->tail, count = 0;
            for (int64_t slot = 0; slot < request->tail; slot++)
                if (sees[slot]) seen[count++] = (int32_t)slot;
            run->seen_count[t] = count;
            if (!sees[own]) return false;
            if (row % AT_ONCE == 0) {
                int64_t rows = least(AT_ONCE, request->rows - row);
                run->chunk[run->chunks++] = (Chunk){request, t, rows, request->settled + own};
            }
        }
    }
    return true;
}

/* Copy the rows, if they are wanted at this place: before a layer, or behind the last one. */
static void copy_out(const Run *run, int64_t place) {
    float *const *inputs = run->segment->inputs;
    size_t bytes = (size_t)(run->segment->rows * run->model->hidden) * sizeof(float);
    if (inputs && inputs[place]) memcpy(inputs[place], run->segment->x, bytes);
}

/* Give a run its memory, which grows as needed; return whether there is enough. */
static bool reserve(Slice *slice, Run *run) {
    int64_t size = lay_out(run, NULL);
    if (size > slice->size) {
        free(slice->memory);
        slice->memory = aligned_alloc(64, (size_t)size);
        slice->size = slice->memory ? size : 0;
        if (!slice->memory) return false;
    }
    lay_out(run, slice->memory);
    return true;
}

/* --- what Python calls -------------------------------------------------------------------------------------------- */

/* Return how 8-bit and 4-bit weights are to be packed: UNIT8, OFFSET8, UNIT4. */
EXPORTED void slice_packing(int64_t to[3]) {
    to[0] = UNIT8;
    to[1] = OFFSET8;
    to[2] = UNIT4;
}

/* Return a slice that computes with `threads` threads; NULL without memory. The memory behind `model` must stay. */
EXPORTED Slice *slice_new(const Model *model, int64_t threads) {
    Slice *slice = calloc(1, sizeof *slice);
    if (!slice) return NULL;
    slice->model = *model;
    slice->model.pool = pool_new(threads);
    if (slice->model.pool) return slice;
    free(slice);
    return NULL;
}

EXPORTED void slice_free(Slice *slice) {
    pool_free(slice->model.pool);
    free(slice->memory);
    free(slice);
}

/* Compute a segment: `x` becomes its output. Return a Result; GIVEN_UP if it was no longer needed. */
EXPORTED int32_t slice_run(Slice *slice, const Segment *segment) {
    Run run = {.model = &slice->model, .segment = segment};
    int64_t rows = 0;
    for (int64_t i = 0; i < segment->requests; i++) {
        if (!is_sound(run.model, &segment->request[i])) return WRONG;
        rows += segment->request[i].rows;
    }
    if (rows < 1 || rows != segment->rows) return WRONG;
    for (int64_t i = 0; i < slice->model.layers; i++)
        if (slice->model.layer[i].local && !(segment->local_cos && segment->local_sin)) return WRONG;

    const Model *m = run.model;
    measure(&run, most(m->hidden, most(m->intermediate, m->heads * m->head_dim)));
    if (!reserve(slice, &run)) return NO_MEMORY;
    if (!list_rows(&run)) return WRONG;

    for (int64_t i = 0; i < slice->model.layers; i++) {
        if (segment->still_needed && !segment->still_needed()) return GIVEN_UP;
        copy_out(&run, i);
        layer(&run, &slice->model.layer[i]);
    }
    copy_out(&run, slice->model.layers);
    if (slice->model.norm) pool_run(slice->model.pool, last_norm, &run, rows);
    return DONE;
}

/* Multiply the rows `in` `[rows, I]` with a weight, with the threads and the memory of a slice of no layers; write the
 * results to `out` `[rows, N]`. Return a Result. */
EXPORTED int32_t slice_multiply(Slice *slice, const Weight *weight, const float *in, int64_t rows, float *out) {
    Segment segment = {.rows = rows};
    Run run = {.model = &slice->model, .segment = &segment, .weight = weight, .in = in, .in_stride = weight->inputs};
    measure(&run, weight->inputs);
    if (!reserve(slice, &run)) return NO_MEMORY;

    if (is_quantized(weight)) pool_run(slice->model.pool, before_product, &run, rows);
    product(&run, weight, in, out, false);
    return DONE;
}
