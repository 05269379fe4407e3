// What this machine's memory can do: the roof over every decode figure.
#include "model.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SHARES = 64 };

typedef struct {
    const uint64_t *data;
    size_t words;
    int shares;
    uint64_t *sums;
} read_t;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_share(void *arg, walk_t *walk) {
    const read_t *r = arg;
    const size_t share = r->words / (size_t)r->shares / 32 * 32;
    for (int k; (k = pool_take(walk, r->shares, 1)) >= 0; pool_done(walk, r->shares, 1)) {
        const uint64_t *p = r->data + (size_t)k * share;
        uint64_t s[32] = {0};
        for (size_t i = 0; i < share; i += 32)
            for (int j = 0; j < 32; j++) s[j] ^= p[i + (size_t)j];
        for (int j = 1; j < 32; j++) s[0] ^= s[j];
        r->sums[k] = s[0]; // so that the reading is not optimized away
    }
    pool_meet(walk, r->shares);
}

// Reads `bytes` with all threads `repeats` times; seconds[i] is the time of each. Returns -1 when memory ran out.
EXPORT int roost_measure_read(int threads, size_t bytes, int repeats, double *seconds) {
    pool_t *pool = pool_new(threads, 1);
    uint8_t *data = aligned_zeroed(bytes);
    uint64_t *sums = aligned_zeroed(SHARES * sizeof(uint64_t));
    int failed = !pool || !data || !sums;
    if (!failed) {
        memset(data, 1, bytes);
        read_t r = {(const uint64_t *)data, bytes / 8, SHARES, sums};
        pool_begin(pool), pool_run(pool, read_share, &r);
        for (int i = 0; i < repeats; i++) {
            double t = now();
            pool_begin(pool), pool_run(pool, read_share, &r);
            seconds[i] = now() - t;
        }
    }
    pool_free(pool), free(data), free(sums);
    return failed ? -1 : 0;
}
