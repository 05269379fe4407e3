// AVX-512 with VNNI: Ice Lake, Sapphire Rapids, Zen 4 and later.
#include "common.h"
#if defined(__x86_64__)
#ifdef ROOST_EMULATED // tests compile this file over an emulation of the intrinsics, for machines without them
#include "emulate_avx512.h"
#elif defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
#include "vec_avx512.h"
#define QR 4
#define FLOAT_TOKENS 8
#include "gemm_avx512.h"
#include "generic.h"

static const isa_t avx512 = ISA_TABLE("avx512", 8);
#if defined(__clang__) && !defined(ROOST_EMULATED)
#pragma clang attribute pop
#endif

const isa_t *roost_isa_avx512(void) {
#ifdef ROOST_EMULATED
    return &avx512;
#else
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")
               ? &avx512
               : NULL;
#endif
}
#else
const isa_t *roost_isa_avx512(void) { return NULL; }
#endif
