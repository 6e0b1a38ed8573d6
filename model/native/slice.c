/* The layers of a stage: one call computes a segment in all of them.
 *
 * A layer is RMS norms, rotary positions, attention with grouped heads over a tree cache, and a gated feed-forward by
 * SiLU or GELU. Scores may have a soft cap, and the output of a sublayer a norm and a factor. A row's bits depend on
 * its own path only: each sum has a fixed order (lanes.h), and attention adds the slots that the row sees in the order
 * of its path. So other rows, the number of threads and the processor change nothing.
 * `slice_run` first compares the indices and counts of a segment with the sizes of slots and layers (`is_sound`), since
 * they come over a wire. Pointers, and all sizes of `slice_multiply`, are those of the caller's own tensors.
 *
 * Words:
 *   row        one token of a segment, and its hidden state
 *   chunk      up to MAX_CHUNK_ROWS successive rows of one request
 *   slot       what a cache keeps of one token: a key and a value in each layer and key/value head
 *   tail       the slots behind the settled ones; each row sees its own choice of them
 *   path       the slots that a row sees, in the order of the text; a path index counts them from 0
 *   head       an attention head; H / K query heads (`num_query_heads`) share a key/value head
 *   sublayer   the attention or the feed-forward of a layer
 *   code       a whole number that stands for an element of a weight, row, key or value: times a scale, plus a
 *              minimum in some forms
 *   nibble     a code of 4 bits; two share a byte
 *   group      GROUP inputs of a weight or row that are summed in whole numbers; a subgroup is one half of them
 *   unit       UNIT inputs of an output, whose codes lie together (lanes.h)
 *   panel      PANEL outputs of a weight, which are packed together
 *   tile       up to TILE_ROWS rows times the outputs of a panel: what one pass over the inputs computes
 *
 * Shapes: T rows of a segment, D hidden size, H heads, K key/value heads, E head dimension, R rotated dimensions of a
 * head, N outputs and I inputs of a weight, G groups of inputs.
 */
#define _POSIX_C_SOURCE 200809L /* sigaction */
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "delta.h"
#include "lanes.h"
#include "pool.h"

#define EXPORTED __attribute__((visibility("default")))

#define MIN_CACHED_MAGNITUDE 1e-20f /* of a key or value in codes: its scale stays above 0 */
#define MAX_CHUNK_ROWS 8 /* of one item of the attention, which mostly see the same slots */
#define VALUE_LANES 64 /* elements of an attention output that are accumulated at once */
#define ITEMS_PER_THREAD 4 /* of a product: threads that are interrupted leave items to the others */
#define CACHE_LINE 64 /* bytes */
#define QUESTION_PRODUCTS (1 << 25) /* at least, between two questions whether a segment is needed: about 3 ms */
#define PREFETCH_BYTES 2048 /* of a weight that are fetched ahead, since a tile's rows keep the processor busy */

enum Form { FLOAT32, BFLOAT16, INT8, SUBGROUP_INT8, INT4 };

/* --- what Python passes: model/native/structures.py has the same fields ------------------------------------------- */

/* A weight `[N, I]` in panels of 16 outputs; outputs are padded to panels, and inputs to groups in all forms but the
 * first two.
 * FLOAT32, BFLOAT16: elements `[N / 16, I, 16]`.
 * The other forms are those of GGUF files, with floats for each group:
 * INT8: codes `[N / 16, I / UNIT, 16, UNIT]`, scales `[N / 16, G, 1, 16]`: a weight is code * scale.
 * SUBGROUP_INT8: codes as in INT8, the scales of both subgroups and a minimum `[N / 16, G, 3, 16]`: a weight is
 *   code * scale + minimum.
 * INT4: pairs of nibbles `[N / 16, G, SUBGROUP / UNIT, 16, UNIT]`: the low bits of a byte are the code of an input of a
 *   group's first subgroup, the high bits that of the second subgroup's input; scales and minimums
 *   `[N / 16, G, 2, 16]`: a weight is code * scale + minimum. */
typedef struct {
    int64_t form, num_outputs, num_inputs;
    const void *elements, *scales;
    const float *bias; /* `[N]`, or NULL */
} Weight;

/* The slots of a request for the layers with one window: keys and values `[num_layers, K, num_slots, E]`, from the slot
 * `first_slot` on: floats, or codes of 2 bytes or 1 with scales `[num_layers, K, num_slots]`. */
typedef struct {
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t num_layers, first_slot, num_slots, element_bytes;
} Slots;

typedef struct {
    const float *attention_norm, *mlp_norm; /* `[D]` */
    const float *q_norm, *k_norm; /* `[E]`, or NULL */
    Weight qkv, o, gate_up, down;
    int64_t window, rotates; /* slots of its path that a row sees, 0 for all; whether queries and keys are rotated */
    int64_t slots_index, layer_in_slots; /* the index of its Slots, and this layer's index in them */
    const float *after_attention_norm, *after_mlp_norm; /* `[D]`: norms of a sublayer's output, or NULL */
    int64_t is_local; /* whether the segment's local tables rotate queries and keys */
} Layer;

typedef struct {
    int64_t hidden_size, num_heads, num_kv_heads, head_dim, rotated_dim, intermediate_size, num_layers;
    float norm_eps, score_scale; /* of norms; of attention scores */
    const Layer *layers;
    const float *final_norm; /* `[D]`, or NULL if the model's last layer is elsewhere */
    Pool *pool;
    int64_t uses_gelu; /* whether the gate's activation is GELU by tanh, not SiLU */
    float residual_scale, score_cap; /* the factor of a sublayer's output; the soft cap of scores, or 0 */
} Model;

/* The rows of one request, which were admitted to its cache: `tail_mask` `[num_rows, mask_stride]` says for each row
 * which of the `num_tail` slots behind the `num_settled` ones it sees. The rows' own slots are the last ones. */
typedef struct {
    int64_t num_rows, num_settled, num_tail, mask_stride;
    const uint8_t *tail_mask;
    const Slots *slots; /* `[num_windows]` */
    int64_t num_windows; /* the number of different windows of the layers */
} Request;

typedef struct {
    int64_t num_rows, num_requests;
    float *x; /* `[T, D]`: the input, then the output */
    const float *cos, *sin; /* `[T, R]`; the sines of the first R / 2 are negative */
    const Request *requests;
    float *const *layer_inputs; /* where to copy the rows before each layer, and after the last; NULL for nowhere */
    int32_t (*still_needed)(void); /* asked before the first layer, and before one after QUESTION_PRODUCTS */
    const float *local_cos, *local_sin; /* as cos and sin, for layers with local positions; NULL if there are none */
} Segment;

