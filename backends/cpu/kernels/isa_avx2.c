// AVX2, FMA and F16C: every x86-64 machine since Haswell and Zen.
#include "common.h"
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "vec_avx2.h"
#define QR 2
#define FLOAT_TOKENS 4
#include "gemm_avx2.h"
#include "generic.h"

static const isa_t avx2 = ISA_TABLE("avx2", 4);
#if defined(__clang__)
#pragma clang attribute pop
#endif

const isa_t *roost_isa_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &avx2 : NULL;
}
#else
const isa_t *roost_isa_avx2(void) { return NULL; }
#endif
