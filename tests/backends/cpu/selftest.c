// Runs small random models of every weight format on the instruction sets named as arguments and prints one checksum of
// all logits a line: "<isa> <format> <checksum>". Sums have one order everywhere, so the checksums must be equal on every
// instruction set and machine. Prompts run whole, in uneven chunks, and on one and on three threads; these must agree too.
#include "../../../backends/cpu/kernels/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

model_t *roost_new(const config_t *, const char *);
void roost_free(model_t *);
int roost_set_mat(model_t *, int, int, int, int, int, int, int, float);
void roost_pack(model_t *, int, int, int, int, const void *, const float *, const float *);
int roost_set_vec(model_t *, int, int, const float *, int);
void roost_set_layer(model_t *, int, int, int);
int roost_add_rope(model_t *, const float *, float);
int roost_set_room(model_t *, int);
int roost_step(model_t *, const step_t *);

enum { TOKENS = 600, VOCAB = 250, LAYERS = 2, D = 96, FF = 160, HD = 32 };

static uint32_t state;
static uint32_t next(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}
static float uniform(float lo, float hi) { return lo + (hi - lo) * (float)next() / 16777216.0f; }

static const struct format {
    const char *name;
    int kind, bits, group, symmetric;
} formats[] = {
    {"q4", MAT_Q4, 4, 32, 0},   {"q4s", MAT_Q4, 4, 32, 1}, {"q5", MAT_Q5, 5, 32, 0},   {"q5s", MAT_Q5, 5, 32, 1},
    {"q6", MAT_Q6, 6, 32, 0},   {"q6s", MAT_Q6, 6, 32, 1}, {"q6k", MAT_Q6, 6, 16, 1},  {"q8", MAT_Q8, 8, 32, 0},
    {"q8s", MAT_Q8, 8, 32, 1},  {"f16", MAT_F16, 0, 32, 0}, {"bf16", MAT_BF16, 0, 32, 0}, {"f32", MAT_F32, 0, 32, 0},
};

static void matrix(model_t *m, int layer, int slot, const struct format *f, int rows, int cols) {
    roost_set_mat(m, layer, slot, f->kind, rows, cols, f->group, f->symmetric, 0.5f);
    size_t n = (size_t)rows * (size_t)cols, groups = n / (size_t)f->group;
    uint8_t *codes = malloc(n * 4);
    float *scales = malloc(groups * 4), *biases = malloc(groups * 4);
    for (size_t i = 0; i < n; i++)
        if (f->kind == MAT_F32)
            ((float *)codes)[i] = uniform(-0.2f, 0.2f);
        else if (f->kind == MAT_F16)
            ((half_t *)codes)[i] = float_to_half(uniform(-0.2f, 0.2f));
        else if (f->kind == MAT_BF16) {
            union { float v; uint32_t u; } w = {uniform(-0.2f, 0.2f)};
            ((uint16_t *)codes)[i] = (uint16_t)(w.u >> 16);
        } else
            codes[i] = (uint8_t)(next() & ((1u << f->bits) - 1));
    for (size_t i = 0; i < groups; i++) {
        float half_range = f->bits ? (float)(1 << f->bits) / 2 : 1;
        scales[i] = uniform(0.05f, 0.3f) / half_range;
        biases[i] = -scales[i] * half_range * uniform(0.8f, 1.2f);
    }
    roost_pack(m, layer, slot, 0, rows, codes, scales, biases);
    free(codes), free(scales), free(biases);
}

static void vector(model_t *m, int layer, int slot, int n, float lo, float hi) {
    float v[D + FF];
    for (int i = 0; i < n; i++) v[i] = uniform(lo, hi);
    roost_set_vec(m, layer, slot, v, n);
}