enum Result { DONE, GIVEN_UP, NO_MEMORY, OUT_OF_BOUNDS };

/* --- a segment under way ------------------------------------------------------------------------------------------ */

typedef struct {
    const Request *request;
    int64_t first_row, num_rows; /* the first one's index in the segment */
    int64_t first_slot; /* that of the first row; the others follow */
} Chunk;

/* One segment under way. Each row has its part of these arrays. */
typedef struct {
    const Model *model;
    const Segment *segment;
    const Layer *layer;

    /* the product under way */
    const Weight *weight;
    const float *in; /* `[T, in_stride]` */
    float *out; /* `[T, N]`: where its results are written, or added */
    int64_t in_stride, num_items;
    bool adds_to_out;

    float *normed, *qkv, *attended, *gate_up, *gated;
    float *sublayer_output; /* `[T, D]` */
    const float *sublayer_norm; /* `[D]`: the norm of the sublayer's output, or NULL */

    /* the quantized rows: for each group, codes in units, a scale, and the sum of the codes, which is a whole number */
    int16_t *codes; /* `[T, max_groups, GROUP]` */
    float *scales, *code_sums; /* `[T, max_groups]` */
    int64_t max_groups; /* of the weight with the most inputs */

    /* attention */
    int32_t *visible_tail; /* `[T, max_tail]`: the slots of the tail that a row sees, as indices in the tail */
    int32_t *num_visible_tail; /* `[T]` */
    int64_t max_tail, max_slots; /* of all requests; slots are rounded up to a multiple of WIDE_LANES */
    Chunk *chunks;
    int64_t num_chunks;
    float *scores; /* of each thread: `[MAX_CHUNK_ROWS, H / K, max_slots]` */
    float *blocks; /* of each thread: `[E, LANES]` */
} Run;

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* --- vectors: the steps of one row -------------------------------------------------------------------------------- */

/* Write the RMS norm of x `[size]`, times the weight `[size]`; `to` may be x. Squares are added in eight lanes. */
static void norm(const float *x, const float *weight, int64_t size, float eps, float *to) {
    f32x8 squares = broadcast_x8(0);
    int64_t whole_size = size / LANES * LANES;
    for (int64_t i = 0; i < whole_size; i += LANES) squares += load_x8(x + i) * load_x8(x + i);
    f32x8 last = load_partial_x8(x + whole_size, size - whole_size);
    squares += last * last;

    float factor = 1.0f / sqrtf(lane_sum_x8(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i++) to[i] = weight[i] * (x[i] * factor);
}

/* Rotate the first `rotated_dim` dimensions of a head x `[E]` by its position, whose cosines and sines are `[R]`: each
 * dimension i < R / 2 is one coordinate of a pair, and i + R / 2 the other one. */
static void rotate(float *x, const float *cos, const float *sin, int64_t rotated_dim) {
    int64_t num_pairs = rotated_dim / 2;
    for (int64_t i = 0; i < num_pairs; i++) {
        float first = x[i], second = x[num_pairs + i];
        x[i] = first * cos[i] + second * sin[i];
        x[num_pairs + i] = second * cos[num_pairs + i] + first * sin[num_pairs + i];
    }
}

/* GELU by tanh: x * (1 + tanh(y)) / 2 is x / (1 + exp(-2 * y)), where y is sqrt(2 / pi) * (x + 0.044715 * x^3). */
INLINE f32_wide gelu_wide(f32_wide x) {
    f32_wide y = x * 0.797884561f * (x * x * 0.044715f + 1.0f);
    return x / (exp_wide(y * -2.0f) + 1.0f);
}

INLINE f32_wide silu_wide(f32_wide x) { return x / (exp_wide(-x) + 1.0f); }

/* Write SiLU(gate) * up, or GELU(gate) * up; all are `[size]`, in the memory of a run, which goes on behind them. */
static void activate(const float *gate, const float *up, int64_t size, bool uses_gelu, float *to) {
    for (int64_t i = 0; i < size; i += WIDE_LANES) {
        f32_wide gates = load_wide(gate + i);
        f32_wide outputs = (uses_gelu ? gelu_wide(gates) : silu_wide(gates)) * load_wide(up + i);
        for (int64_t lane = 0; lane < min_i64(WIDE_LANES, size - i); lane++) to[i + lane] = outputs[lane];
    }
}

/* Return the largest magnitude of x `[size]`; NaN if there is one, as its bits are above those of all numbers. */
static float max_magnitude(const float *x, int64_t size) {
    i32x8 max_bits_x8 = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        f32x8 part = size - i < LANES ? load_partial_x8(x + i, size - i) : load_x8(x + i);
        i32x8 bits = bits_of_x8(part) & 0x7fffffff, is_above = bits > max_bits_x8; /* without the sign */
        max_bits_x8 = (is_above & bits) | (~is_above & max_bits_x8);
    }

    int32_t max_bits = 0;
    for (int lane = 0; lane < LANES; lane++) max_bits = max_bits_x8[lane] > max_bits ? max_bits_x8[lane] : max_bits;
    float magnitude;
    memcpy(&magnitude, &max_bits, sizeof magnitude);
    return magnitude;
}

/* Return x rounded to a whole number, ties to even; x is below 2^22 in magnitude. */
INLINE int32_t round_to_int(float x) {
    const int32_t shift_bits = 0x4b400000; /* of ROUNDING_SHIFT */
    float shifted = x + ROUNDING_SHIFT;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return bits - shift_bits;
}

/* Return the index of a group of a row among those of all rows. */
INLINE int64_t index_of_group(const Run *run, int64_t row, int64_t group) { return row * run->max_groups + group; }

/* Return the codes of a group of a row. */
INLINE int16_t *codes_of(const Run *run, int64_t row, int64_t group) {
    return run->codes + index_of_group(run, row, group) * GROUP;
}

