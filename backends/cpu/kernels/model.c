// Making and freeing a shard, and what Python asks of it besides a step.
#include "model.h"
#include <stdlib.h>
#include <string.h>

static int init_thread(const model_t *m, thread_scratch_t *t) {
    const size_t hd = (size_t)m->c.head_dim, group = (size_t)(m->c.num_heads / m->c.num_kv_heads);
    const size_t rows = (size_t)m->attn_tokens * group;
    size_t total = rows * hd * 4;
    if (total < (size_t)m->c.d_model * 4) total = (size_t)m->c.d_model * 4;
    t->q = aligned_zeroed(rows * hd * 4);
    t->o = aligned_zeroed(rows * hd * 4);
    t->total = aligned_zeroed(total);
    t->work = aligned_zeroed(rows * (PAGE + 1) * 4);
    t->page = aligned_zeroed(2 * hd * PAGE * 4);
    t->state = aligned_zeroed(rows * sizeof(softmax_t));
    t->total_state = aligned_zeroed(rows * sizeof(softmax_t));
    t->lo = aligned_zeroed(rows * sizeof(int));
    t->hi = aligned_zeroed(rows * sizeof(int));
    t->half = aligned_zeroed(hd * 2);
    return t->q && t->o && t->total && t->work && t->page && t->state && t->total_state && t->lo && t->hi && t->half ? 0 : -1;
}

EXPORT void roost_free(model_t *m) {
    if (!m) return;
    pool_free(m->pool);
    for (int i = 0; m->layers && i < m->c.num_layers; i++)
        for (int k = 0; k < NUM_VECS; k++) free(m->layers[i].vecs[k]);
    for (int i = 0; m->threads && i < m->c.num_threads; i++) {
        thread_scratch_t *t = m->threads + i;
        free(t->q), free(t->o), free(t->total), free(t->work), free(t->page), free(t->state), free(t->total_state);
        free(t->lo), free(t->hi), free(t->half);
    }
    for (int i = 0; i < MAX_ROPES; i++) free(m->ropes[i].inverse_frequencies);
    scratch_t *w = &m->scratch;
    free(w->h), free(w->qkv), free(w->branch), free(w->cos), free(w->sin), free(w->position), free(w->span_of);
    free(w->task), free(w->combine), free(w->partial_state), free(w->partial_o);
    act_free(&w->x), act_free(&w->attention), act_free(&w->ff);
    free(m->layers), free(m->threads), free(m->norm), free(m->kv);
    arena_free(&m->arena);
    free(m);
}

// NULL when memory or threads ran out, or when `isa` names nothing that this CPU has.
EXPORT model_t *roost_new(const config_t *c, const char *isa) {
    const isa_t *table = roost_isa_by_name(isa);
    model_t *m = table ? calloc(1, sizeof *m) : NULL;
    if (!m) return NULL;
    m->c = *c, m->isa = table;
    m->attn_tokens = 64 / (c->num_heads / c->num_kv_heads);
    m->attn_tokens = m->attn_tokens < 1 ? 1 : m->attn_tokens > ATTN_TOKENS ? ATTN_TOKENS : m->attn_tokens;
    m->pool = pool_new(c->num_threads, 10 * c->num_layers + 8);
    m->layers = calloc((size_t)c->num_layers, sizeof(layer_t));
    m->threads = calloc((size_t)c->num_threads, sizeof(thread_scratch_t));
    int ok = m->pool && m->layers && m->threads;
    for (int i = 0; ok && i < c->num_threads; i++) ok = !init_thread(m, m->threads + i);
    if (ok) return m;
    roost_free(m);
    return NULL;
}

EXPORT const char *roost_isa(const model_t *m) { return m->isa->name; }

// Name of an instruction set that this machine can run, or NULL.
EXPORT const char *roost_has_isa(const char *name) {
    const isa_t *isa = roost_isa_by_name(name);
    return isa ? isa->name : NULL;
}

EXPORT void roost_set_layer(model_t *m, int layer, int window, int rope) {
    m->layers[layer].window = window, m->layers[layer].rope = rope;
}

