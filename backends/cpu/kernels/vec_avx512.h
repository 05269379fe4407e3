// Sixteen floats in one AVX-512 register.
#pragma once
#include "common.h"
#ifndef ROOST_EMULATED
#include <immintrin.h>
#endif

typedef __m512 v16;

INLINE v16 v_set(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
INLINE v16 v_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
INLINE v16 v_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
INLINE v16 v_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
INLINE v16 v_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE v16 v_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
INLINE v16 v_min(v16 x, v16 y) { return _mm512_min_ps(x, y); }
INLINE v16 v_abs(v16 x) { return _mm512_abs_ps(x); }
INLINE v16 v_load_half(const half_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v_store_half(half_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE v16 v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE float v_sum(v16 x) { // the same tree as everywhere: + 8, + 4, + 2, + 1
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE float v_hmax(v16 x) {
    __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
INLINE v16 v_select_range(v16 x, v16 y, int lo, int hi) {
    lo = lo < 0 ? 0 : lo > 16 ? 16 : lo, hi = hi < lo ? lo : hi > 16 ? 16 : hi;
    return _mm512_mask_blend_ps((__mmask16)(((1u << hi) - 1) & ~((1u << lo) - 1)), y, x);
}
INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) {
    return _mm512_maskz_mov_ps((__mmask16)~_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), y);
}
INLINE v16 v_ldexp(v16 p, v16 n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
INLINE int v_store_i8(int8_t *p, v16 x) {
    __m512i i = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(i));
    __m256i s = _mm256_add_epi32(_mm512_castsi512_si256(i), _mm512_extracti64x4_epi64(i, 1));
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
