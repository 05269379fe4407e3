// Kernels written once on `v16` and compiled for every instruction set. The including file has defined v16 and its
// operations, QR (query rows that fit in registers at once) and gemm_quantized().
#pragma once
#include "common.h"
#include <math.h>

// exp by 2^n · e^r, |r| <= ln2 / 2, with the Taylor series to r^7: within 2 ulp from -87 to 88, 0 below, e^88 above.
INLINE v16 v_exp(v16 x) {
    const v16 magic = v_set(0x1.8p23f), low = v_set(-87.0f);
    v16 c = v_min(v_max(x, low), v_set(88.0f));
    v16 n = v_fma(c, v_set(0x1.715476p0f), magic), k = v_sub(n, magic);
    v16 r = v_fma(k, v_set(-0x1.62e4p-1f), c);
    r = v_fma(k, v_set(-0x1.7f7d1cp-20f), r);
    v16 p = v_fma(r, v_set(1 / 5040.0f), v_set(1 / 720.0f));
    p = v_fma(r, p, v_set(1 / 120.0f));
    p = v_fma(r, p, v_set(1 / 24.0f));
    p = v_fma(r, p, v_set(1 / 6.0f));
    p = v_fma(r, p, v_set(0.5f));
    p = v_fma(r, p, v_set(1.0f));
    p = v_fma(r, p, v_set(1.0f));
    return v_zero_below(x, low, v_ldexp(p, n));
}

static void rmsnorm(const float *x, const float *w, int n, float eps, float *out) {
    v16 s = v_set(0);
    for (int i = 0; i < n; i += 16) {
        v16 a = v_load(x + i);
        s = v_fma(a, a, s);
    }
    v16 r = v_set(1.0f / sqrtf(v_sum(s) / (float)n + eps));
    for (int i = 0; i < n; i += 16) v_store(out + i, v_mul(v_mul(v_load(x + i), r), v_load(w + i)));
}

static void add(float *x, const float *y, int n) {
    for (int i = 0; i < n; i += 16) v_store(x + i, v_add(v_load(x + i), v_load(y + i)));
}

static void scale(float *x, float s, int n) {
    for (int i = 0; i < n; i += 16) v_store(x + i, v_mul(v_load(x + i), v_set(s)));
}

// Codes are round(x · 127 / max|x|) of each group of 32. `col` and `n` are multiples of 32.
static void quantize(const float *x, int n, const act_t *a, int token, int col) {
    int8_t *q = a->q + (size_t)token * a->cols + col;
    size_t g = (size_t)token * a->num_groups + col / GROUP;
    if (a->f)
        for (int i = 0; i < n; i += 16) v_store(a->f + (size_t)token * a->cols + col + i, v_load(x + i));
    for (int i = 0; i < n; i += GROUP, g++) {
        v16 lo = v_load(x + i), hi = v_load(x + i + 16);
        float max = v_hmax(v_max(v_abs(lo), v_abs(hi)));
        v16 inverse = v_set(max > 0 ? 127.0f / max : 0);
        int s0 = v_store_i8(q + i, v_mul(lo, inverse)), s1 = v_store_i8(q + i + 16, v_mul(hi, inverse));
        a->scale[g] = max / 127.0f;
        a->weighted[g] = a->scale[g] * (float)(s0 + s1);
        a->sum[g] = s0 + s1;
        a->sum16[2 * g] = s0, a->sum16[2 * g + 1] = s1;
    }
}

// Half-rotation: lane i turns with lane i + head_dim / 2.
static void rope(float *x, const float *cos, const float *sin, int head_dim) {
    int h = head_dim / 2;
    for (int i = 0; i < h; i += 16) {
        v16 a = v_load(x + i), b = v_load(x + h + i), c = v_load(cos + i), s = v_load(sin + i);
        v_store(x + i, v_sub(v_mul(a, c), v_mul(b, s)));
        v_store(x + h + i, v_fma(a, s, v_mul(b, c)));
    }
}

static void gate(int activation, float *g, const float *up, int n) {
    const v16 one = v_set(1), zero = v_set(0);
    for (int i = 0; i < n; i += 16) {
        v16 x = v_load(g + i), u = x;
        if (activation == ACT_GELU_TANH) // x/2 (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
            u = v_mul(v_set(1.5957691216f), v_fma(v_mul(v_mul(x, x), x), v_set(0.044715f), x));
        x = v_div(x, v_add(one, v_exp(v_sub(zero, u))));
        v_store(g + i, v_mul(x, v_load(up + i)));
    }
}

