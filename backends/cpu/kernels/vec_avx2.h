// Sixteen floats in two AVX2 registers.
#pragma once
#include "common.h"
#include <immintrin.h>

typedef struct { __m256 a, b; } v16;

INLINE v16 v_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE v16 v_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE v16 v_sub(v16 x, v16 y) { return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE v16 v_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE v16 v_div(v16 x, v16 y) { return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE v16 v_fma(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE v16 v_max(v16 x, v16 y) { return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE v16 v_min(v16 x, v16 y) { return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE v16 v_abs(v16 x) {
    __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return (v16){_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
INLINE v16 v_load_half(const half_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE void v_store_half(half_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE v16 v_load_bf16(const uint16_t *p) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
// Sums lanes 0..15 as a tree: i + (i + 8), then + 4, + 2, + 1.
INLINE float v_sum(v16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE float v_hmax(v16 x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
// x in lanes lo <= lane < hi, y elsewhere
INLINE v16 v_select_range(v16 x, v16 y, int lo, int hi) {
    __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), j = _mm256_add_epi32(i, _mm256_set1_epi32(8));
    __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
    __m256 ma = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(i, l), _mm256_cmpgt_epi32(h, i)));
    __m256 mb = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(j, l), _mm256_cmpgt_epi32(h, j)));
    return (v16){_mm256_blendv_ps(y.a, x.a, ma), _mm256_blendv_ps(y.b, x.b, mb)};
}
// 0 where x < limit, y elsewhere
INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) {
    return (v16){_mm256_andnot_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ), y.a),
                 _mm256_andnot_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ), y.b)};
}
// p times two to the power held in the low bits of `n`
INLINE v16 v_ldexp(v16 p, v16 n) {
    __m256i a = _mm256_slli_epi32(_mm256_castps_si256(n.a), 23), b = _mm256_slli_epi32(_mm256_castps_si256(n.b), 23);
    return (v16){_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.a), a)),
                 _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.b), b))};
}
// Rounds to nearest even, stores 16 int8 and returns their sum.
INLINE int v_store_i8(int8_t *p, v16 x) {
    __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
    __m256i s = _mm256_add_epi32(a, b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
