#include "pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS_IN_STEP 2000      // some tens of microseconds: a barrier is usually closer than that
#define SPINS_BETWEEN_STEPS 6000 // the caller samples and schedules between two steps

struct pool {
    int num_threads;
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint generation; // of the barrier
    _Alignas(64) atomic_uint job;
    _Alignas(64) atomic_int sleepers;
    atomic_int stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void (*work)(void *, int);
    void *arg;
    int num_started;
    struct worker {
        pool_t *pool;
        int index;
        pthread_t thread;
    } workers[];
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for_change(pool_t *p, atomic_uint *value, unsigned old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != old) return;
        relax();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1); // sequentially consistent: wake() changes the value first, then looks here
    while (atomic_load(value) == old) pthread_cond_wait(&p->changed, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void change(pool_t *p, atomic_uint *value) {
    atomic_fetch_add(value, 1);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
    }
}

void pool_barrier(pool_t *p) {
    if (p->num_threads == 1) return;
    unsigned generation = atomic_load(&p->generation);
    if ((int)atomic_fetch_add(&p->arrived, 1) == p->num_threads - 1) {
        atomic_store(&p->arrived, 0);
        change(p, &p->generation);
    } else
        wait_for_change(p, &p->generation, generation, SPINS_IN_STEP);
}

static void *loop(void *arg) {
    struct worker *w = arg;
    pool_t *p = w->pool;
    for (unsigned job = 0;; job++) {
        wait_for_change(p, &p->job, job, SPINS_BETWEEN_STEPS);
        if (atomic_load(&p->stop)) return NULL;
        p->work(p->arg, w->index);
        pool_barrier(p);
    }
}

void pool_run(pool_t *p, void (*work)(void *, int), void *arg) {
    p->work = work, p->arg = arg;
    if (p->num_threads > 1) change(p, &p->job);
    work(arg, 0);
    pool_barrier(p);
}

int pool_size(const pool_t *p) { return p->num_threads; }

pool_t *pool_new(int n) {
    if (n < 1) return NULL;
    size_t bytes = (sizeof(pool_t) + (size_t)n * sizeof(struct worker) + 63) / 64 * 64;
    pool_t *p = NULL;
    if (posix_memalign((void **)&p, 64, bytes)) return NULL;
    *p = (pool_t){.num_threads = n};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    for (int i = 1; i < n; i++) {
        p->workers[i] = (struct worker){.pool = p, .index = i};
        if (pthread_create(&p->workers[i].thread, NULL, loop, &p->workers[i])) {
            pool_free(p);
            return NULL;
        }
        p->num_started = i;
    }
    return p;
}

void pool_free(pool_t *p) {
    if (!p) return;
    atomic_store(&p->stop, 1);
    change(p, &p->job);
    for (int i = 1; i <= p->num_started; i++) pthread_join(p->workers[i].thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
