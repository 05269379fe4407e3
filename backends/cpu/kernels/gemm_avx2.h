// 16 rows times 1 to 4 tokens with maddubs: unsigned weight codes times signed activations, pairs summed in 16 bits.
// Codes are small enough to add several products there before widening: 8 of 4 bits, 4 of 5 bits, 2 of 6 bits
// (8 · 2 · 15 · 127 = 30480, 4 · 2 · 31 · 127 = 31496, 2 · 2 · 63 · 127 = 32004). Codes of 8 bits are made signed and their sign
// is moved to the activation: 2 · 128 · 127 = 32512.
#pragma once
#include "common.h"
#include <immintrin.h>
#include <string.h>

INLINE __m256i four(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

// Keeps the compiler from loading the activations of many steps ahead and spilling them.
INLINE void pin(__m256i *s) { __asm__ volatile("" : "+x"(*s) : : "memory"); }

// Codes of inputs 4c .. 4c + 3 (low) and 16 + 4c .. (high) of eight rows, for formats below 8 bits.
INLINE void codes(const int bits, const int c, const uint8_t *q, const uint8_t *high, __m256i *lo, __m256i *hi) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i w = _mm256_loadu_si256((const __m256i *)(q + c * 64));
    *lo = _mm256_and_si256(w, nibble);
    *hi = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    if (bits == 5) { // bit c for the low half, bit 4 + c for the high half
        const __m256i bit = _mm256_set1_epi8(16);
        __m256i h = _mm256_loadu_si256((const __m256i *)high);
        *lo = _mm256_or_si256(*lo, _mm256_and_si256(_mm256_slli_epi16(h, 4 - c), bit));
        *hi = _mm256_or_si256(*hi, _mm256_and_si256(_mm256_srli_epi16(h, c), bit));
    }
    if (bits == 6) { // bits 2c, 2c + 1 of the first 64 bytes for the low half, of the next 64 for the high half
        const __m256i two = _mm256_set1_epi8(48);
        __m256i h0 = _mm256_loadu_si256((const __m256i *)high), h1 = _mm256_loadu_si256((const __m256i *)(high + 64));
        h0 = c == 3 ? _mm256_srli_epi16(h0, 2) : _mm256_slli_epi16(h0, 4 - 2 * c);
        h1 = c == 3 ? _mm256_srli_epi16(h1, 2) : _mm256_slli_epi16(h1, 4 - 2 * c);
        *lo = _mm256_or_si256(*lo, _mm256_and_si256(h0, two));
        *hi = _mm256_or_si256(*hi, _mm256_and_si256(h1, two));
    }
}

