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
    float *made = malloc((size_t)count * sizeof *made);
    for (int64_t i = 0; i < count; i++) made[i] = noise() * scale + shift;
    return made;
}

static uint16_t half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Return the place of a number of a row of outputs in units. */
static int64_t place(int64_t n, int64_t i, int64_t inputs, int64_t unit) {
    return n / BLOCK * inputs * BLOCK + (i / unit * BLOCK + n % BLOCK) * unit + i % unit;
}

/* Return a random weight, the same for all packings of a form. */
static Weight weight(int64_t form, int64_t outputs, int64_t inputs) {
    int64_t blocks = parts_of(outputs, BLOCK), groups = parts_of(inputs, GROUP), padded = groups * GROUP;
    Weight w = {form, outputs, inputs, calloc((size_t)(blocks * BLOCK * padded), 4), NULL, noises(outputs, 0.1f, 0)};
    w.scales = calloc((size_t)(blocks * BLOCK * groups * 3), 4);
    bool bytes = form == INT8 || form == GROUPS8 || form == HALVES8, codes = form == INT4 || form == GROUPS4;
    int64_t floats = form == HALVES8 ? 3 : form == GROUPS4 ? 2 : 1;
    for (int64_t n = 0; n < outputs; n++) {
        for (int64_t i = 0; i < inputs; i++) {
            float x = noise();
            int64_t code = (int64_t)((x + 1) * 7.5f), at = place(n, i, inputs, 1);
            if (form == FLOAT32) ((float *)w.numbers)[at] = x * 0.125f;
            if (form == BFLOAT16) ((uint16_t *)w.numbers)[at] = half(x * 0.125f);
            if (bytes) ((uint8_t *)w.numbers)[place(n, i, padded, UNIT8)] = (uint8_t)((int)(x * 127) + OFFSET8);
            int64_t in_half = i % (GROUP / 2) + i / GROUP * (GROUP / 2);
            uint8_t *pair = (uint8_t *)w.numbers + place(n, in_half, padded / 2, UNIT4);
            if (codes) *pair |= (uint8_t)(i % GROUP < GROUP / 2 ? code : code << 4);
        }
        if (form == INT8) ((float *)w.scales)[n] = 0.001f + 0.0001f * (float)(n % 7);
        for (int64_t i = 0; i < groups * floats && form >= GROUPS8; i++)
            ((float *)w.scales)[(n / BLOCK * groups * floats + i) * BLOCK + n % BLOCK] =
                (i % floats) + 1 == floats && floats > 1 ? noise() * 0.0625f : 0.001f + 0.0001f * (float)((n + i) % 7);
        for (int64_t g = 0; g < groups && form == INT4; g++) {
            uint16_t *scales = (uint16_t *)w.scales + (n / BLOCK * groups + g) * 2 * BLOCK + n % BLOCK;
            scales[0] = half(0.015625f);
            scales[BLOCK] = half(noise() * 0.0625f);
        }
    }
    for (int64_t i = 0; i < blocks * BLOCK * padded && bytes && OFFSET8; i++)
        if (((uint8_t *)w.numbers)[i] == 0) ((uint8_t *)w.numbers)[i] = OFFSET8; /* the padding */
    return w;
}

static uint64_t hash(uint64_t known, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        known = (known ^ bits) * 1099511628211u;
    }
    return known;
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
    for (int64_t step = 0; step < 2 * (GROUPS4 + 1); step++) {
        int64_t form = step % (GROUPS4 + 1);
        bool more = step > GROUPS4; /* with the steps of Gemma and Granite */
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
        size_t held = LAYERS * KV_HEADS * ROOM;
        for (int small = 0; small < 2; small++) {
            Slots slots = {calloc(held * HEAD, 4), calloc(held * HEAD, 4), small ? calloc(held, 4) : NULL,
                           small ? calloc(held, 4) : NULL, LAYERS, 0, ROOM};
            Slice *slice = slice_new(&model, 2);
            uint64_t text = rows(slice, &slots, 0, TEXT, true), guesses = rows(slice, &slots, TEXT, GUESSES, false);
            printf("%016llx %016llx\n", (unsigned long long)text, (unsigned long long)guesses);
            slice_free(slice);
        }
    }
    return 0;
}
