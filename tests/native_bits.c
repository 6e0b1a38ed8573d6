/* Print a hash of what the layers of model/native/slice.c compute for each form of weights, alone and in a tree: it is
 * the same on every processor. tests/test_native.py compiles this for all instruction sets that it can run. */
#include <stdio.h>

#include "slice.c"

enum { HIDDEN = 104, HEADS = 6, KV_HEADS = 2, HEAD = 24, WIDE = 200, LAYERS = 2, ROOM = 64, TEXT = 20, GUESSES = 19 };

static uint32_t state = 1;

/* Return a number between -1 and 1 that is a multiple of 1/128, and thus one in bfloat16, too. */
static float noise(void) {
    state = state * 1664525u + 1013904223u;
    return (float)((int32_t)(state >> 24) - 128) / 128;
}

static float *noises(int64_t count, float scale, float shift) {
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = noise() * scale + shift;
    return x;
}

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Return the index of output n, input i in panels of units. */
static int64_t packed_index(int64_t n, int64_t i, int64_t inputs, int64_t unit) {
    return n / PANEL * inputs * PANEL + (i / unit * PANEL + n % PANEL) * unit + i % unit;
}

/* Return a random weight, the same for all packings of a form. */
static Weight weight(int64_t form, int64_t outputs, int64_t inputs) {
    int64_t num_panels = ceil_div(outputs, PANEL), num_groups = ceil_div(inputs, GROUP), padded = num_groups * GROUP;
    void *elements = calloc((size_t)(num_panels * PANEL * padded), 4);
    Weight w = {form, outputs, inputs, elements, NULL, noises(outputs, 0.1f, 0)};
    w.scales = calloc((size_t)(num_panels * PANEL * num_groups * 3), 4);
    bool is_int8 = form == INT8 || form == SUBGROUP_INT8, is_int4 = form == INT4;
    int64_t floats = form == SUBGROUP_INT8 ? 3 : is_int4 ? 2 : 1;
    for (int64_t n = 0; n < outputs; n++) {
        for (int64_t i = 0; i < inputs; i++) {
            float x = noise();
            int64_t code = (int64_t)((x + 1) * 7.5f), at = packed_index(n, i, inputs, 1);
            if (form == FLOAT32) ((float *)w.elements)[at] = x * 0.125f;
            if (form == BFLOAT16) ((uint16_t *)w.elements)[at] = to_bf16(x * 0.125f);
            uint8_t *int8 = (uint8_t *)w.elements + packed_index(n, i, padded, UNIT);
            if (is_int8) *int8 = (uint8_t)(int)(x * 127);
            int64_t pair_input = i % SUBGROUP + i / GROUP * SUBGROUP;
            uint8_t *pair = (uint8_t *)w.elements + packed_index(n, pair_input, padded / 2, UNIT);
            if (is_int4) *pair |= (uint8_t)(i % GROUP < SUBGROUP ? code : code << 4);
        }
        for (int64_t i = 0; i < num_groups * floats && is_quantized(&w); i++)
            ((float *)w.scales)[(n / PANEL * num_groups * floats + i) * PANEL + n % PANEL] =
                (i % floats) + 1 == floats && floats > 1 ? noise() * 0.0625f : 0.001f + 0.0001f * (float)((n + i) % 7);
    }
    return w;
}

static uint64_t hash(uint64_t start, const float *x, int64_t count) {
    uint64_t hashed = start;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        hashed = (hashed ^ bits) * 1099511628211u;
    }
    return hashed;
}

/* Compute rows behind some settled ones; all of them are guesses that see `parent` and themselves, or a chain. */
static uint64_t rows(Slice *slice, const Slots *slots, int64_t settled, int64_t count, bool chain) {
    uint8_t *sees = calloc((size_t)(count * count), 1);
    for (int64_t row = 0; row < count; row++)
        for (int64_t slot = 0; slot <= row; slot++) sees[row * count + slot] = chain || slot == row || slot == row / 2;
    Request request = {count, settled, count, count, sees, slots, 1};
    state = 7;
    float *x = noises(count * HIDDEN, 1, 0), *cos = noises(count * HEAD, 1, 0), *sin = noises(count * HEAD, 1, 0);
    const float *local_cos = noises(count * HEAD, 1, 0), *local_sin = noises(count * HEAD, 1, 0);
    Segment segment = {count, 1, x, cos, sin, &request, NULL, NULL, local_cos, local_sin};
    if (slice_run(slice, &segment) != DONE) exit(1);
    return hash(1, x, count * HIDDEN);
}

int main(void) {
    for (int64_t step = 0; step < 2 * (INT4 + 1); step++) {
        int64_t form = step % (INT4 + 1);
        bool more = step > INT4; /* with the steps of Gemma and Granite */
        Layer layers[LAYERS];
        state = 3;
        for (int64_t i = 0; i < LAYERS; i++) {
            layers[i] = (Layer){
                noises(HIDDEN, 0.5f, 1), noises(HIDDEN, 0.5f, 1), noises(HEAD, 0.5f, 1), noises(HEAD, 0.5f, 1),
                weight(form, (HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), weight(form, HIDDEN, HEADS * HEAD),
                weight(form, 2 * WIDE, HIDDEN), weight(form, HIDDEN, WIDE), i ? 16 : 0, 1, 0, i,
                more ? noises(HIDDEN, 0.5f, 1) : NULL, more && i ? noises(HIDDEN, 0.5f, 1) : NULL, more && i};
        }
        Model model = {HIDDEN, HEADS, KV_HEADS, HEAD, HEAD, WIDE, LAYERS, 1e-6f, 0.2f, layers, NULL, NULL,
                       more, more ? 0.75f : 1, more ? 5 : 0};
        size_t num_vectors = LAYERS * KV_HEADS * ROOM;
        for (int64_t element_bytes = 4; element_bytes; element_bytes /= 2) { /* of keys and values */
            void *keys = calloc(num_vectors * HEAD, 4), *values = calloc(num_vectors * HEAD, 4);
            float *key_scales = calloc(num_vectors, 4), *value_scales = calloc(num_vectors, 4);
            Slots slots = {keys, values, key_scales, value_scales, LAYERS, 0, ROOM, element_bytes};
            Slice *slice = slice_new(&model, 2);
            uint64_t text = rows(slice, &slots, 0, TEXT, true), guesses = rows(slice, &slots, TEXT, GUESSES, false);
            printf("%016llx %016llx\n", (unsigned long long)text, (unsigned long long)guesses);
            slice_free(slice);
        }
    }
    return 0;
}