INLINE void gemm_tile(const int bits, const int group, const int symmetric, const int n, const mat_t *m, int block,
                      const act_t *x, int t0, float *out) {
    const uint8_t *data = m->data + (size_t)block * m->block_bytes;
    const int G = m->num_groups;
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t *xq = x->q + (size_t)t0 * x->cols;
    const size_t ld = (size_t)x->cols;
    for (int half = 0; half < 2; half++) {
        const uint8_t *q = data + half * 32;
        __m256 acc[4];
        for (int t = 0; t < n; t++) acc[t] = _mm256_setzero_ps();
        for (int g = 0; g < G; g++, q += m->record_bytes) {
            const uint8_t *high = q + high_at(bits);
            const half_t *scales = (const half_t *)(q + scale_at(bits) - half * 16), *biases = (const half_t *)(q + bias_at(bits, group) - half * 16);
            const int8_t *xg = xq + g * GROUP;
            __m256i s[4], low[4]; // sums of the group, or of its second and first half
            for (int t = 0; t < n; t++) s[t] = low[t] = _mm256_setzero_si256();
            if (bits == 8) {
                for (int c = 0; c < 8; c++) {
                    __m256i w = _mm256_loadu_si256((const __m256i *)(q + c * 64));
                    w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
                    __m256i magnitude = _mm256_abs_epi8(w);
                    for (int t = 0; t < n; t++) {
                        __m256i p = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four(xg + t * ld + c * 4), w));
                        s[t] = _mm256_add_epi32(s[t], _mm256_madd_epi16(p, ones));
                        if (n > 1) pin(s + t);
                    }
                }
            } else if (bits == 4) {
                for (int c = 0; c < 4; c++) {
                    __m256i lo, hi;
                    codes(bits, c, q, high, &lo, &hi);
                    for (int t = 0; t < n; t++) {
                        s[t] = _mm256_add_epi16(s[t], _mm256_maddubs_epi16(lo, four(xg + t * ld + c * 4)));
                        s[t] = _mm256_add_epi16(s[t], _mm256_maddubs_epi16(hi, four(xg + t * ld + 16 + c * 4)));
                        if (n > 1) pin(s + t);
                    }
                }
                for (int t = 0; t < n; t++) s[t] = _mm256_madd_epi16(s[t], ones);
            } else {
                for (int c = 0; c < 4; c += 2) {
                    __m256i lo0, hi0, lo1, hi1;
                    codes(bits, c, q, high, &lo0, &hi0);
                    codes(bits, c + 1, q, high, &lo1, &hi1);
                    for (int t = 0; t < n; t++) {
                        const int8_t *p = xg + t * ld + c * 4;
                        __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(lo0, four(p)), _mm256_maddubs_epi16(lo1, four(p + 4)));
                        __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(hi0, four(p + 16)), _mm256_maddubs_epi16(hi1, four(p + 20)));
                        if (bits == 5) {
                            s[t] = _mm256_add_epi32(s[t], _mm256_madd_epi16(_mm256_add_epi16(a, b), ones));
                        } else {
                            low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(a, ones));
                            s[t] = _mm256_add_epi32(s[t], _mm256_madd_epi16(b, ones));
                        }
                        if (n > 1) pin(s + t);
                    }
                }
                if (bits == 6 && group == 32)
                    for (int t = 0; t < n; t++) s[t] = _mm256_add_epi32(s[t], low[t]);
            }
            const size_t at = (size_t)t0 * G + g;
            if (group == 16) { // symmetric, two scales
                __m256 w0 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
                __m256 w1 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + ROWS)));
                for (int t = 0; t < n; t++) {
                    const int32_t *sums = x->sum16 + 2 * (at + (size_t)t * G);
                    __m256 xs = _mm256_set1_ps(x->scale[at + (size_t)t * G]);
                    __m256i z0 = _mm256_slli_epi32(_mm256_set1_epi32(sums[0]), bits - 1);
                    __m256i z1 = _mm256_slli_epi32(_mm256_set1_epi32(sums[1]), bits - 1);
                    acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(low[t], z0)), _mm256_mul_ps(w0, xs), acc[t]);
                    acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(s[t], z1)), _mm256_mul_ps(w1, xs), acc[t]);
                }
                continue;
            }
            __m256 w = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
            __m256 b = symmetric ? _mm256_setzero_ps()
                                 : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)biases));
            for (int t = 0; t < n; t++) {
                const size_t i = at + (size_t)t * G;
                __m256i sum = s[t];
                if (symmetric && bits != 8) // codes are centred on 2^(bits - 1)
                    sum = _mm256_sub_epi32(sum, _mm256_slli_epi32(_mm256_set1_epi32(x->sum[i]), bits - 1));
                if (!symmetric && bits == 8) // they were made signed above
                    sum = _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_set1_epi32(x->sum[i]), 7));
                __m256 xs = _mm256_set1_ps(x->scale[i]);
                acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(w, xs), acc[t]);
                if (!symmetric) acc[t] = _mm256_fmadd_ps(b, _mm256_set1_ps(x->weighted[i]), acc[t]);
            }
        }
        for (int t = 0; t < n; t++)
            _mm256_storeu_ps(out + t * ROWS + half * 8, _mm256_mul_ps(acc[t], _mm256_set1_ps(m->unit)));
    }
}
#define GEMM_TOKENS 4
#include "gemm_dispatch.h"