static model_t *make(const struct format *f, const char *isa, int threads, int gemma) {
    const int heads = 6, kv = gemma ? 1 : 2, q = heads * HD, k = kv * HD;
    config_t c = {LAYERS, D, FF, heads, kv, HD, VOCAB, gemma, 1, 1, gemma, threads, 1e-5f, 0.17f, gemma ? 9.8f : 1.0f};
    model_t *m = roost_new(&c, isa);
    if (!m) return NULL;
    state = 7;
    float inverse[HD / 2];
    for (int i = 0; i < HD / 2; i++) inverse[i] = 1.0f / (float)(1 << i % 12);
    roost_add_rope(m, inverse, 1);
    for (int i = 0; i < HD / 2; i++) inverse[i] *= 0.25f;
    roost_add_rope(m, inverse, 1.1f);
    matrix(m, 0, MAT_EMBED, f, VOCAB, D);
    vector(m, 0, VEC_NORM, D, 0.5f, 1.5f);
    for (int l = 0; l < LAYERS; l++) {
        roost_set_layer(m, l, gemma && l == 0 ? 75 : 0, l);
        matrix(m, l, MAT_Q, f, q, D), matrix(m, l, MAT_K, f, k, D), matrix(m, l, MAT_V, f, k, D);
        matrix(m, l, MAT_O, f, D, q), matrix(m, l, MAT_GATE, f, FF, D), matrix(m, l, MAT_UP, f, FF, D);
        matrix(m, l, MAT_DOWN, f, D, FF);
        vector(m, l, VEC_ATTN_NORM, D, 0.5f, 1.5f), vector(m, l, VEC_MLP_NORM, D, 0.5f, 1.5f);
        if (gemma) {
            vector(m, l, VEC_Q_NORM, HD, 0.5f, 1.5f), vector(m, l, VEC_K_NORM, HD, 0.5f, 1.5f);
            vector(m, l, VEC_ATTN_POST_NORM, D, 0.5f, 1.5f), vector(m, l, VEC_MLP_POST_NORM, D, 0.5f, 1.5f);
        } else
            vector(m, l, VEC_Q_BIAS, q, -0.5f, 0.5f), vector(m, l, VEC_K_BIAS, k, -0.5f, 0.5f), vector(m, l, VEC_V_BIAS, k, -0.5f, 0.5f);
    }
    return m;
}

// Logits of the last 40 tokens, the first 560 tokens having come in chunks of `chunk`, the others one by one.
static uint64_t run(model_t *m, int chunk, const float **logits) {
    static int32_t tokens[TOKENS], pages[TOKENS / PAGE + 1], rows[1] = {0};
    static float out[40 * VOCAB];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (i * 37 + i / 11) % VOCAB;
    for (int i = 0; i <= TOKENS / PAGE; i++) pages[i] = (i * 4 + 3) % (TOKENS / PAGE + 1);
    if (roost_set_room(m, TOKENS / PAGE + 1)) exit(3);
    for (int at = 0; at < TOKENS;) {
        int32_t count = at < 560 ? (560 - at < chunk ? 560 - at : chunk) : 1, start = at, offset = 0;
        step_t s = {.num_tokens = count, .num_spans = 1, .num_logits = at >= 560, .tokens = tokens + at, .start = &start,
                    .count = &count, .page_offset = &offset, .pages = pages, .logit_rows = rows,
                    .out = at >= 560 ? out + (size_t)(at - 560) * VOCAB : NULL};
        if (roost_step(m, &s)) exit(3);
        at += count;
    }
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < sizeof out; i++) hash = (hash ^ ((uint8_t *)out)[i]) * 1099511628211u;
    *logits = out;
    return hash;
}

int main(int argc, char **argv) {
    int failed = 0;
    for (int a = 1; a < argc; a++)
        for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
            for (int gemma = 0; gemma < 2; gemma++) {
                const int chunks[] = {560, 13}, threads[] = {1, 3};
                uint64_t first = 0;
                for (int k = 0; k < 2; k++) {
                    const float *logits;
                    model_t *m = make(formats + i, argv[a], threads[k], gemma);
                    if (!m) return fprintf(stderr, "no %s here\n", argv[a]), 2;
                    uint64_t hash = run(m, chunks[k], &logits);
                    if (k && hash != first) {
                        fprintf(stderr, "%s %s: %d threads in chunks of %d differ\n", argv[a], formats[i].name, threads[k], chunks[k]);
                        failed = 1;
                    }
                    if (!k) printf("%s %s%s %016llx %.4f\n", argv[a], formats[i].name, gemma ? "-gemma" : "", (unsigned long long)hash, logits[5]);
                    first = k ? first : hash;
                    roost_free(m);
                }
            }
    return failed;
}
