// NEON with dot products: Apple silicon, DGX Spark, Raspberry Pi 5, Graviton 2 and later.
#include "common.h"
#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__clang__)
#include <arm_neon.h>
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include "vec_neon.h"
#define QR 2
#define FLOAT_TOKENS 4
#include "gemm_neon.h"
#include "generic.h"

static const isa_t neon = ISA_TABLE("neon", 4);
#if defined(__clang__)
#pragma clang attribute pop
#endif

const isa_t *roost_isa_neon(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & (1 << 20) /* ASIMDDP */ ? &neon : NULL;
#else
    return &neon;
#endif
}
#else
const isa_t *roost_isa_neon(void) { return NULL; }
#endif
