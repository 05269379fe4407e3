// AVX-512 intrinsics over AVX2, by SIMDe and, for the conversions it lacks, by hand.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

static inline simde__m512 emulated_cvtph_ps(simde__m256i h) {
    simde__m512_private r;
    r.m256[0] = simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(h, 0));
    r.m256[1] = simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(h, 1));
    return simde__m512_from_private(r);
}

static inline simde__m256i emulated_cvtps_ph(simde__m512 x) {
    simde__m512_private p = simde__m512_to_private(x);
    return simde_mm256_set_m128i(simde_mm256_cvtps_ph(p.m256[1], 0), simde_mm256_cvtps_ph(p.m256[0], 0));
}

static inline simde__m512i emulated_cvtepu16_epi32(simde__m256i x) {
    simde__m512i_private r;
    r.m256i[0] = simde_mm256_cvtepu16_epi32(simde_mm256_extracti128_si256(x, 0));
    r.m256i[1] = simde_mm256_cvtepu16_epi32(simde_mm256_extracti128_si256(x, 1));
    return simde__m512i_from_private(r);
}

static inline simde__m512i emulated_cvtps_epi32(simde__m512 x) {
    simde__m512_private p = simde__m512_to_private(x);
    simde__m512i_private r;
    r.m256i[0] = simde_mm256_cvtps_epi32(p.m256[0]);
    r.m256i[1] = simde_mm256_cvtps_epi32(p.m256[1]);
    return simde__m512i_from_private(r);
}

static inline simde__m512 emulated_cvtepi32_ps(simde__m512i x) {
    simde__m512i_private p = simde__m512i_to_private(x);
    simde__m512_private r;
    r.m256[0] = simde_mm256_cvtepi32_ps(p.m256i[0]);
    r.m256[1] = simde_mm256_cvtepi32_ps(p.m256i[1]);
    return simde__m512_from_private(r);
}

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) emulated_cvtepi32_ps(x)
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) emulated_cvtps_epi32(x)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) emulated_cvtepu16_epi32(x)
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtph_ps(h) emulated_cvtph_ps(h)
#define _mm512_cvtps_ph(x, rounding) emulated_cvtps_ph(x)