static void to_half(const float *x, half_t *out, int n) {
    for (int i = 0; i < n; i += 16) v_store_half(out + i, v_load(x + i));
}

static void from_half(const half_t *x, float *out, int n) {
    for (int i = 0; i < n; i += 16) v_store(out + i, v_load_half(x + i));
}

INLINE v16 load_any(int is_half, const void *p, size_t i) {
    return is_half ? v_load_half((const half_t *)p + i) : v_load((const float *)p + i);
}

// out[r][32] = q[r] · keys, n rows at once; keys are [head_dim][32]
INLINE void page_scores(int n, int is_half, int head_dim, const float *q, const void *keys, float *out) {
    v16 a[QR], b[QR];
    for (int r = 0; r < n; r++) a[r] = b[r] = v_set(0);
    for (int d = 0; d < head_dim; d++) {
        v16 k0 = load_any(is_half, keys, (size_t)d * PAGE), k1 = load_any(is_half, keys, (size_t)d * PAGE + 16);
        for (int r = 0; r < n; r++) {
            v16 x = v_set(q[r * head_dim + d]);
            a[r] = v_fma(x, k0, a[r]), b[r] = v_fma(x, k1, b[r]);
        }
    }
    for (int r = 0; r < n; r++) v_store(out + r * PAGE, a[r]), v_store(out + r * PAGE + 16, b[r]);
}

