// 16 rows times 1 to 8 tokens with VNNI: four unsigned codes times four signed activations added into 32 bits.
#pragma once
#include "common.h"
#include <string.h>

INLINE __m512i four(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// Codes of inputs 4c .. 4c + 3 (low) and 16 + 4c .. (high) of sixteen rows, for formats below 8 bits.
INLINE void codes(const int bits, const int c, const uint8_t *q, const uint8_t *high, __m512i *lo, __m512i *hi) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i w = _mm512_loadu_si512(q + c * 64);
    *lo = _mm512_and_si512(w, nibble);
    *hi = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
    if (bits == 5) {
        const __m512i bit = _mm512_set1_epi8(16);
        __m512i h = _mm512_loadu_si512(high);
        *lo = _mm512_or_si512(*lo, _mm512_and_si512(_mm512_slli_epi16(h, 4 - c), bit));
        *hi = _mm512_or_si512(*hi, _mm512_and_si512(_mm512_srli_epi16(h, c), bit));
    }
    if (bits == 6) {
        const __m512i two = _mm512_set1_epi8(48);
        __m512i h0 = _mm512_loadu_si512(high), h1 = _mm512_loadu_si512(high + 64);
        h0 = c == 3 ? _mm512_srli_epi16(h0, 2) : _mm512_slli_epi16(h0, 4 - 2 * c);
        h1 = c == 3 ? _mm512_srli_epi16(h1, 2) : _mm512_slli_epi16(h1, 4 - 2 * c);
        *lo = _mm512_or_si512(*lo, _mm512_and_si512(h0, two));
        *hi = _mm512_or_si512(*hi, _mm512_and_si512(h1, two));
    }
}

INLINE void gemm_tile(const int bits, const int group, const int symmetric, const int n, const mat_t *m, int block,
                      const act_t *x, int t0, float *out) {
    const uint8_t *q = m->data + (size_t)block * m->block_bytes;
    const int G = m->num_groups;
    const int8_t *xq = x->q + (size_t)t0 * x->cols;
    const size_t ld = (size_t)x->cols;
    __m512 acc[TILE_TOKENS];
    for (int t = 0; t < n; t++) acc[t] = _mm512_setzero_ps();
    for (int g = 0; g < G; g++, q += m->record_bytes) {
        const uint8_t *high = q + high_at(bits);
        const half_t *scales = (const half_t *)(q + scale_at(bits)), *biases = (const half_t *)(q + bias_at(bits, group));
        const int8_t *xg = xq + g * GROUP;
        __m512i s[TILE_TOKENS], low[TILE_TOKENS]; // sums of the group, or of its second and first half
        for (int t = 0; t < n; t++) s[t] = low[t] = _mm512_setzero_si512();
        if (bits == 8) {
            for (int c = 0; c < 8; c++) {
                __m512i w = _mm512_loadu_si512(q + c * 64);
                for (int t = 0; t < n; t++) s[t] = _mm512_dpbusd_epi32(s[t], w, four(xg + t * ld + c * 4));
            }
        } else {
            for (int c = 0; c < 4; c++) {
                __m512i lo, hi;
                codes(bits, c, q, high, &lo, &hi);
                for (int t = 0; t < n; t++) {
                    __m512i *first = group == 16 ? low + t : s + t;
                    *first = _mm512_dpbusd_epi32(*first, lo, four(xg + t * ld + c * 4));
                    s[t] = _mm512_dpbusd_epi32(s[t], hi, four(xg + t * ld + 16 + c * 4));
                }
            }
        }
        const size_t at = (size_t)t0 * G + g;
        if (group == 16) { // symmetric, two scales
            __m512 w0 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
            __m512 w1 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + ROWS)));
            for (int t = 0; t < n; t++) {
                const int32_t *sums = x->sum16 + 2 * (at + (size_t)t * G);
                __m512 xs = _mm512_set1_ps(x->scale[at + (size_t)t * G]);
                __m512i z0 = _mm512_slli_epi32(_mm512_set1_epi32(sums[0]), bits - 1);
                __m512i z1 = _mm512_slli_epi32(_mm512_set1_epi32(sums[1]), bits - 1);
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(low[t], z0)), _mm512_mul_ps(w0, xs), acc[t]);
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(s[t], z1)), _mm512_mul_ps(w1, xs), acc[t]);
            }
            continue;
        }
        __m512 w = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
        __m512 b = symmetric ? _mm512_setzero_ps() : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)biases));
        for (int t = 0; t < n; t++) {
            const size_t i = at + (size_t)t * G;
            __m512i sum = s[t];
            if (symmetric) sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(_mm512_set1_epi32(x->sum[i]), bits - 1));
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(w, _mm512_set1_ps(x->scale[i])), acc[t]);
            if (!symmetric) acc[t] = _mm512_fmadd_ps(b, _mm512_set1_ps(x->weighted[i]), acc[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(out + t * ROWS, _mm512_mul_ps(acc[t], _mm512_set1_ps(m->unit)));
}
#define GEMM_TOKENS 8
#include "gemm_dispatch.h"
