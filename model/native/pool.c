/* A few threads that share the items of a job.
 *
 * `left` counts the items that nobody has taken. A thread takes one by lowering it, and only then reads the job, which
 * stays as it is until that item is done. So a thread that wakes up late neither delays a job nor meets an old one.
 * Threads without work look for some for a short time, since the next job of a layer follows at once; then they sleep,
 * since other ranks may need the core.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define LOOKS 1000 /* some 30 microseconds */

struct Pool {
    atomic_llong left, done;
    atomic_int sleepers;
    atomic_bool waits, ends;
    Work *work;
    void *job;
    pthread_mutex_t lock;
    pthread_cond_t begun, finished;
    int64_t others; /* threads beside the caller's, which has the number 0 */
    struct Thread { Pool *pool; int64_t number; pthread_t thread; } *threads;
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take items and work on them until none is left; return whether there were any. */
static bool work_on(Pool *pool, int64_t thread) {
    bool any = false;
    long long left = atomic_load(&pool->left);
    while (left > 0) {
        if (!atomic_compare_exchange_weak(&pool->left, &left, left - 1)) continue;
        pool->work(pool->job, left - 1, thread);
        any = true;
        atomic_fetch_add(&pool->done, 1);
        if (atomic_load(&pool->waits)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->lock);
        }
        left = atomic_load(&pool->left);
    }
    return any;
}

static void sleep_until_begun(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->left) == 0 && !atomic_load(&pool->ends))
        pthread_cond_wait(&pool->begun, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
}

/* The life of a thread of the pool. */
static void *live(void *of) {
    struct Thread *self = of;
    Pool *pool = self->pool;
    int looks = 0;
    while (!atomic_load(&pool->ends)) {
        if (work_on(pool, self->number)) {
            looks = 0;
        } else if (++looks < LOOKS) {
            pause_briefly();
        } else {
            sleep_until_begun(pool);
            looks = 0;
        }
    }
    return NULL;
}

Pool *pool_new(int64_t threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->begun, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->threads = calloc((size_t)threads, sizeof *pool->threads);
    while (pool->threads && pool->others < threads - 1) {
        struct Thread *thread = &pool->threads[pool->others];
        thread->pool = pool;
        thread->number = pool->others + 1;
        if (pthread_create(&thread->thread, NULL, live, thread)) break;
        pool->others++;
    }
    if (pool->others == threads - 1) return pool;
    pool_free(pool);
    return NULL;
}

void pool_run(Pool *pool, Work *work, void *job, int64_t items) {
    if (pool->others == 0 || items == 1) {
        for (int64_t item = 0; item < items; item++) work(job, item, 0);
        return;
    }
    pool->work = work;
    pool->job = job;
    atomic_store(&pool->done, 0);
    atomic_store(&pool->left, items);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->begun);
        pthread_mutex_unlock(&pool->lock);
    }

    work_on(pool, 0);
    for (int looks = 0; looks < LOOKS && atomic_load(&pool->done) < items; looks++) pause_briefly();
    if (atomic_load(&pool->done) == items) return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->waits, true);
    while (atomic_load(&pool->done) < items) pthread_cond_wait(&pool->finished, &pool->lock);
    atomic_store(&pool->waits, false);
    pthread_mutex_unlock(&pool->lock);
}

int64_t pool_size(const Pool *pool) { return pool->others + 1; }

void pool_free(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->ends, true);
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < pool->others; i++) pthread_join(pool->threads[i].thread, NULL);
    pthread_cond_destroy(&pool->begun);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}
