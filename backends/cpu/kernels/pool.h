// Threads that walk the phases of a step together.
//
// A phase is a number of tasks. Tasks are taken, not dealt, and a phase ends when its tasks are done, not when all
// threads have come: a thread that the system holds up delays nobody unless it holds a task, and finds its way back to
// the others by itself, in the same step or in the next. A thread that waits spins briefly, then sleeps, so that a busy
// neighbour on the machine costs a share and not a standstill.
#pragma once
#include <stdint.h>

typedef struct pool pool_t;

typedef struct { // one thread's walk through a step
    pool_t *pool;
    uint32_t step;
    int thread, phase;
} walk_t;

pool_t *pool_new(int num_threads, int max_phases); // NULL when threads or memory cannot be had
void pool_free(pool_t *pool);
// Closes the step before: a late thread finds nothing to take any more. Only then may the caller change what `work` reads.
// Outside tasks a late thread may still read numbers that change; it can do nothing with them.
void pool_begin(pool_t *pool);
// Runs work(arg, walk) here and on all threads that have time. `work` takes all tasks of its phases by the calls below,
// waits for each phase, and reaches for memory in tasks only. Call pool_begin() before.
void pool_run(pool_t *pool, void (*work)(void *arg, walk_t *walk), void *arg);
// The first of `chunk` tasks for this thread to do, -1 when none of `count` is left (or the step is over).
int pool_take(const walk_t *walk, int count, int chunk);
void pool_done(const walk_t *walk, int count, int num_done);
// Returns when all `count` tasks of the phase are done; the walk is then in the next phase.
void pool_meet(walk_t *walk, int count);
