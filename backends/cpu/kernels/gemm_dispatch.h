// Picks the gemm_tile() that was compiled for a matrix's format and cuts the tokens into tiles of GEMM_TOKENS, then 1.
#pragma once

#define TILES(bits, group, symmetric) \
    do { \
        for (; n >= GEMM_TOKENS; n -= GEMM_TOKENS, t0 += GEMM_TOKENS, out += GEMM_TOKENS * ROWS) \
            gemm_tile(bits, group, symmetric, GEMM_TOKENS, m, block, x, t0, out); \
        for (; n >= 2; n -= 2, t0 += 2, out += 2 * ROWS) gemm_tile(bits, group, symmetric, 2, m, block, x, t0, out); \
        if (n) gemm_tile(bits, group, symmetric, 1, m, block, x, t0, out); \
    } while (0)

static void gemm_quantized(const mat_t *m, int block, const act_t *x, int t0, int n, float *out) {
    switch (m->kind * 4 + (m->group == 16) * 2 + m->symmetric) {
    case MAT_Q4 * 4: TILES(4, 32, 0); break;
    case MAT_Q4 * 4 + 1: TILES(4, 32, 1); break;
    case MAT_Q5 * 4: TILES(5, 32, 0); break;
    case MAT_Q5 * 4 + 1: TILES(5, 32, 1); break;
    case MAT_Q6 * 4: TILES(6, 32, 0); break;
    case MAT_Q6 * 4 + 1: TILES(6, 32, 1); break;
    case MAT_Q6 * 4 + 3: TILES(6, 16, 1); break;
    case MAT_Q8 * 4: TILES(8, 32, 0); break;
    case MAT_Q8 * 4 + 1: TILES(8, 32, 1); break;
    }
}
