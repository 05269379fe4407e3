// The panels in plain C, one token at a time: the reference that the other instruction sets are tested against.
#pragma once
#include "common.h"

INLINE int code(const int bits, int k, const uint8_t *q, const uint8_t *high, int row) {
    if (bits == 8) return q[(k / 4) * 64 + row * 4 + k % 4];
    int c = k % 16 / 4, at = row * 4 + k % 4, upper = k / 16;
    int v = upper ? q[c * 64 + at] >> 4 : q[c * 64 + at] & 15;
    if (bits == 5) v |= (high[at] >> (c + 4 * upper) & 1) << 4;
    if (bits == 6) v |= (high[64 * upper + at] >> (2 * c) & 3) << 4;
    return v;
}

INLINE void gemm_tile(const int bits, const int group, const int symmetric, const int n, const mat_t *m, int block,
                      const act_t *x, int t0, float *out) {
    const uint8_t *data = m->data + (size_t)block * m->block_bytes;
    const int G = m->num_groups;
    for (int t = t0; t < t0 + n; t++, out += ROWS) {
        v16 acc = v_set(0);
        for (int g = 0; g < G; g++) {
            const uint8_t *q = data + (size_t)g * m->record_bytes, *high = q + high_at(bits);
            const half_t *scales = (const half_t *)(q + scale_at(bits)), *biases = (const half_t *)(q + bias_at(bits, group));
            const int8_t *xq = x->q + (size_t)t * x->cols + g * GROUP;
            const size_t at = (size_t)t * G + g;
            for (int part = 0; part < 32 / group; part++) {
                v16 sum, w, b;
                for (int r = 0; r < ROWS; r++) {
                    int s = 0;
                    for (int k = part * group; k < (part + 1) * group; k++) s += code(bits, k, q, high, r) * xq[k];
                    if (symmetric) s -= (group == 16 ? x->sum16[2 * at + part] : x->sum[at]) * (1 << (bits - 1));
                    sum.v[r] = (float)s;
                    w.v[r] = half_to_float(scales[part * ROWS + r]) * x->scale[at];
                    b.v[r] = symmetric ? 0 : half_to_float(biases[r]);
                }
                acc = v_fma(sum, w, acc);
                if (!symmetric) acc = v_fma(b, v_set(x->weighted[at]), acc);
            }
        }
        v_store(out, v_mul(acc, v_set(m->unit)));
    }
}
#define GEMM_TOKENS 4
#include "gemm_dispatch.h"
