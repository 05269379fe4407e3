// 8 rows at a time times 1 to 4 tokens with the dot product instructions: 4 rows by 4 inputs in a register, the
// activations of 16 inputs in another, one lane of it a step.
#pragma once
#include "common.h"

// Codes of inputs 4c .. 4c + 3 (low) and 16 + 4c .. (high) of four rows, for formats below 8 bits.
INLINE void codes(const int bits, const int c, const uint8_t *q, const uint8_t *high, int8x16_t *lo, int8x16_t *hi) {
    uint8x16_t w = vld1q_u8(q + c * 64), l = vandq_u8(w, vdupq_n_u8(15)), h = vshrq_n_u8(w, 4);
    if (bits == 5) {
        uint8x16_t p = vld1q_u8(high);
        l = vorrq_u8(l, vandq_u8(vshlq_u8(p, vdupq_n_s8((int8_t)(4 - c))), vdupq_n_u8(16)));
        h = vorrq_u8(h, vandq_u8(vshlq_u8(p, vdupq_n_s8((int8_t)-c)), vdupq_n_u8(16)));
    }
    if (bits == 6) {
        int8x16_t by = vdupq_n_s8((int8_t)(4 - 2 * c));
        l = vorrq_u8(l, vandq_u8(vshlq_u8(vld1q_u8(high), by), vdupq_n_u8(48)));
        h = vorrq_u8(h, vandq_u8(vshlq_u8(vld1q_u8(high + 64), by), vdupq_n_u8(48)));
    }
    *lo = vreinterpretq_s8_u8(l), *hi = vreinterpretq_s8_u8(h);
}

#define LANE(acc, w, x, c) \
    ((c) == 0   ? vdotq_laneq_s32(acc, w, x, 0) \
     : (c) == 1 ? vdotq_laneq_s32(acc, w, x, 1) \
     : (c) == 2 ? vdotq_laneq_s32(acc, w, x, 2) \
                : vdotq_laneq_s32(acc, w, x, 3))

INLINE float32x4_t half4(const half_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

INLINE void gemm_tile(const int bits, const int group, const int symmetric, const int n, const mat_t *m, int block,
                      const act_t *x, int t0, float *out) {
    const uint8_t *data = m->data + (size_t)block * m->block_bytes;
    const int G = m->num_groups;
    const int8_t *xq = x->q + (size_t)t0 * x->cols;
    const size_t ld = (size_t)x->cols;
    for (int row = 0; row < ROWS; row += 8) {
        const uint8_t *q = data + row * 4;
        float32x4_t acc[4][2];
        for (int t = 0; t < n; t++) acc[t][0] = acc[t][1] = vdupq_n_f32(0);
        for (int g = 0; g < G; g++, q += m->record_bytes) {
            const uint8_t *high = q + high_at(bits);
            const half_t *scales = (const half_t *)(q + scale_at(bits) - row * 2), *biases = (const half_t *)(q + bias_at(bits, group) - row * 2);
            int32x4_t s[4][2], low[4][2]; // sums of the group, or of its second and first half
            int8x16_t x0[4], x1[4];
            for (int t = 0; t < n; t++) {
                s[t][0] = s[t][1] = low[t][0] = low[t][1] = vdupq_n_s32(0);
                x0[t] = vld1q_s8(xq + t * ld + g * GROUP), x1[t] = vld1q_s8(xq + t * ld + g * GROUP + 16);
            }
            for (int c = 0; c < 4; c++)
                for (int i = 0; i < 2; i++) {
                    int8x16_t lo, hi;
                    if (bits == 8) { // made signed, as the instruction wants
                        lo = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q + c * 64 + i * 16), vdupq_n_u8(0x80)));
                        hi = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q + 256 + c * 64 + i * 16), vdupq_n_u8(0x80)));
                    } else
                        codes(bits, c, q + i * 16, high + i * 16, &lo, &hi);
                    for (int t = 0; t < n; t++) {
                        int32x4_t *first = group == 16 ? &low[t][i] : &s[t][i];
                        *first = LANE(*first, lo, x0[t], c);
                        s[t][i] = LANE(s[t][i], hi, x1[t], c);
                    }
                }
            for (int t = 0; t < n; t++) {
                const size_t at = (size_t)(t0 + t) * G + g;
                const float xs = x->scale[at];
                for (int i = 0; i < 2; i++) {
                    if (group == 16) { // symmetric, two scales
                        float32x4_t w0 = vmulq_n_f32(half4(scales + i * 4), xs);
                        float32x4_t w1 = vmulq_n_f32(half4(scales + ROWS + i * 4), xs);
                        int32x4_t z0 = vdupq_n_s32(x->sum16[2 * at] * (1 << (bits - 1)));
                        int32x4_t z1 = vdupq_n_s32(x->sum16[2 * at + 1] * (1 << (bits - 1)));
                        acc[t][i] = vfmaq_f32(acc[t][i], vcvtq_f32_s32(vsubq_s32(low[t][i], z0)), w0);
                        acc[t][i] = vfmaq_f32(acc[t][i], vcvtq_f32_s32(vsubq_s32(s[t][i], z1)), w1);
                        continue;
                    }
                    int32x4_t sum = s[t][i];
                    if (symmetric && bits != 8) sum = vsubq_s32(sum, vdupq_n_s32(x->sum[at] * (1 << (bits - 1))));
                    if (!symmetric && bits == 8) sum = vaddq_s32(sum, vdupq_n_s32(x->sum[at] * 128));
                    acc[t][i] = vfmaq_f32(acc[t][i], vcvtq_f32_s32(sum), vmulq_n_f32(half4(scales + i * 4), xs));
                    if (!symmetric)
                        acc[t][i] = vfmaq_f32(acc[t][i], half4(biases + i * 4), vdupq_n_f32(x->weighted[at]));
                }
            }
        }
        for (int t = 0; t < n; t++)
            for (int i = 0; i < 2; i++) vst1q_f32(out + t * ROWS + row + i * 4, vmulq_n_f32(acc[t][i], m->unit));
    }
}
#define GEMM_TOKENS 4
#include "gemm_dispatch.h"
