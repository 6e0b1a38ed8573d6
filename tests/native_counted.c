/* The native kernels on a system that counts what they hold and that can refuse: memory, threads and locks. Memory
 * that is not zeroed is NaN. `tests/test_native_values.py` compiles and calls it. */
#define _POSIX_C_SOURCE 200809L /* locks that check for errors */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

atomic_int num_held; /* memory, threads and locks that were not given back */
atomic_int num_misuses; /* of locks: unlocked, waited with or signalled by a thread that does not hold them */
atomic_int num_waiting; /* threads that sleep until they are signalled */
atomic_int requests_left = -1; /* before one is refused; below 0: none is */
static _Thread_local int num_locks;

static bool is_refused(void) { return atomic_fetch_sub(&requests_left, 1) == 0; }

static void *counted(void *memory) {
    num_held += memory != NULL;
    return memory;
}

static void *counted_calloc(size_t count, size_t size) { return counted(is_refused() ? NULL : calloc(count, size)); }

static void *counted_aligned_alloc(size_t alignment, size_t size) {
    void *memory = is_refused() ? NULL : aligned_alloc(alignment, size);
    if (memory) memset(memory, 0xff, size);
    return counted(memory);
}

static void counted_free(void *memory) {
    num_held -= memory != NULL;
    free(memory);
}

static int counted_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    int error = is_refused() ? EAGAIN : pthread_create(thread, attributes, start, argument);
    num_held += !error;
    return error;
}

static int counted_join(pthread_t thread, void **result) {
    num_held -= 1;
    return pthread_join(thread, result);
}

static int checked_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *unused) {
    pthread_mutexattr_t attributes;
    (void)unused;
    num_held += 1;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    return pthread_mutex_init(lock, &attributes);
}

static int checked_mutex_destroy(pthread_mutex_t *lock) {
    num_held -= 1;
    num_misuses += pthread_mutex_destroy(lock) != 0;
    return 0;
}

static int counted_cond_init(pthread_cond_t *condition, const pthread_condattr_t *attributes) {
    num_held += 1;
    return pthread_cond_init(condition, attributes);
}

static int counted_cond_destroy(pthread_cond_t *condition) {
    num_held -= 1;
    return pthread_cond_destroy(condition);
}

static int checked_lock(pthread_mutex_t *lock) {
    num_misuses += pthread_mutex_lock(lock) != 0;
    return num_locks++;
}

static int checked_unlock(pthread_mutex_t *lock) {
    num_locks--;
    num_misuses += pthread_mutex_unlock(lock) != 0;
    return 0;
}

static int checked_wait(pthread_cond_t *condition, pthread_mutex_t *lock) {
    num_misuses += num_locks != 1;
    num_waiting += 1;
    int error = pthread_cond_wait(condition, lock);
    num_waiting -= 1;
    return error;
}

static int checked_signal(pthread_cond_t *condition) {
    num_misuses += num_locks != 1;
    return pthread_cond_signal(condition);
}

static int checked_broadcast(pthread_cond_t *condition) {
    num_misuses += num_locks != 1;
    return pthread_cond_broadcast(condition);
}

#define calloc counted_calloc
#define aligned_alloc counted_aligned_alloc
#define free counted_free
#define pthread_create counted_create
#define pthread_join counted_join
#define pthread_mutex_init checked_mutex_init
#define pthread_mutex_destroy checked_mutex_destroy
#define pthread_cond_init counted_cond_init
#define pthread_cond_destroy counted_cond_destroy
#define pthread_mutex_lock checked_lock
#define pthread_mutex_unlock checked_unlock
#define pthread_cond_wait checked_wait
#define pthread_cond_signal checked_signal
#define pthread_cond_broadcast checked_broadcast

#include "delta.c"
#include "pool.c"
#include "slice.c"

/* Return how many threads a pool believes to be asleep. */
int num_believed_asleep(const Pool *pool) { return pool->num_asleep; }

/* Write the exponential functions, or the hyperbolic tangents, of x `[size]`, which is a multiple of WIDE_LANES. */
void exp_of_each(const float *x, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += WIDE_LANES) store_wide(to + i, exp_wide(load_wide(x + i)));
}
void tanh_of_each(const float *x, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += WIDE_LANES) store_wide(to + i, tanh_wide(load_wide(x + i)));
}
