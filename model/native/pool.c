/* A few threads that share the items of a job.
 *
 * `items_left` counts the items that nobody has taken. A thread takes one by lowering it, and only then reads the job,
 * which stays as it is until that item is done. So a thread that wakes up late neither delays a job nor meets an old
 * one. Threads without work spin for a short time, since the next job of a layer follows at once; then they sleep,
 * since other ranks may need the core.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define MAX_SPINS 1000 /* some 30 microseconds, before a thread sleeps */

struct Pool {
    atomic_llong items_left, items_done; /* of the present job: not yet taken, and computed */
    atomic_int num_asleep; /* workers that wait for `job_begun` */
    atomic_bool caller_sleeps, is_ending;
    Work *work;
    void *job;
    pthread_mutex_t lock;
    pthread_cond_t job_begun, item_done;
    int64_t num_workers; /* threads beside the caller's, which has the index 0 */
    struct Worker { Pool *pool; int64_t index; pthread_t thread; } *workers;
};

/* Tell the processor that this thread spins. */
static void spin_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take items and compute them until none is left; return whether there were any. */
static bool compute_items(Pool *pool, int64_t thread) {
    bool has_computed = false;
    long long left = atomic_load(&pool->items_left);

    while (left > 0) {
        if (!atomic_compare_exchange_weak(&pool->items_left, &left, left - 1)) continue;
        pool->work(pool->job, left - 1, thread);
        has_computed = true;

        atomic_fetch_add(&pool->items_done, 1);
        if (atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->item_done);
            pthread_mutex_unlock(&pool->lock);
        }
        left = atomic_load(&pool->items_left);
    }
    return has_computed;
}

static void sleep_until_job_begun(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->num_asleep, 1);
    while (atomic_load(&pool->items_left) == 0 && !atomic_load(&pool->is_ending))
        pthread_cond_wait(&pool->job_begun, &pool->lock);
    atomic_fetch_sub(&pool->num_asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

/* The main function of a worker's thread: compute items, spin, or sleep, until the pool ends. */
static void *worker_main(void *argument) {
    struct Worker *worker = argument;
    Pool *pool = worker->pool;
    int num_spins = 0;

    while (!atomic_load(&pool->is_ending)) {
        if (compute_items(pool, worker->index)) {
            num_spins = 0;
        } else if (++num_spins < MAX_SPINS) {
            spin_once();
        } else {
            sleep_until_job_begun(pool);
            num_spins = 0;
        }
    }
    return NULL;
}

Pool *pool_new(int64_t num_threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->job_begun, NULL);
    pthread_cond_init(&pool->item_done, NULL);

    pool->workers = calloc((size_t)num_threads, sizeof *pool->workers);
    while (pool->workers && pool->num_workers < num_threads - 1) {
        struct Worker *worker = &pool->workers[pool->num_workers];
        worker->pool = pool;
        worker->index = pool->num_workers + 1;
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) break;
        pool->num_workers++;
    }

    if (pool->num_workers == num_threads - 1) return pool;
    pool_free(pool);
    return NULL;
}

void pool_run(Pool *pool, Work *work, void *job, int64_t num_items) {
    if (pool->num_workers == 0 || num_items == 1) {
        for (int64_t item = 0; item < num_items; item++) work(job, item, 0);
        return;
    }

    /* begin */
    pool->work = work;
    pool->job = job;
    atomic_store(&pool->items_done, 0);
    atomic_store(&pool->items_left, num_items);
    if (atomic_load(&pool->num_asleep)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->job_begun);
        pthread_mutex_unlock(&pool->lock);
    }

    /* compute, then spin */
    compute_items(pool, 0);
    for (int spin = 0; spin < MAX_SPINS && atomic_load(&pool->items_done) < num_items; spin++) spin_once();
    if (atomic_load(&pool->items_done) == num_items) return;

    /* sleep until the others are done */
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->items_done) < num_items) pthread_cond_wait(&pool->item_done, &pool->lock);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

int64_t pool_size(const Pool *pool) { return pool->num_workers + 1; }

void pool_free(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->is_ending, true);
    pthread_cond_broadcast(&pool->job_begun);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i].thread, NULL);

    pthread_cond_destroy(&pool->job_begun);
    pthread_cond_destroy(&pool->item_done);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}