// o[r] = o[r] · correction[r] + sum over j of p[r][j] · values[j], n rows and `width` columns at once
INLINE void page_values(int n, int is_half, int width, int head_dim, int lo, int hi, const float *p,
                        const float *correction, const void *values, float *o) {
    v16 a[QR * 4];
    const int w = width / 16;
    for (int r = 0; r < n; r++)
        for (int c = 0; c < w; c++)
            a[r * w + c] = v_mul(v_load(o + (size_t)r * head_dim + c * 16), v_set(correction[r]));
    for (int j = lo; j < hi; j++) {
        v16 v[4];
        for (int c = 0; c < w; c++) v[c] = load_any(is_half, values, (size_t)j * head_dim + c * 16);
        for (int r = 0; r < n; r++) {
            v16 x = v_set(p[r * PAGE + j]);
            for (int c = 0; c < w; c++) a[r * w + c] = v_fma(x, v[c], a[r * w + c]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int c = 0; c < w; c++) v_store(o + (size_t)r * head_dim + c * 16, a[r * w + c]);
}

INLINE void page_softmax(float *p, int lo, int hi, softmax_t *state, float *correction) {
    if (lo >= hi) { // this row sees nothing of the page: adding 0 · value leaves it as it is
        v_store(p, v_set(0)), v_store(p + 16, v_set(0));
        *correction = 1;
        return;
    }
    const v16 never = v_set(-INFINITY), zero = v_set(0);
    v16 s0 = v_select_range(v_load(p), never, lo, hi), s1 = v_select_range(v_load(p + 16), never, lo - 16, hi - 16);
    float max = v_hmax(v_max(s0, s1));
    if (state->max > max) max = state->max;
    v16 m = v_set(max);
    s0 = v_select_range(v_exp(v_sub(s0, m)), zero, lo, hi);
    s1 = v_select_range(v_exp(v_sub(s1, m)), zero, lo - 16, hi - 16);
    float c[16];
    v_store(c, v_exp(v_set(state->max - max)));
    *correction = c[0];
    state->sum = state->sum * c[0] + v_sum(v_add(s0, s1));
    state->max = max;
    v_store(p, s0), v_store(p + 16, s1);
}

static void attend(int rows, int head_dim, const float *q, const half_t *keys, const half_t *values, const int *lo,
                   const int *hi, softmax_t *state, float *o, float *work, float *page) {
    float *correction = work + (size_t)rows * PAGE;
    int first = PAGE, last = 0, r = 0;
    for (int i = 0; i < rows; i++) {
        if (lo[i] < hi[i] && lo[i] < first) first = lo[i];
        if (lo[i] < hi[i] && hi[i] > last) last = hi[i];
    }
    if (first >= last) return;
    if (rows > 2 * QR) { // many rows: widen the page once
        float *k = page, *v = page + (size_t)head_dim * PAGE;
        from_half(keys, k, head_dim * PAGE);
        from_half(values + (size_t)first * head_dim, v + (size_t)first * head_dim, (last - first) * head_dim);
        for (r = 0; r + QR <= rows; r += QR) page_scores(QR, 0, head_dim, q + (size_t)r * head_dim, k, work + r * PAGE);
        for (; r < rows; r++) page_scores(1, 0, head_dim, q + (size_t)r * head_dim, k, work + r * PAGE);
        for (r = 0; r < rows; r++) page_softmax(work + r * PAGE, lo[r], hi[r], state + r, correction + r);
        for (int c = 0; c < head_dim; c += 32) {
            for (r = 0; r + QR <= rows; r += QR)
                page_values(QR, 0, 32, head_dim, first, last, work + r * PAGE, correction + r, v + c,
                            o + (size_t)r * head_dim + c);
            for (; r < rows; r++)
                page_values(1, 0, 32, head_dim, first, last, work + r * PAGE, correction + r, v + c,
                            o + (size_t)r * head_dim + c);
        }
        return;
    }
    for (r = 0; r + QR <= rows; r += QR) page_scores(QR, 1, head_dim, q + (size_t)r * head_dim, keys, work + r * PAGE);
    for (; r < rows; r++) page_scores(1, 1, head_dim, q + (size_t)r * head_dim, keys, work + r * PAGE);
    for (r = 0; r < rows; r++) page_softmax(work + r * PAGE, lo[r], hi[r], state + r, correction + r);
    for (r = 0; r + QR <= rows; r += QR)
        for (int c = 0; c < head_dim; c += 32)
            page_values(QR, 1, 32, head_dim, first, last, work + r * PAGE, correction + r, values + c,
                        o + (size_t)r * head_dim + c);
    for (; r < rows; r++)
        for (int c = 0; c < head_dim;) {
            float *out = o + (size_t)r * head_dim + c;
            if (head_dim - c >= 64)
                page_values(1, 1, 64, head_dim, first, last, work + r * PAGE, correction + r, values + c, out), c += 64;
            else
                page_values(1, 1, 32, head_dim, first, last, work + r * PAGE, correction + r, values + c, out), c += 32;
        }
}

static void merge(int head_dim, softmax_t *total, float *o, const softmax_t *part, const float *po) {
    if (part->sum == 0) return;
    if (total->sum == 0) {
        *total = *part;
        for (int i = 0; i < head_dim; i += 16) v_store(o + i, v_load(po + i));
        return;
    }
    float max = total->max > part->max ? total->max : part->max, e[16];
    v_store(e, v_exp(v_set(total->max - max)));
    v16 a = v_set(e[0]);
    total->sum *= e[0];
    v_store(e, v_exp(v_set(part->max - max)));
    v16 b = v_set(e[0]);
    total->sum += part->sum * e[0];
    total->max = max;
    for (int i = 0; i < head_dim; i += 16)
        v_store(o + i, v_fma(v_load(po + i), b, v_mul(v_load(o + i), a)));
}

INLINE void gemm_float(const int kind, const int n, const mat_t *m, int block, const act_t *x, int t0, float *out) {
    const uint8_t *data = m->data + (size_t)block * m->block_bytes;
    v16 a[TILE_TOKENS];
    for (int t = 0; t < n; t++) a[t] = v_set(0);
    const float *f = x->f + (size_t)t0 * x->cols;
    for (int k = 0; k < m->cols; k++) {
        v16 w = kind == MAT_F16    ? v_load_half((const half_t *)data + (size_t)k * ROWS)
                : kind == MAT_BF16 ? v_load_bf16((const uint16_t *)data + (size_t)k * ROWS)
                                   : v_load((const float *)data + (size_t)k * ROWS);
        for (int t = 0; t < n; t++) a[t] = v_fma(w, v_set(f[(size_t)t * x->cols + k]), a[t]);
    }
    for (int t = 0; t < n; t++) v_store(out + t * ROWS, a[t]);
}

#define FLOAT_TILE(kind) \
    for (; n >= FLOAT_TOKENS; n -= FLOAT_TOKENS, t0 += FLOAT_TOKENS, out += FLOAT_TOKENS * ROWS) \
        gemm_float(kind, FLOAT_TOKENS, m, block, x, t0, out); \
    for (; n > 0; n--, t0++, out += ROWS) gemm_float(kind, 1, m, block, x, t0, out); \
    return

static void gemm(const mat_t *m, int block, const act_t *x, int t0, int n, float *out) {
    switch (m->kind) {
    case MAT_F16: FLOAT_TILE(MAT_F16);
    case MAT_BF16: FLOAT_TILE(MAT_BF16);
    case MAT_F32: FLOAT_TILE(MAT_F32);
    default: gemm_quantized(m, block, x, t0, n, out);
    }
}

#define ISA_TABLE(isa_name, tile_tokens) \
    {isa_name, tile_tokens, gemm, quantize, rmsnorm, add, scale, rope, gate, to_half, from_half, attend, merge}
