#include "pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPINS_IN_STEP 2000       // some tens of microseconds: the others are usually nearer than that
#define SPINS_BETWEEN_STEPS 6000 // the caller samples and schedules between two steps

typedef struct { // upper half: the step they belong to, lower half: tasks
    _Alignas(64) atomic_uint_fast64_t taken;
    atomic_uint_fast64_t done;
} phase_t;

struct pool {
    int num_threads, max_phases;
    phase_t *phases;
    _Alignas(64) atomic_uint step;
    _Alignas(64) atomic_int sleepers;
    atomic_int stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void (*work)(void *, walk_t *);
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

static void wake(pool_t *p) {
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
    }
}

// Sequentially consistent on both sides: a sleeper counts itself before it looks, a waker changes the value before it
// looks for sleepers, so that one of them sees the other.
#define WAIT_WHILE(p, spins, condition) \
    do { \
        int left_ = (spins); \
        while ((condition) && left_--) relax(); \
        if (!(condition)) break; \
        pthread_mutex_lock(&(p)->lock); \
        atomic_fetch_add(&(p)->sleepers, 1); \
        while (condition) pthread_cond_wait(&(p)->changed, &(p)->lock); \
        atomic_fetch_sub(&(p)->sleepers, 1); \
        pthread_mutex_unlock(&(p)->lock); \
    } while (0)

int pool_take(const walk_t *w, int count, int chunk) {
    atomic_uint_fast64_t *taken = &w->pool->phases[w->phase].taken;
    uint_fast64_t v = atomic_load_explicit(taken, memory_order_acquire);
    do
        if ((uint32_t)(v >> 32) != w->step || (uint32_t)v >= (uint32_t)count) return -1;
    while (!atomic_compare_exchange_weak(taken, &v, v + (uint32_t)chunk));
    return (int)(uint32_t)v;
}

void pool_done(const walk_t *w, int count, int num_done) {
    uint_fast64_t v = atomic_fetch_add(&w->pool->phases[w->phase].done, (uint32_t)num_done);
    if ((uint32_t)v + (uint32_t)num_done == (uint32_t)count) wake(w->pool);
}

void pool_meet(walk_t *w, int count) {
    atomic_uint_fast64_t *done = &w->pool->phases[w->phase].done;
    const uint_fast64_t mine = (uint_fast64_t)w->step << 32;
    uint_fast64_t v;
    // anything but a smaller count of this very step lets it go on
    WAIT_WHILE(w->pool, SPINS_IN_STEP, (v = atomic_load(done)) >= mine && v < mine + (uint32_t)count);
    w->phase++;
}

static void *loop(void *arg) {
    struct worker *worker = arg;
    pool_t *p = worker->pool;
    for (unsigned step = 0;;) {
        WAIT_WHILE(p, SPINS_BETWEEN_STEPS, atomic_load(&p->step) == step && !atomic_load(&p->stop));
        if (atomic_load(&p->stop)) return NULL;
        step = atomic_load(&p->step);
        walk_t walk = {p, step, worker->index, 0};
        p->work(p->arg, &walk);
    }
}

static unsigned next_step(pool_t *p) {
    unsigned step = atomic_load(&p->step) + 1;
    return step ? step : 1; // never the number that workers start with
}

void pool_begin(pool_t *p) {
    const unsigned step = next_step(p);
    for (int i = 0; i < p->max_phases; i++) {
        atomic_store_explicit(&p->phases[i].done, (uint_fast64_t)step << 32, memory_order_relaxed);
        atomic_store_explicit(&p->phases[i].taken, (uint_fast64_t)step << 32, memory_order_relaxed);
    }
    atomic_thread_fence(memory_order_seq_cst);
}

void pool_run(pool_t *p, void (*work)(void *, walk_t *), void *arg) {
    const unsigned step = next_step(p);
    p->work = work, p->arg = arg;
    atomic_store(&p->step, step);
    wake(p);
    walk_t walk = {p, step, 0, 0};
    work(arg, &walk);
}

pool_t *pool_new(int n, int max_phases) {
    if (n < 1) return NULL;
    pool_t *p = NULL;
    size_t bytes = (sizeof(pool_t) + (size_t)n * sizeof(struct worker) + 63) / 64 * 64;
    if (posix_memalign((void **)&p, 64, bytes)) return NULL;
    memset(p, 0, bytes);
    p->num_threads = n, p->max_phases = max_phases;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    if (posix_memalign((void **)&p->phases, 64, (size_t)max_phases * sizeof(phase_t))) p->phases = NULL;
    int ok = p->phases != NULL;
    for (int i = 1; ok && i < n; i++) {
        p->workers[i] = (struct worker){.pool = p, .index = i};
        ok = !pthread_create(&p->workers[i].thread, NULL, loop, &p->workers[i]);
        if (ok) p->num_started = i;
    }
    if (ok) return p;
    pool_free(p);
    return NULL;
}

void pool_free(pool_t *p) {
    if (!p) return;
    atomic_store(&p->stop, 1);
    wake(p);
    for (int i = 1; i <= p->num_started; i++) pthread_join(p->workers[i].thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p->phases);
    free(p);
}
