/* A few threads that share the items of a job. */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef struct Pool Pool;
typedef void Work(void *job, int64_t item, int64_t thread);

/* Return a pool of `num_threads` threads, the caller's included; NULL if the system has no more. */
Pool *pool_new(int64_t num_threads);

/* Call `work(job, item, thread)` for each item from 0 to `num_items` - 1, and return when all are done; `thread` is the
 * index of the thread that computes the item, from 0. */
void pool_run(Pool *pool, Work *work, void *job, int64_t num_items);

int64_t pool_size(const Pool *pool);

void pool_free(Pool *pool);

#endif
