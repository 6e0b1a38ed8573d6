/* The state of a gated delta net, which rows of one path change one after the other. */
#ifndef DELTA_H
#define DELTA_H

#include <stdint.h>

/* Rows T of one path, and the state before them. Of each head a key dimension has a row of the state. */
typedef struct {
    int64_t num_rows, num_heads, key_dim, value_dim;
    const float *queries, *keys; /* `[T, H, K]` */
    const float *values; /* `[T, H, V]` */
    const float *decays, *rates; /* `[T, H]` */
    float *state; /* `[H, K, V]`: becomes that after the rows */
    float *out; /* `[T, H, V]` */
} DeltaRows;

/* Compute one head of all rows; `job` is a DeltaRows. */
void delta_item(void *job, int64_t head, int64_t thread);

#endif
