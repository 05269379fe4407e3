// Plain C, for every other machine, and the choice among instruction sets.
#include "common.h"
#include <string.h>
#include "vec_portable.h"
#define QR 1
#define FLOAT_TOKENS 4
#include "gemm_portable.h"
#include "generic.h"

static const isa_t portable = ISA_TABLE("portable", 4);

const isa_t *roost_isa_portable(void) { return &portable; }

const isa_t *roost_isa_by_name(const char *name) {
    const isa_t *known[] = {roost_isa_avx512(), roost_isa_avx2(), roost_isa_neon(), &portable};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] && (!name || !strcmp(name, "auto") || !strcmp(name, known[i]->name))) return known[i];
    return NULL;
}