/* Quantize a row x `[I]` by groups: an element is code * scale. Codes behind the last input are 0. */
static void quantize(const Run *run, int64_t row, const float *x, int64_t num_inputs) {
    for (int64_t group = 0; group < ceil_div(num_inputs, GROUP); group++) {
        const float *in = x + group * GROUP;
        int64_t count = min_i64(GROUP, num_inputs - group * GROUP), at = index_of_group(run, row, group);
        float magnitude = max_magnitude(in, count);
        float inverse_scale = magnitude == 0 ? 0 : MAX_ROW_CODE / magnitude;

        int16_t codes[GROUP] = {0};
        int32_t sum = 0;
        for (int64_t i = 0; i < count; i++) {
            codes[i] = (int16_t)round_to_int(in[i] * inverse_scale);
            sum += codes[i];
        }

        for (int i = 0; i < GROUP; i += UNIT) store_unit(codes_of(run, row, group) + i, codes + i);
        run->scales[at] = magnitude / MAX_ROW_CODE;
        run->code_sums[at] = (float)sum;
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

#define UNROLL _Pragma("GCC unroll 16")
#define EACH_REGISTER(i) UNROLL for (int i = 0; i < PANEL_REGISTERS; i++)
#define EACH_ROW(r) UNROLL for (int r = 0; r < num_rows; r++)

/* A tile of each form: products of `num_rows` rows, from `first_row` on, with a panel, added to `sums`. `num_rows` is a
 * constant where these are inlined, so that the accumulators stay in registers. */

/* FLOAT32, or BFLOAT16 if `is_bf16`: an accumulator adds its inputs in their order. */
INLINE void float_tile(const Run *run, int64_t panel, int64_t first_row, int num_rows, bool is_bf16,
                       f32_register sums[TILE_ROWS][PANEL_REGISTERS]) {
    const Weight *w = run->weight;
    const float *x = run->in + first_row * run->in_stride;
    const float *f32 = (const float *)w->elements + panel * w->num_inputs * PANEL;
    const uint16_t *bf16 = (const uint16_t *)w->elements + panel * w->num_inputs * PANEL;

    for (int64_t input = 0; input < w->num_inputs; input++) {
        __builtin_prefetch(is_bf16 ? (const void *)(bf16 + (input + PREFETCH_BYTES / 2 / PANEL) * PANEL)
                                   : (const void *)(f32 + (input + PREFETCH_BYTES / 4 / PANEL) * PANEL));

        f32_register weights[PANEL_REGISTERS];
        EACH_REGISTER(i) {
            int64_t at = input * PANEL + i * REGISTER_LANES;
            weights[i] = is_bf16 ? load_bf16_register(bf16 + at) : load_f32_register(f32 + at);
        }
        EACH_ROW(r) EACH_REGISTER(i) sums[r][i] += weights[i] * x[r * run->in_stride + input];
    }
}

/* INT8, or SUBGROUP_INT8 if `has_subgroups`: the exact sum of each part of a group times its scale, plus minimum
 * times the sum of the row's codes, times the row's scale; added in the order of groups. */
INLINE void int8_tile(const Run *run, int64_t panel, int64_t first_row, int num_rows, bool has_subgroups,
                      f32_register sums[TILE_ROWS][PANEL_REGISTERS]) {
    int64_t num_groups = ceil_div(run->weight->num_inputs, GROUP);
    const int num_parts = has_subgroups ? 2 : 1, part_inputs = GROUP / num_parts;
    const int floats_per_group = has_subgroups ? 3 : 1;
    const uint8_t *weights = (const uint8_t *)run->weight->elements + panel * num_groups * GROUP * PANEL;
    const float *scales = (const float *)run->weight->scales + panel * num_groups * floats_per_group * PANEL;

    for (int64_t group = 0; group < num_groups; group++, scales += floats_per_group * PANEL) {
        f32_register scaled_sums[TILE_ROWS][PANEL_REGISTERS] = {0};

        for (int part = 0; part < num_parts; part++) {
            code_sums part_sums[TILE_ROWS][PANEL_REGISTERS] = {0};
            for (int i = part * part_inputs; i < (part + 1) * part_inputs; i += UNIT, weights += PANEL * UNIT) {
                __builtin_prefetch(weights + PREFETCH_BYTES);
                EACH_REGISTER(j) {
                    weight_unit unit = load_int8(weights + j * REGISTER_LANES * UNIT);
                    EACH_ROW(r) part_sums[r][j] = dot(part_sums[r][j], unit, codes_of(run, first_row + r, group) + i);
                }
            }
            EACH_REGISTER(j) {
                f32_register scale = load_f32_register(scales + part * PANEL + j * REGISTER_LANES);
                EACH_ROW(r) scaled_sums[r][j] += to_f32_register(total(part_sums[r][j])) * scale;
            }
        }

        EACH_ROW(r) EACH_REGISTER(j) {
            int64_t at = index_of_group(run, first_row + r, group);
            if (has_subgroups)
                scaled_sums[r][j] += load_f32_register(scales + 2 * PANEL + j * REGISTER_LANES) * run->code_sums[at];
            sums[r][j] += scaled_sums[r][j] * run->scales[at];
        }
    }
}

/* INT4: the exact sum of a group times its scale, plus its minimum times the sum of the row's codes, times the row's
 * scale; added in the order of groups. */
INLINE void int4_tile(const Run *run, int64_t panel, int64_t first_row, int num_rows,
                      f32_register sums[TILE_ROWS][PANEL_REGISTERS]) {
    int64_t num_groups = ceil_div(run->weight->num_inputs, GROUP);
    const uint8_t *weights = (const uint8_t *)run->weight->elements + panel * num_groups * PANEL * SUBGROUP;
    const float *scales = (const float *)run->weight->scales + panel * num_groups * 2 * PANEL;

    for (int64_t group = 0; group < num_groups; group++, scales += 2 * PANEL) {
        code_sums group_sums[TILE_ROWS][PANEL_REGISTERS] = {0};

        /* in whole numbers: the units of the first subgroup in low nibbles, those of the second one in high nibbles */
        for (int i = 0; i < SUBGROUP; i += UNIT, weights += PANEL * UNIT) {
            __builtin_prefetch(weights + PREFETCH_BYTES);
            EACH_REGISTER(j) {
                weight_unit low = load_low_nibbles(weights + j * REGISTER_LANES * UNIT);
                weight_unit high = load_high_nibbles(weights + j * REGISTER_LANES * UNIT);
                EACH_ROW(r) {
                    const int16_t *codes = codes_of(run, first_row + r, group) + i;
                    group_sums[r][j] = dot(dot(group_sums[r][j], low, codes), high, codes + SUBGROUP);
                }
            }
        }

        /* in floats */
        EACH_REGISTER(j) {
            f32_register scale = load_f32_register(scales + j * REGISTER_LANES);
            f32_register minimum = load_f32_register(scales + PANEL + j * REGISTER_LANES);
            EACH_ROW(r) {
                int64_t at = index_of_group(run, first_row + r, group);
                f32_register products = to_f32_register(total(group_sums[r][j]));
                sums[r][j] += (products * scale + minimum * run->code_sums[at]) * run->scales[at];
            }
        }
    }
}

/* Compute a tile, and write it with the bias, or add it. */
INLINE void compute_tile(const Run *run, int64_t panel, int64_t first_row, int num_rows) {
    const Weight *w = run->weight;
    f32_register sums[TILE_ROWS][PANEL_REGISTERS] = {0};
    if (w->form == FLOAT32) float_tile(run, panel, first_row, num_rows, false, sums);
    if (w->form == BFLOAT16) float_tile(run, panel, first_row, num_rows, true, sums);
    if (w->form == INT8) int8_tile(run, panel, first_row, num_rows, false, sums);
    if (w->form == SUBGROUP_INT8) int8_tile(run, panel, first_row, num_rows, true, sums);
    if (w->form == INT4) int4_tile(run, panel, first_row, num_rows, sums);

    int64_t first_output = panel * PANEL, count = min_i64(PANEL, w->num_outputs - first_output);
    EACH_ROW(r) {
        float outputs[PANEL], *to = run->out + (first_row + r) * w->num_outputs + first_output;
        EACH_REGISTER(i) store_f32_register(outputs + i * REGISTER_LANES, sums[r][i]);
        if (w->bias) for (int64_t i = 0; i < count; i++) outputs[i] += w->bias[first_output + i];
        for (int64_t i = 0; i < count; i++) to[i] = run->adds_to_out ? to[i] + outputs[i] : outputs[i];
    }
}

/* Compute all rows for one of the `num_items` shares of a weight's panels. */
static void product_item(void *job, int64_t item, int64_t thread) {
    (void)thread;
    const Run *run = job;
    int64_t num_panels = ceil_div(run->weight->num_outputs, PANEL);
    int64_t end = (item + 1) * num_panels / run->num_items;

    for (int64_t panel = item * num_panels / run->num_items; panel < end; panel++) {
        int64_t row = 0;
        for (; row + TILE_ROWS <= run->segment->num_rows; row += TILE_ROWS) compute_tile(run, panel, row, TILE_ROWS);
        switch (run->segment->num_rows - row) {
#if TILE_ROWS > 4
        case 7: compute_tile(run, panel, row, 7); break;
        case 6: compute_tile(run, panel, row, 6); break;
        case 5: compute_tile(run, panel, row, 5); break;
        case 4: compute_tile(run, panel, row, 4); break;
#endif
#if TILE_ROWS > 2
        case 3: compute_tile(run, panel, row, 3); break;
        case 2: compute_tile(run, panel, row, 2); break;
#endif
        case 1: compute_tile(run, panel, row, 1); break;
        }
    }
}

static bool is_quantized(const Weight *w) { return w->form >= INT8; }

static void before_product(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    (void)thread;
    quantize(run, row, run->in + row * run->in_stride, run->weight->num_inputs);
}

/* Multiply the rows `in` `[T, I]` (or the quantized ones) with a weight; write the results to `out`, or add them. */
static void product(Run *run, const Weight *w, const float *in, float *out, bool adds_to_out) {
    run->weight = w;
    run->in = in;
    run->in_stride = w->num_inputs;
    run->out = out;
    run->adds_to_out = adds_to_out;
    run->num_items = min_i64(ceil_div(w->num_outputs, PANEL), ITEMS_PER_THREAD * pool_size(run->model->pool));
    pool_run(run->model->pool, product_item, run, run->num_items);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* The keys or the values of one layer and key/value head. */
typedef struct {
    char *elements; /* `[num_slots, E]`: floats, or codes */
    float *scales; /* `[num_slots]` of codes */
    int64_t element_bytes;
    bool has_values; /* not keys */
} CachedHead;

/* Write a row's key or value `[E]` to a slot, as codes with a scale unless elements are floats. */
static void write_slot(CachedHead cached, int64_t slot, const float *x, int64_t head_dim) {
    char *to = cached.elements + slot * head_dim * cached.element_bytes;
    if (cached.element_bytes == sizeof *x) {
        memcpy(to, x, (size_t)head_dim * sizeof *x);
        return;
    }

    float magnitude = max_magnitude(x, head_dim);
    float max_code = cached.element_bytes == 1 ? INT8_MAX : INT16_MAX; /* the least numbers are not used */
    float scale = (magnitude < MIN_CACHED_MAGNITUDE ? MIN_CACHED_MAGNITUDE : magnitude) / max_code;
    cached.scales[slot] = scale;

    for (int64_t i = 0; i < head_dim; i++) {
        int32_t code = round_to_int(x[i] / scale);
        if (cached.element_bytes == 1) ((int8_t *)to)[i] = (int8_t)code;
        else ((int16_t *)to)[i] = (int16_t)code;
    }
}

/* The keys, or the values, of eight slots of a path. */
typedef struct {
    float *elements; /* floats, or codes as floats: keys `[E / 8, 8 slots, 8]`, values `[8 slots, E]` */
    float scales[LANES]; /* of the slots; 1 for floats */
} Block;

/* Load eight slots, and fetch those of the block after next, which mostly follow them. */
INLINE void load_slots(CachedHead cached, int64_t element_bytes, const int64_t slots[LANES], int64_t head_dim,
                       Block *block) {
    const char *from[LANES];
    UNROLL for (int j = 0; j < LANES; j++) {
        from[j] = cached.elements + slots[j] * head_dim * element_bytes;
        block->scales[j] = element_bytes == 4 ? 1 : cached.scales[slots[j]];
    }

    int64_t vector_distance = cached.has_values ? LANES : LANES * LANES;
    int64_t slot_distance = cached.has_values ? head_dim : LANES;
    const char *ahead = from[0] + 2 * LANES * head_dim * element_bytes;
    for (int64_t i = 0; i < head_dim; i += LANES) {
        UNROLL for (int j = 0; j < LANES; j++) {
            store_x8(block->elements + i / LANES * vector_distance + j * slot_distance,
                     element_bytes == 4   ? load_x8((const float *)from[j] + i)
                     : element_bytes == 2 ? load_int16_codes_x8((const int16_t *)from[j] + i)
                                          : load_int8_codes_x8((const int8_t *)from[j] + i));
        }

        for (int64_t j = 0; j < LANES * element_bytes; j += CACHE_LINE / LANES)
            __builtin_prefetch(ahead + i * LANES * element_bytes + j * LANES);
    }
}

/* Return the scores of a query `[E]` for eight slots. A score is a sum in eight lanes over E, then over the lanes,
 * times the factor of its slot. */
INLINE f32x8 score_block(const float *query, const float *keys, int64_t head_dim, f32x8 factors) {
    f32_wide slot_sums[LANES / WIDE_PARTS] = {0};
    for (int64_t i = 0; i < head_dim; i += LANES, keys += LANES * LANES) {
        f32_wide part = load_repeated_x8(query + i);
        UNROLL for (int v = 0; v < LANES / WIDE_PARTS; v++) slot_sums[v] += part * load_wide(keys + v * WIDE_LANES);
    }
    return lane_sums_x8(slot_sums) * factors;
}

/* Turn scores `[start, end)` into weights that add up to 1, after the soft cap, if it is not 0; the other scores in
 * wide vectors of these become 0. Lane i adds the weights whose index is i modulo 8. */
static void softmax(float *scores, int64_t start, int64_t end, float score_cap) {
    int64_t first = start / WIDE_LANES * WIDE_LANES;
    if (score_cap != 0) {
        for (int64_t j = first; j < end; j += WIDE_LANES)
            store_wide(scores + j, tanh_wide(load_wide(scores + j) / score_cap) * score_cap);
    }
    for (int64_t j = first; j < start; j++) scores[j] = -INFINITY;
    for (int64_t j = end; j % WIDE_LANES; j++) scores[j] = -INFINITY;

    /* the largest score */
    f32_wide max_scores = load_wide(scores + first);
    for (int64_t j = first; j < end; j += WIDE_LANES) max_scores = max_wide(load_wide(scores + j), max_scores);
    float max_score = max_scores[0];
    for (int lane = 1; lane < WIDE_LANES; lane++)
        max_score = max_scores[lane] > max_score ? max_scores[lane] : max_score;

    /* weights */
    f32x8 sums = broadcast_x8(0);
    for (int64_t j = first; j < end; j += WIDE_LANES) {
        f32_wide score = load_wide(scores + j);
        i32_wide is_outside = score == broadcast_wide(-INFINITY);
        f32_wide weight = select_wide(is_outside, broadcast_wide(0), exp_wide(score - max_score));
        store_wide(scores + j, weight);
        for (int part = 0; part < WIDE_PARTS; part++) sums += load_x8(scores + j + part * LANES);
    }

    float inverse_sum = 1 / lane_sum_x8(sums);
    for (int64_t j = first; j < end; j += WIDE_LANES) store_wide(scores + j, load_wide(scores + j) * inverse_sum);
}

/* Add the weighted values `[8 slots, E]` of the slots `[start, end)`, in their order, to VALUE_LANES of `out`. */
INLINE void add_value_lanes(const float *weights, const float *values, int64_t start, int64_t end, int64_t head_dim,
                            float *out) {
    f32_wide sums[VALUE_LANES / WIDE_LANES];
    UNROLL for (int v = 0; v < VALUE_LANES / WIDE_LANES; v++) sums[v] = load_wide(out + v * WIDE_LANES);
    UNROLL for (int64_t j = start; j < end; j++)
        UNROLL for (int v = 0; v < VALUE_LANES / WIDE_LANES; v++)
            sums[v] += weights[j] * load_wide(values + j * head_dim + v * WIDE_LANES);
    UNROLL for (int v = 0; v < VALUE_LANES / WIDE_LANES; v++) store_wide(out + v * WIDE_LANES, sums[v]);
}

/* Add the weighted values of the slots `[start, end)` of a block to `out` `[E]`, in their order. */
INLINE void add_values(const float *slot_weights, const Block *block, int64_t start, int64_t end, int64_t head_dim,
                       float *out) {
    float weights[LANES];
    store_x8(weights, load_x8(slot_weights) * load_x8(block->scales));

    int64_t i = 0;
    for (; i + VALUE_LANES <= head_dim; i += VALUE_LANES) { /* the loop of a whole block is unrolled */
        if (end - start == LANES) add_value_lanes(weights, block->elements + i, 0, LANES, head_dim, out + i);
        else add_value_lanes(weights, block->elements + i, start, end, head_dim, out + i);
    }
    for (; i < head_dim; i += LANES) {
        f32x8 sums = load_x8(out + i);
        for (int64_t j = start; j < end; j++) sums += weights[j] * load_x8(block->elements + j * head_dim + i);
        store_x8(out + i, sums);
    }
}

/* The attention of a chunk's rows to one key/value head, by the query heads that share it. */
typedef struct {
    const Run *run;
    const Chunk *chunk;
    CachedHead keys, values;
    int64_t kv_head, first_slot; /* the first slot that the cache still has */
    int64_t num_query_heads;
    float *scores; /* `[MAX_CHUNK_ROWS, H / K, max_slots]` */
    Block *block;
} HeadTask;

/* Return the number of slots that a row of a chunk sees. */
INLINE int64_t path_length(const HeadTask *task, int64_t chunk_row) {
    return task->chunk->request->num_settled + task->run->num_visible_tail[task->chunk->first_row + chunk_row];
}

/* Return the first index of a path of `length` slots that is in the window of its row. */
INLINE int64_t window_start(const HeadTask *task, int64_t length) {
    int64_t window = task->run->layer->window;
    return window ? max_i64(0, length - window) : 0;
}

/* Load the slots of eight path indices of a row, from `path_index` on; after the path's end, its last slot again. */
static void load_path(const HeadTask *task, CachedHead cached, int64_t chunk_row, int64_t path_index) {
    int64_t num_settled = task->chunk->request->num_settled, last = path_length(task, chunk_row) - 1, slots[LANES];
    const int32_t *visible_tail = task->run->visible_tail + (task->chunk->first_row + chunk_row) * task->run->max_tail;
    for (int64_t i = 0; i < LANES; i++) {
        int64_t index = min_i64(path_index + i, last);
        int64_t slot = index < num_settled ? index : num_settled + visible_tail[index - num_settled];
        slots[i] = max_i64(slot - task->first_slot, 0); /* a dropped slot is outside of the window */
    }
    int64_t head_dim = task->run->model->head_dim;
    if (cached.element_bytes == 4) load_slots(cached, 4, slots, head_dim, task->block);
    else if (cached.element_bytes == 2) load_slots(cached, 2, slots, head_dim, task->block);
    else load_slots(cached, 1, slots, head_dim, task->block);
}

/* Return the scores of a row and of one of the query heads that share the key/value head, by path index. */
INLINE float *scores_of(const HeadTask *task, int64_t chunk_row, int64_t head) {
    return task->scores + (chunk_row * task->num_query_heads + head) * task->run->max_slots;
}

/* Return the output of a row, by the query heads that share the key/value head. */
INLINE float *attended_of(const HeadTask *task, int64_t chunk_row) {
    const Model *m = task->run->model;
    int64_t head = task->kv_head * task->num_query_heads;
    return task->run->attended + ((task->chunk->first_row + chunk_row) * m->num_heads + head) * m->head_dim;
}

/* Write the scores of a row for the loaded keys of eight path indices, from `path_index` on. */
static void score_row(const HeadTask *task, int64_t chunk_row, int64_t path_index) {
    const Run *run = task->run;
    const Model *m = run->model;
    const float *queries = run->qkv + (task->chunk->first_row + chunk_row) * run->layer->qkv.num_outputs
                           + task->kv_head * task->num_query_heads * m->head_dim;
    f32x8 factors = load_x8(task->block->scales) * m->score_scale;
    for (int64_t head = 0; head < task->num_query_heads; head++) {
        f32x8 scores = score_block(queries + head * m->head_dim, task->block->elements, m->head_dim, factors);
        store_x8(scores_of(task, chunk_row, head) + path_index, scores);
    }
}

/* Add the weighted loaded values of eight path indices, from `path_index` on, to the output of a row. */
static void add_row_values(const HeadTask *task, int64_t chunk_row, int64_t path_index) {
    const Model *m = task->run->model;
    int64_t length = path_length(task, chunk_row);
    int64_t start = max_i64(0, window_start(task, length) - path_index), end = min_i64(LANES, length - path_index);
    for (int64_t head = 0; head < task->num_query_heads; head++) {
        add_values(scores_of(task, chunk_row, head) + path_index, task->block, start, end, m->head_dim,
                   attended_of(task, chunk_row) + head * m->head_dim);
    }
}

/* Load each eight path indices that a row sees, and call `step` for the row. Settled slots are loaded once for all rows
 * of the chunk. */
INLINE void each_block(const HeadTask *task, CachedHead cached, void (*step)(const HeadTask *, int64_t, int64_t)) {
    int64_t num_rows = task->chunk->num_rows, first = INT64_MAX, end = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t length = path_length(task, row);
        first = min_i64(first, window_start(task, length));
        end = max_i64(end, length);
    }

    for (int64_t path_index = first / LANES * LANES; path_index < end; path_index += LANES) {
        bool is_settled = path_index + LANES <= task->chunk->request->num_settled;
        if (is_settled) load_path(task, cached, 0, path_index);
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t length = path_length(task, row);
            if (path_index >= length || path_index + LANES <= window_start(task, length)) continue;
            if (!is_settled) load_path(task, cached, row, path_index);
            step(task, row, path_index);
        }
    }
}

/* Return this layer's keys, or its values, of a key/value head. */
static CachedHead cached_head(const Run *run, const Slots *slots, void *elements, float *scales, int64_t kv_head) {
    int64_t slot_at = (run->layer->layer_in_slots * run->model->num_kv_heads + kv_head) * slots->num_slots;
    char *first = (char *)elements + slot_at * run->model->head_dim * slots->element_bytes;
    return (CachedHead){first, scales ? scales + slot_at : NULL, slots->element_bytes, elements == slots->values};
}

/* Compute one key/value head of a chunk. */
static void attention_item(void *job, int64_t item, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    int64_t kv_head = item % m->num_kv_heads, num_query_heads = m->num_heads / m->num_kv_heads;
    const Chunk *chunk = &run->chunks[item / m->num_kv_heads];
    const Slots *slots = &chunk->request->slots[run->layer->slots_index];
    Block block = {run->blocks + thread * m->head_dim * LANES, {0}};
    HeadTask task = {
        run, chunk, cached_head(run, slots, slots->keys, slots->key_scales, kv_head),
        cached_head(run, slots, slots->values, slots->value_scales, kv_head), kv_head, slots->first_slot,
        num_query_heads,
        run->scores + thread * MAX_CHUNK_ROWS * num_query_heads * run->max_slots,
        &block};

    each_block(&task, task.keys, score_row);
    for (int64_t row = 0; row < chunk->num_rows; row++) {
        int64_t length = path_length(&task, row);
        for (int64_t head = 0; head < num_query_heads; head++)
            softmax(scores_of(&task, row, head), window_start(&task, length), length, m->score_cap);
        memset(attended_of(&task, row), 0, (size_t)(num_query_heads * m->head_dim) * sizeof(float));
    }
    each_block(&task, task.values, add_row_values);
}

/* --- the steps of a layer, between two products ------------------------------------------------------------------- */

static void before_qkv(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *normed = run->normed + row * m->hidden_size;
    (void)thread;
    norm(run->segment->x + row * m->hidden_size, run->layer->attention_norm, m->hidden_size, m->norm_eps, normed);
    if (is_quantized(&run->layer->qkv)) quantize(run, row, normed, m->hidden_size);
}

/* Norm and rotate the queries and keys of a chunk, and write its keys and values to their slots. */
static void write_chunk_to_cache(void *job, int64_t item, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    const Layer *l = run->layer;
    const Chunk *chunk = &run->chunks[item];
    const Slots *slots = &chunk->request->slots[l->slots_index];
    (void)thread;

    for (int64_t row = chunk->first_row; row < chunk->first_row + chunk->num_rows; row++) {
        const float *cos = (l->is_local ? run->segment->local_cos : run->segment->cos) + row * m->rotated_dim;
        const float *sin = (l->is_local ? run->segment->local_sin : run->segment->sin) + row * m->rotated_dim;
        float *qkv = run->qkv + row * l->qkv.num_outputs;
        int64_t slot = chunk->first_slot + row - chunk->first_row - slots->first_slot;

        for (int64_t head = 0; head < m->num_heads + m->num_kv_heads; head++) { /* queries, then keys */
            float *x = qkv + head * m->head_dim;
            const float *weight = head < m->num_heads ? l->q_norm : l->k_norm;
            if (weight) norm(x, weight, m->head_dim, m->norm_eps, x);
            if (l->rotates) rotate(x, cos, sin, m->rotated_dim);
        }

        for (int64_t kv_head = 0; kv_head < m->num_kv_heads; kv_head++) {
            const float *key = qkv + (m->num_heads + kv_head) * m->head_dim;
            const float *value = key + m->num_kv_heads * m->head_dim;
            write_slot(cached_head(run, slots, slots->keys, slots->key_scales, kv_head), slot, key, m->head_dim);
            write_slot(cached_head(run, slots, slots->values, slots->value_scales, kv_head), slot, value, m->head_dim);
        }
    }
}

static void before_o(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    (void)thread;
    quantize(run, row, run->attended + row * run->layer->o.num_inputs, run->layer->o.num_inputs);
}

static void before_gate_up(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *normed = run->normed + row * m->hidden_size;
    (void)thread;
    norm(run->segment->x + row * m->hidden_size, run->layer->mlp_norm, m->hidden_size, m->norm_eps, normed);
    if (is_quantized(&run->layer->gate_up)) quantize(run, row, normed, m->hidden_size);
}

static void before_down(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    int64_t size = run->model->intermediate_size;
    const float *gate_up = run->gate_up + row * 2 * size;
    float *gated = run->gated + row * size;
    (void)thread;
    activate(gate_up, gate_up + size, size, run->model->uses_gelu, gated);
    if (is_quantized(&run->layer->down)) quantize(run, row, gated, size);
}

static void norm_final(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *x = run->segment->x + row * m->hidden_size;
    (void)thread;
    norm(x, m->final_norm, m->hidden_size, m->norm_eps, x);
}

/* Add a sublayer's output to a row, normed and scaled. */
static void add_sublayer_output(void *job, int64_t row, int64_t thread) {
    const Run *run = job;
    const Model *m = run->model;
    float *x = run->segment->x + row * m->hidden_size, *output = run->sublayer_output + row * m->hidden_size;
    (void)thread;
    if (run->sublayer_norm) norm(output, run->sublayer_norm, m->hidden_size, m->norm_eps, output);
    for (int64_t i = 0; i < m->hidden_size; i++) x[i] += output[i] * m->residual_scale;
}

/* Compute the last product of a sublayer, and add it to the rows; `after_norm` is the norm of its output, or NULL. */
static void sublayer_product(Run *run, const Weight *w, const float *in, const float *after_norm) {
    if (!after_norm && run->model->residual_scale == 1) {
        product(run, w, in, run->segment->x, true);
        return;
    }
    product(run, w, in, run->sublayer_output, false);
    run->sublayer_norm = after_norm;
    pool_run(run->model->pool, add_sublayer_output, run, run->segment->num_rows);
}

/* Compute one layer: x += o(attention(norm(x))), then x += down(activate(gate_up(norm(x)))). */
static void compute_layer(Run *run, const Layer *l) {
    Pool *pool = run->model->pool;
    int64_t num_rows = run->segment->num_rows;
    run->layer = l;

    pool_run(pool, before_qkv, run, num_rows);
    product(run, &l->qkv, run->normed, run->qkv, false);
    pool_run(pool, write_chunk_to_cache, run, run->num_chunks);
    pool_run(pool, attention_item, run, run->num_chunks * run->model->num_kv_heads);
    if (is_quantized(&l->o)) pool_run(pool, before_o, run, num_rows);
    sublayer_product(run, &l->o, run->attended, l->after_attention_norm);

    pool_run(pool, before_gate_up, run, num_rows);
    product(run, &l->gate_up, run->normed, run->gate_up, false);
    pool_run(pool, before_down, run, num_rows);
    sublayer_product(run, &l->down, run->gated, l->after_mlp_norm);
}

/* --- a segment ---------------------------------------------------------------------------------------------------- */

/* A slice with its threads and its memory, which is kept from segment to segment. */
typedef struct {
    Model model;
    char *memory;
    int64_t num_bytes;
} Slice;

/* Return whether the sizes of a request fit the memory of its cache and the rows of the segment. */
static bool is_sound(const Model *m, const Request *request) {
    if (request->num_rows < 1 || request->num_tail < request->num_rows) return false;
    if (request->mask_stride < request->num_tail) return false;
    if (request->num_settled < 0 || request->num_settled > INT32_MAX || request->num_tail > INT32_MAX) return false;

    int64_t end = request->num_settled + request->num_tail;
    for (int64_t i = 0; i < m->num_layers; i++) {
        if (m->layers[i].slots_index >= request->num_windows) return false;
        const Slots *slots = &request->slots[m->layers[i].slots_index];
        if (m->layers[i].layer_in_slots >= slots->num_layers) return false;
        if (slots->first_slot < 0 || slots->first_slot > end - request->num_rows) return false;
        if (end - slots->first_slot > slots->num_slots) return false;
    }
    return true;
}

/* Give the arrays of a run their addresses in `memory`, if it is not NULL; return the bytes that they need. */
static int64_t lay_out(Run *run, char *memory) {
    const Model *m = run->model;
    int64_t num_rows = run->segment->num_rows, num_bytes = 0;
    int64_t num_query_heads = m->num_heads / m->num_kv_heads;
#define ALLOT(array, count) \
    do { \
        run->array = memory ? (void *)(memory + num_bytes) : NULL; \
        num_bytes += ceil_div((int64_t)sizeof *run->array * (count), CACHE_LINE) * CACHE_LINE; \
    } while (0)
    ALLOT(normed, num_rows * m->hidden_size);
    ALLOT(qkv, num_rows * (m->num_heads + 2 * m->num_kv_heads) * m->head_dim);
    ALLOT(attended, num_rows * m->num_heads * m->head_dim);
    ALLOT(gate_up, num_rows * 2 * m->intermediate_size);
    ALLOT(gated, num_rows * m->intermediate_size);
    ALLOT(sublayer_output, num_rows * m->hidden_size);
    ALLOT(codes, num_rows * run->max_groups * GROUP);
    ALLOT(scales, num_rows * run->max_groups);
    ALLOT(code_sums, num_rows * run->max_groups);
    ALLOT(visible_tail, num_rows * run->max_tail);
    ALLOT(num_visible_tail, num_rows);
    ALLOT(chunks, num_rows);
    ALLOT(scores, pool_size(m->pool) * MAX_CHUNK_ROWS * num_query_heads * run->max_slots);
    ALLOT(blocks, pool_size(m->pool) * m->head_dim * LANES);
#undef ALLOT
    return num_bytes;
}

/* Set the sizes of a run's arrays; `max_inputs` are those of the weight with the most inputs. */
static void measure(Run *run, int64_t max_inputs) {
    run->max_groups = ceil_div(max_inputs, GROUP);
    for (int64_t i = 0; i < run->segment->num_requests; i++) {
        const Request *request = &run->segment->requests[i];
        int64_t num_slots = request->num_settled + request->num_tail;
        run->max_tail = max_i64(run->max_tail, request->num_tail);
        run->max_slots = max_i64(run->max_slots, ceil_div(num_slots, WIDE_LANES) * WIDE_LANES);
    }
}

/* List the chunks, and the slots of the tail that each row sees; return whether each row sees its own slot. */
static bool list_rows(Run *run) {
    int64_t row = 0; /* in the segment */
    for (int64_t i = 0; i < run->segment->num_requests; i++) {
        const Request *request = &run->segment->requests[i];
        int64_t own_slot = request->num_tail - request->num_rows; /* in the tail */

        for (int64_t request_row = 0; request_row < request->num_rows; request_row++, row++, own_slot++) {
            const uint8_t *mask = request->tail_mask + request_row * request->mask_stride;
            int32_t *visible_tail = run->visible_tail + row * run->max_tail, count = 0;
            for (int64_t slot = 0; slot < request->num_tail; slot++)
                if (mask[slot]) visible_tail[count++] = (int32_t)slot;
            run->num_visible_tail[row] = count;
            if (!mask[own_slot]) return false;

            if (request_row % MAX_CHUNK_ROWS == 0) {
                int64_t num_rows = min_i64(MAX_CHUNK_ROWS, request->num_rows - request_row);
                run->chunks[run->num_chunks++] = (Chunk){request, row, num_rows, request->num_settled + own_slot};
            }
        }
    }
    return true;
}

static int64_t num_weights(const Layer *layer) {
    const Weight *weights[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) sum += weights[i]->num_outputs * weights[i]->num_inputs;
    return sum;
}

/* Copy the rows, if the input of this layer is wanted; the number of layers stands for the output of the last one. */
static void copy_layer_input(const Run *run, int64_t layer_index) {
    float *const *layer_inputs = run->segment->layer_inputs;
    size_t num_bytes = (size_t)(run->segment->num_rows * run->model->hidden_size) * sizeof(float);
    if (layer_inputs && layer_inputs[layer_index]) memcpy(layer_inputs[layer_index], run->segment->x, num_bytes);
}

/* Give a run its memory, which grows as needed; return whether there is enough. */
static bool reserve(Slice *slice, Run *run) {
    int64_t num_bytes = lay_out(run, NULL);
    if (num_bytes > slice->num_bytes) {
        free(slice->memory);
        slice->memory = aligned_alloc(CACHE_LINE, (size_t)num_bytes);
        slice->num_bytes = slice->memory ? num_bytes : 0;
        if (!slice->memory) return false;
    }
    lay_out(run, slice->memory);
    return true;
}

/* --- what Python calls -------------------------------------------------------------------------------------------- */

static const char *bus_sentence;

static void end_by_bus_error(int number) {
    (void)number;
    ssize_t num_written = write(STDERR_FILENO, bus_sentence, strlen(bus_sentence));
    _exit(num_written < 0 ? 1 : 2);
}

/* Let SIGBUS, which the read of a mapped file that was cut causes, end this process with a sentence, unless the program
 * handles it already. */
EXPORTED void slice_explain_bus_errors(const char *sentence) {
    struct sigaction action;
    if (sigaction(SIGBUS, NULL, &action) || action.sa_handler != SIG_DFL) return;
    bus_sentence = sentence;
    action.sa_handler = end_by_bus_error;
    sigaction(SIGBUS, &action, NULL);
}

/* Return a slice that computes with `num_threads` threads; NULL without memory. The memory behind `model` must stay. */
EXPORTED Slice *slice_new(const Model *model, int64_t num_threads) {
    Slice *slice = calloc(1, sizeof *slice);
    if (!slice) return NULL;
    slice->model = *model;
    slice->model.pool = pool_new(num_threads);
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
    const Model *m = run.model;

    /* compare with the sizes of caches and layers */
    int64_t num_rows = 0;
    for (int64_t i = 0; i < segment->num_requests; i++) {
        if (!is_sound(m, &segment->requests[i])) return OUT_OF_BOUNDS;
        num_rows += segment->requests[i].num_rows;
    }
    if (num_rows < 1 || num_rows != segment->num_rows) return OUT_OF_BOUNDS;
    for (int64_t i = 0; i < m->num_layers; i++)
        if (m->layers[i].is_local && !(segment->local_cos && segment->local_sin)) return OUT_OF_BOUNDS;

    /* memory */
    measure(&run, max_i64(m->hidden_size, max_i64(m->intermediate_size, m->num_heads * m->head_dim)));
    if (!reserve(slice, &run)) return NO_MEMORY;
    if (!list_rows(&run)) return OUT_OF_BOUNDS;

    /* layers */
    int64_t num_products = QUESTION_PRODUCTS; /* since the last question */
    for (int64_t i = 0; i < m->num_layers; i++) {
        if (num_products >= QUESTION_PRODUCTS) {
            if (segment->still_needed && !segment->still_needed()) return GIVEN_UP;
            num_products = 0;
        }
        num_products += num_rows * num_weights(&m->layers[i]);
        copy_layer_input(&run, i);
        compute_layer(&run, &m->layers[i]);
    }
    copy_layer_input(&run, m->num_layers);
    if (m->final_norm) pool_run(m->pool, norm_final, &run, num_rows);
    return DONE;
}

/* Multiply the rows `in` `[T, I]` with a weight, with the threads and the memory of a slice of no layers; write the
 * results to `out` `[T, N]`. Return a Result. */
EXPORTED int32_t slice_multiply(Slice *slice, const Weight *weight, const float *in, int64_t num_rows, float *out) {
    Segment segment = {.num_rows = num_rows};
    Run run = {.model = &slice->model, .segment = &segment,
               .weight = weight, .in = in, .in_stride = weight->num_inputs};
    measure(&run, weight->num_inputs);
    if (!reserve(slice, &run)) return NO_MEMORY;

    if (is_quantized(weight)) pool_run(slice->model.pool, before_product, &run, num_rows);
    product(&run, weight, in, out, false);
    return DONE;
}

/* Continue the state of a gated delta net, with the threads of a slice. */
EXPORTED void slice_continue_state(Slice *slice, DeltaRows *rows) {
    pool_run(slice->model.pool, delta_item, rows, rows->num_heads);
}
