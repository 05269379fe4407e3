// Packing, unpacking and the memory of a shard.
#include "model.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE = 2 << 20, ARENA_PART = 64 << 20 };

void *aligned_zeroed(size_t bytes) {
    void *p = NULL;
    bytes = bytes ? (bytes + 63) / 64 * 64 : 64;
    if (posix_memalign(&p, 64, bytes)) return NULL;
    memset(p, 0, bytes);
    return p;
}

// Weights lie one after another in a few large mappings with huge pages: with pages of 4 KiB the hardware's prefetchers
// stop at every boundary, and a decode step reads each weight once.
void *arena_take(arena_t *a, size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (!a->last || a->last->size - a->last->used < bytes) {
        size_t size = (bytes + sizeof(arena_part_t) + 64 + HUGE - 1) / HUGE * HUGE;
        if (size < ARENA_PART) size = ARENA_PART;
        arena_part_t *part = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (part == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
        madvise(part, size, MADV_HUGEPAGE);
#endif
        *part = (arena_part_t){a->last, size, (sizeof(arena_part_t) + 63) / 64 * 64};
        a->last = part;
    }
    void *p = (char *)a->last + a->last->used;
    a->last->used += bytes;
    return p;
}

void arena_free(arena_t *a) {
    while (a->last) {
        arena_part_t *part = a->last;
        a->last = part->previous;
        munmap(part, part->size);
    }
}

static int bits_of(int kind) { return kind - MAT_Q4 + 4 + (kind == MAT_Q8); }

int mat_init(mat_t *m, arena_t *arena, int kind, int rows, int cols, int group, int symmetric, float unit) {
    const size_t blocks = ((size_t)rows + ROWS - 1) / ROWS;
    *m = (mat_t){.kind = kind, .rows = rows, .cols = cols, .group = group, .symmetric = symmetric, .unit = unit,
                 .num_blocks = (int)blocks, .num_groups = cols / GROUP};
    if (kind >= MAT_F16)
        m->block_bytes = (size_t)cols * ROWS * (kind == MAT_F32 ? 4 : 2);
    else {
        m->record_bytes = (size_t)bias_at(bits_of(kind), group) + (symmetric ? 0 : ROWS * 2);
        m->block_bytes = (size_t)m->num_groups * m->record_bytes;
    }
    m->block_bytes = (m->block_bytes + 63) / 64 * 64;
    m->num_bytes = blocks * m->block_bytes;
    m->data = arena_take(arena, m->num_bytes);
    return m->data ? 0 : -1;
}

// Rows first .. first + n - 1: codes [n][cols], scales [n][cols / group], biases likewise or NULL. Each row once.
static void pack_quantized(mat_t *m, int first, int n, const uint8_t *codes, const float *scales, const float *biases) {
    const int G = m->num_groups, per_group = GROUP / m->group, bits = bits_of(m->kind);
    const float inverse = 1 / m->unit;
    for (int i = 0; i < n; i++) {
        uint8_t *block = m->data + (size_t)((first + i) / ROWS) * m->block_bytes;
        const int row = (first + i) % ROWS;
        for (int g = 0; g < G; g++) {
            const uint8_t *c = codes + (size_t)i * m->cols + (size_t)g * GROUP;
            uint8_t *record = block + (size_t)g * m->record_bytes, *low = record + row * 4;
            uint8_t *high = record + high_at(bits) + row * 4;
            half_t *scale = (half_t *)(record + scale_at(bits)) + row, *bias = (half_t *)(record + bias_at(bits, m->group)) + row;
            for (int k = 0; k < GROUP; k++) {
                const int at = k % 4, chunk = k % 16 / 4, upper = k / 16;
                if (bits == 8) {
                    low[(k / 4) * 64 + at] = c[k];
                    continue;
                }
                low[chunk * 64 + at] |= (uint8_t)((c[k] & 15) << (4 * upper));
                if (bits == 5) high[at] |= (uint8_t)((c[k] >> 4 & 1) << (chunk + 4 * upper));
                if (bits == 6) high[64 * upper + at] |= (uint8_t)((c[k] >> 4 & 3) << (2 * chunk));
            }
            for (int p = 0; p < per_group; p++)
                scale[p * ROWS] = float_to_half(scales[((size_t)i * G + g) * per_group + p] * inverse);
            if (!m->symmetric) *bias = float_to_half(biases[(size_t)i * G + g] * inverse);
        }
    }
}

static void pack_float(mat_t *m, int first, int n, const void *rows) {
    for (int i = 0; i < n; i++) {
        uint8_t *block = m->data + (size_t)((first + i) / ROWS) * m->block_bytes;
        const int row = (first + i) % ROWS;
        for (int k = 0; k < m->cols; k++)
            if (m->kind == MAT_F32)
                ((float *)block)[(size_t)k * ROWS + row] = ((const float *)rows)[(size_t)i * m->cols + k];
            else
                ((uint16_t *)block)[(size_t)k * ROWS + row] = ((const uint16_t *)rows)[(size_t)i * m->cols + k];
    }
}

void mat_row(const mat_t *m, int row, float *out) {
    const uint8_t *block = m->data + (size_t)(row / ROWS) * m->block_bytes;
    const int r = row % ROWS;
    if (m->kind >= MAT_F16) {
        for (int k = 0; k < m->cols; k++) {
            size_t at = (size_t)k * ROWS + r;
            union { uint32_t u; float f; } wide = {(uint32_t)((const uint16_t *)block)[at] << 16};
            out[k] = m->kind == MAT_F32 ? ((const float *)block)[at] : m->kind == MAT_BF16 ? wide.f : half_to_float(((const half_t *)block)[at]);
        }
        return;
    }
    const int bits = bits_of(m->kind);
    for (int g = 0; g < m->num_groups; g++) {
        const uint8_t *record = block + (size_t)g * m->record_bytes, *low = record + r * 4;
        const uint8_t *high = record + high_at(bits) + r * 4;
        const half_t *scales = (const half_t *)(record + scale_at(bits)) + r;
        const half_t *biases = (const half_t *)(record + bias_at(bits, m->group)) + r;
        const float bias = m->symmetric ? 0 : half_to_float(*biases) * m->unit;
        for (int k = 0; k < GROUP; k++) {
            const int at = k % 4, chunk = k % 16 / 4, upper = k / 16;
            int code = bits == 8 ? low[(k / 4) * 64 + at] : low[chunk * 64 + at] >> (4 * upper) & 15;
            if (bits == 5) code |= (high[at] >> (chunk + 4 * upper) & 1) << 4;
            if (bits == 6) code |= (high[64 * upper + at] >> (2 * chunk) & 3) << 4;
            if (m->symmetric) code -= 1 << (bits - 1);
            float scale = half_to_float(scales[k / m->group * ROWS]) * m->unit;
            out[g * GROUP + k] = (float)code * scale + bias;
        }
    }
}

int act_init(act_t *a, int tokens, int cols, int with_floats) {
    const size_t n = (size_t)tokens, g = (size_t)cols / GROUP;
    *a = (act_t){.cols = cols, .num_groups = cols / GROUP};
    a->q = aligned_zeroed(n * (size_t)cols);
    a->scale = aligned_zeroed(n * g * 4);
    a->weighted = aligned_zeroed(n * g * 4);
    a->sum = aligned_zeroed(n * g * 4);
    a->sum16 = aligned_zeroed(n * g * 8);
    if (with_floats) a->f = aligned_zeroed(n * (size_t)cols * 4);
    return a->q && a->scale && a->weighted && a->sum && a->sum16 && (a->f || !with_floats) ? 0 : -1;
}

void act_free(act_t *a) {
    free(a->q), free(a->scale), free(a->weighted), free(a->sum), free(a->sum16), free(a->f);
    *a = (act_t){0};
}

half_t *kv_page(const model_t *m, int layer, int page, int head) {
    const size_t size = 2 * (size_t)m->c.head_dim * PAGE;
    return m->kv + (((size_t)layer * (size_t)m->num_pages + (size_t)page) * (size_t)m->c.num_kv_heads + (size_t)head) * size;
}

static mat_t *mat_at(model_t *m, int layer, int slot) {
    return slot == MAT_EMBED ? &m->embed : slot == MAT_HEAD ? &m->head : &m->layers[layer].mats[slot];
}

EXPORT int roost_set_mat(model_t *m, int layer, int slot, int kind, int rows, int cols, int group, int symmetric, float unit) {
    if (kind >= MAT_F16) m->needs_floats = 1;
    return mat_init(mat_at(m, layer, slot), &m->arena, kind, rows, cols, group, symmetric, unit);
}

EXPORT void roost_pack(model_t *m, int layer, int slot, int first, int n, const void *rows, const float *scales,
                       const float *biases) {
    mat_t *mat = mat_at(m, layer, slot);
    if (mat->kind >= MAT_F16)
        pack_float(mat, first, n, rows);
    else
        pack_quantized(mat, first, n, rows, scales, biases);
}

EXPORT int roost_set_vec(model_t *m, int layer, int slot, const float *values, int n) {
    float **v = slot == VEC_NORM ? &m->norm : &m->layers[layer].vecs[slot];
    free(*v);
    *v = aligned_zeroed((size_t)n * 4);
    if (!*v) return -1;
    memcpy(*v, values, (size_t)n * 4);
    return 0;
}
