// What this machine's memory can do: the roof over every decode figure.
#include "model.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    const uint64_t *data;
    size_t words;
    int threads;
    uint64_t *sums;
} read_t;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_share(void *arg, int thread) {
    const read_t *r = arg;
    size_t share = r->words / (size_t)r->threads / 32 * 32;
    const uint64_t *p = r->data + (size_t)thread * share;
    uint64_t s[32] = {0};
    for (size_t i = 0; i < share; i += 32)
        for (int k = 0; k < 32; k++) s[k] ^= p[i + (size_t)k];
    for (int k = 1; k < 32; k++) s[0] ^= s[k];
    r->sums[thread * 8] = s[0];
}

// Reads `bytes` with all threads `repeats` times; seconds[i] is the time of each. Returns -1 when memory ran out.
EXPORT int roost_measure_read(int threads, size_t bytes, int repeats, double *seconds) {
    pool_t *pool = pool_new(threads);
    uint8_t *data = aligned_zeroed(bytes);
    uint64_t *sums = aligned_zeroed((size_t)threads * 64);
    int failed = !pool || !data || !sums;
    if (!failed) {
        memset(data, 1, bytes);
        read_t r = {(const uint64_t *)data, bytes / 8, threads, sums};
        pool_run(pool, read_share, &r);
        for (int i = 0; i < repeats; i++) {
            double t = now();
            pool_run(pool, read_share, &r);
            seconds[i] = now() - t;
        }
    }
    pool_free(pool), free(data), free(sums);
    return failed ? -1 : 0;
}
