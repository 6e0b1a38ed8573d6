/* A gated delta net: a row lets the state decay, recalls what it holds for a key, adds the difference to the row's value
 * to it, and reads it with a query. All sums are over key dimensions, in their order, in one lane for each value
 * dimension (lanes.h).
 */
#include "delta.h"

#include "lanes.h"

#define COLUMN_VECTORS 8 /* of the state, that are computed at once: their accumulators stay in registers */
#define EACH_VECTOR(v) for (int v = 0; v < num_vectors; v++)

/* Compute the value dimensions from `column` on, in `num_vectors` vectors, of one head and row. It is a constant where
 * this is inlined. */
INLINE void advance_columns(const DeltaRows *d, int64_t row_head, float *state, int64_t column, int num_vectors) {
    const float *query = d->queries + row_head * d->key_dim, *key = d->keys + row_head * d->key_dim;
    const float *value = d->values + row_head * d->value_dim + column;
    float decay = d->decays[row_head], rate = d->rates[row_head];

    f32x8 recalled[COLUMN_VECTORS] = {0};
    for (int64_t k = 0; k < d->key_dim; k++) {
        float *line = state + k * d->value_dim + column;
        EACH_VECTOR(v) {
            f32x8 decayed = load_x8(line + LANES * v) * decay;
            store_x8(line + LANES * v, decayed);
            recalled[v] += decayed * key[k];
        }
    }

    f32x8 difference[COLUMN_VECTORS], read[COLUMN_VECTORS] = {0};
    EACH_VECTOR(v) difference[v] = (load_x8(value + LANES * v) - recalled[v]) * rate;
    for (int64_t k = 0; k < d->key_dim; k++) {
        float *line = state + k * d->value_dim + column;
        EACH_VECTOR(v) {
            f32x8 changed = load_x8(line + LANES * v) + difference[v] * key[k];
            store_x8(line + LANES * v, changed);
            read[v] += changed * query[k];
        }
    }

    float *out = d->out + row_head * d->value_dim + column;
    EACH_VECTOR(v) store_x8(out + LANES * v, read[v]);
}

void delta_item(void *job, int64_t head, int64_t thread) {
    const DeltaRows *d = job;
    float *state = d->state + head * d->key_dim * d->value_dim;
    (void)thread;

    for (int64_t row = 0; row < d->num_rows; row++) {
        int64_t row_head = row * d->num_heads + head, column = 0;
        for (; column + COLUMN_VECTORS * LANES <= d->value_dim; column += COLUMN_VECTORS * LANES)
            advance_columns(d, row_head, state, column, COLUMN_VECTORS);
        for (; column < d->value_dim; column += LANES) advance_columns(d, row_head, state, column, 1);
    }
}
