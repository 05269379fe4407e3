// Sixteen floats in plain C.
#pragma once
#include "common.h"
#include <math.h>
#include <string.h>

typedef struct { float v[16]; } v16;
#define EACH(expr) \
    v16 r; \
    for (int i = 0; i < 16; i++) r.v[i] = expr; \
    return r

INLINE v16 v_set(float x) { EACH(x); }
INLINE v16 v_load(const float *p) { EACH(p[i]); }
INLINE void v_store(float *p, v16 x) { memcpy(p, x.v, sizeof x.v); }
INLINE v16 v_add(v16 x, v16 y) { EACH(x.v[i] + y.v[i]); }
INLINE v16 v_sub(v16 x, v16 y) { EACH(x.v[i] - y.v[i]); }
INLINE v16 v_mul(v16 x, v16 y) { EACH(x.v[i] * y.v[i]); }
INLINE v16 v_div(v16 x, v16 y) { EACH(x.v[i] / y.v[i]); }
#ifdef __FP_FAST_FMAF
INLINE v16 v_fma(v16 x, v16 y, v16 z) { EACH(__builtin_fmaf(x.v[i], y.v[i], z.v[i])); }
#else // without the instruction, fmaf is a library call a hundred times slower than this
INLINE v16 v_fma(v16 x, v16 y, v16 z) { EACH(x.v[i] * y.v[i] + z.v[i]); }
#endif
INLINE v16 v_max(v16 x, v16 y) { EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
INLINE v16 v_min(v16 x, v16 y) { EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
INLINE v16 v_abs(v16 x) { EACH(fabsf(x.v[i])); }
INLINE v16 v_load_half(const half_t *p) { EACH(half_to_float(p[i])); }
INLINE void v_store_half(half_t *p, v16 x) {
    for (int i = 0; i < 16; i++) p[i] = float_to_half(x.v[i]);
}
INLINE float bits_to_float(uint32_t u) {
    union { uint32_t u; float f; } v = {u};
    return v.f;
}
INLINE uint32_t float_to_bits(float f) {
    union { float f; uint32_t u; } v = {f};
    return v.u;
}
INLINE v16 v_load_bf16(const uint16_t *p) { EACH(bits_to_float((uint32_t)p[i] << 16)); }
INLINE float v_sum(v16 x) { // the same tree as everywhere: + 8, + 4, + 2, + 1
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) x.v[i] += x.v[i + n];
    return x.v[0];
}
INLINE float v_hmax(v16 x) {
    float m = x.v[0];
    for (int i = 1; i < 16; i++) m = x.v[i] > m ? x.v[i] : m;
    return m;
}
INLINE v16 v_select_range(v16 x, v16 y, int lo, int hi) { EACH(i >= lo && i < hi ? x.v[i] : y.v[i]); }
INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) { EACH(x.v[i] < limit.v[i] ? 0 : y.v[i]); }
INLINE v16 v_ldexp(v16 p, v16 n) { EACH(bits_to_float(float_to_bits(p.v[i]) + (float_to_bits(n.v[i]) << 23))); }
INLINE int v_store_i8(int8_t *p, v16 x) {
    int sum = 0;
    for (int i = 0; i < 16; i++) {
        float r = nearbyintf(x.v[i]);
        int c = r >= 127 ? 127 : r > -128 ? (int)r : -128; // a NaN lands on -128, as on x86
        p[i] = (int8_t)c, sum += c;
    }
    return sum;
}