// Returns the index of the frequency table, -1 when there are too many or memory ran out.
EXPORT int roost_add_rope(model_t *m, const float *inverse_frequencies, float factor) {
    const size_t bytes = (size_t)m->c.head_dim / 2 * 4;
    if (m->num_ropes == MAX_ROPES) return -1;
    rope_t *r = m->ropes + m->num_ropes;
    if (!(r->inverse_frequencies = aligned_zeroed(bytes))) return -1;
    memcpy(r->inverse_frequencies, inverse_frequencies, bytes);
    r->factor = factor;
    return m->num_ropes++;
}

// Pages are touched when first written: room that nobody uses costs no memory.
EXPORT int roost_set_room(model_t *m, int num_pages) {
    m->kv_bytes = (size_t)m->c.num_layers * (size_t)num_pages * (size_t)m->c.num_kv_heads * 2 * (size_t)m->c.head_dim * PAGE * 2;
    free(m->kv);
    m->kv = calloc(m->kv_bytes ? m->kv_bytes : 64, 1);
    m->num_pages = m->kv ? num_pages : 0;
    return m->kv ? 0 : -1;
}

EXPORT void roost_copy_page(model_t *m, int from, int to) {
    const size_t bytes = (size_t)m->c.num_kv_heads * 2 * (size_t)m->c.head_dim * PAGE * 2;
    for (int l = 0; l < m->c.num_layers; l++) memcpy(kv_page(m, l, to, 0), kv_page(m, l, from, 0), bytes);
}

// Keys and values of tokens start .. stop - 1 of one layer, as [tokens][kv_heads][head_dim] float16. `pages` are those of
// the sequence. Writes to the cache when `store` is set.
EXPORT void roost_kv(model_t *m, int layer, const int32_t *pages, int start, int stop, int store, half_t *keys, half_t *values) {
    const int hd = m->c.head_dim, heads = m->c.num_kv_heads;
    for (int p = start; p < stop; p++)
        for (int h = 0; h < heads; h++) {
            half_t *page = kv_page(m, layer, pages[p / PAGE], h), *k = page + p % PAGE;
            half_t *v = page + (size_t)hd * PAGE + (size_t)(p % PAGE) * hd;
            const size_t at = ((size_t)(p - start) * (size_t)heads + (size_t)h) * hd;
            for (int d = 0; d < hd; d++)
                if (store)
                    k[(size_t)d * PAGE] = keys[at + (size_t)d], v[d] = values[at + (size_t)d];
                else
                    keys[at + (size_t)d] = k[(size_t)d * PAGE], values[at + (size_t)d] = v[d];
        }
}

EXPORT size_t roost_weight_bytes(const model_t *m) {
    size_t n = m->embed.num_bytes + m->head.num_bytes;
    for (int i = 0; i < m->c.num_layers; i++)
        for (int k = 0; k < NUM_MATS; k++) n += m->layers[i].mats[k].num_bytes;
    return n;
}

EXPORT size_t roost_scratch_bytes(const model_t *m) {
    const scratch_t *w = &m->scratch;
    const size_t n = (size_t)w->tokens, d = (size_t)m->c.d_model, hd = (size_t)m->c.head_dim, heads = (size_t)m->c.num_heads;
    const size_t cols = d + heads * hd + (size_t)m->c.d_ff, rows = (size_t)m->attn_tokens * (heads / (size_t)m->c.num_kv_heads);
    size_t bytes = n * (d + hd * (heads + 2 * (size_t)m->c.num_kv_heads) + (m->c.post_norms ? d : 0) + (size_t)m->num_ropes * hd + 2) * 4;
    bytes += n * cols * (m->needs_floats ? 5 : 1) + n * cols / GROUP * 20;
    bytes += (size_t)w->partial_rows * (hd + 2) * 4 + (size_t)(w->tasks + w->combines) * sizeof(attn_task_t);
    return bytes + (size_t)m->c.num_threads * (rows * (3 * hd + PAGE + 1) + 2 * hd * PAGE) * 4;
}

EXPORT size_t roost_kv_bytes(const model_t *m) { return m->kv_bytes; }

EXPORT size_t roost_sizeof_config(void) { return sizeof(config_t); }
EXPORT size_t roost_sizeof_step(void) { return sizeof(step_t); }
