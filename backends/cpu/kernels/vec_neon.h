// Sixteen floats in four NEON registers.
#pragma once
#include "common.h"
#include <arm_neon.h>

typedef float32x4x4_t v16;
#define EACH(expr) \
    v16 r; \
    for (int i = 0; i < 4; i++) r.val[i] = expr; \
    return r

INLINE v16 v_set(float x) { EACH(vdupq_n_f32(x)); }
INLINE v16 v_load(const float *p) { EACH(vld1q_f32(p + 4 * i)); }
INLINE void v_store(float *p, v16 x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.val[i]);
}
INLINE v16 v_add(v16 x, v16 y) { EACH(vaddq_f32(x.val[i], y.val[i])); }
INLINE v16 v_sub(v16 x, v16 y) { EACH(vsubq_f32(x.val[i], y.val[i])); }
INLINE v16 v_mul(v16 x, v16 y) { EACH(vmulq_f32(x.val[i], y.val[i])); }
INLINE v16 v_div(v16 x, v16 y) { EACH(vdivq_f32(x.val[i], y.val[i])); }
INLINE v16 v_fma(v16 x, v16 y, v16 z) { EACH(vfmaq_f32(z.val[i], x.val[i], y.val[i])); }
INLINE v16 v_max(v16 x, v16 y) { EACH(vmaxq_f32(x.val[i], y.val[i])); }
INLINE v16 v_min(v16 x, v16 y) { EACH(vminq_f32(x.val[i], y.val[i])); }
INLINE v16 v_abs(v16 x) { EACH(vabsq_f32(x.val[i])); }
INLINE v16 v_load_half(const half_t *p) { EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INLINE void v_store_half(half_t *p, v16 x) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.val[i])));
}
INLINE v16 v_load_bf16(const uint16_t *p) { EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
INLINE float v_sum(v16 x) { // the same tree as everywhere: + 8, + 4, + 2, + 1
    float32x4_t q = vaddq_f32(vaddq_f32(x.val[0], x.val[2]), vaddq_f32(x.val[1], x.val[3]));
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
INLINE float v_hmax(v16 x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.val[0], x.val[2]), vmaxq_f32(x.val[1], x.val[3])));
}
INLINE v16 v_select_range(v16 x, v16 y, int lo, int hi) {
    const int32_t first[4] = {0, 1, 2, 3};
    int32x4_t lane = vld1q_s32(first);
    v16 r;
    for (int i = 0; i < 4; i++, lane = vaddq_s32(lane, vdupq_n_s32(4))) {
        uint32x4_t in = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
        r.val[i] = vbslq_f32(in, x.val[i], y.val[i]);
    }
    return r;
}
INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) {
    EACH(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.val[i]), vcltq_f32(x.val[i], limit.val[i]))));
}
INLINE v16 v_ldexp(v16 p, v16 n) {
    EACH(vreinterpretq_f32_s32(
        vaddq_s32(vreinterpretq_s32_f32(p.val[i]), vshlq_n_s32(vreinterpretq_s32_f32(n.val[i]), 23))));
}
INLINE int v_store_i8(int8_t *p, v16 x) {
    int32x4_t c[4];
    for (int i = 0; i < 4; i++) c[i] = vcvtnq_s32_f32(x.val[i]);
    int16x8_t a = vcombine_s16(vqmovn_s32(c[0]), vqmovn_s32(c[1])), b = vcombine_s16(vqmovn_s32(c[2]), vqmovn_s32(c[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(c[0], c[1]), vaddq_s32(c[2], c[3])));
}
