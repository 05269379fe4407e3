// A pool of threads that run one function together. A thread that waits spins briefly, then sleeps, so that a busy
// neighbour on the machine costs a share and not a standstill.
#pragma once

typedef struct pool pool_t;

pool_t *pool_new(int num_threads); // NULL when threads cannot be had
void pool_free(pool_t *pool);
int pool_size(const pool_t *pool);
// Runs work(arg, 0) here and work(arg, 1 ..) on the others; returns when all have returned.
void pool_run(pool_t *pool, void (*work)(void *arg, int thread), void *arg);
// Called by every thread of a run: none goes on before all have come.
void pool_barrier(pool_t *pool);
