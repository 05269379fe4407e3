// One forward pass of a shard over a ragged batch. All threads walk the same phases together.
#include "model.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// What a step needs, kept in the model: a thread that is late may still look at it when the step is over.
typedef struct {
    model_t *m;
    const isa_t *isa;
    thread_scratch_t *scratch;
    const step_t *s;
    int T;
    walk_t *walk;
} ctx_t;

#define TASKS(i, count, chunk) \
    for (int taken = pool_take(w->walk, count, chunk), end; \
         taken >= 0 && (end = taken + (chunk) < (count) ? taken + (chunk) : (count)); \
         pool_done(w->walk, count, end - taken), taken = pool_take(w->walk, count, chunk)) \
        for (int i = taken; i < end; i++)

static int chunk_of(const ctx_t *w, int tasks) {
    int c = w->T > 4 ? 1 : tasks / (8 * w->m->c.num_threads);
    return c < 1 ? 1 : c > 16 ? 16 : c;
}

// y[token][column + row] (+)= panel `block` · x + bias
static void project(const ctx_t *w, const mat_t *mat, int block, const act_t *x, int T, float *y, size_t ld,
                    const float *bias, int accumulate) {
    float tile[TILE_TOKENS * ROWS];
    const int first = block * ROWS, rows = mat->rows - first < ROWS ? mat->rows - first : ROWS;
    for (int t0 = 0; t0 < T; t0 += TILE_TOKENS) {
        const int n = T - t0 < TILE_TOKENS ? T - t0 : TILE_TOKENS;
        w->isa->gemm(mat, block, x, t0, n, tile);
        for (int t = 0; t < n; t++) {
            float *to = y + (size_t)(t0 + t) * ld + first;
            const float *from = tile + t * ROWS;
            if (bias)
                for (int r = 0; r < rows; r++) to[r] = from[r] + bias[first + r];
            else if (accumulate)
                for (int r = 0; r < rows; r++) to[r] += from[r];
            else
                memcpy(to, from, (size_t)rows * 4);
        }
    }
}

// Two panels of gate and up: 32 rows of the hidden layer, ready as one quantized group of the next product.
static void gate_and_up(const ctx_t *w, const layer_t *l, int pair) {
    float g[TILE_TOKENS * ROWS], u[TILE_TOKENS * ROWS], both[TILE_TOKENS][2 * ROWS];
    for (int t0 = 0; t0 < w->T; t0 += TILE_TOKENS) {
        const int n = w->T - t0 < TILE_TOKENS ? w->T - t0 : TILE_TOKENS;
        for (int half = 0; half < 2; half++) {
            w->isa->gemm(&l->mats[MAT_GATE], 2 * pair + half, &w->m->scratch.x, t0, n, g);
            w->isa->gemm(&l->mats[MAT_UP], 2 * pair + half, &w->m->scratch.x, t0, n, u);
            w->isa->gate(w->m->c.activation, g, u, n * ROWS);
            for (int t = 0; t < n; t++) memcpy(both[t] + half * ROWS, g + t * ROWS, ROWS * 4);
        }
        for (int t = 0; t < n; t++) w->isa->quantize(both[t], GROUP, &w->m->scratch.ff, t0 + t, pair * GROUP);
    }
}

static void norm_token(const ctx_t *w, const float *weights, int token, const act_t *into) {
    const int d = w->m->c.d_model;
    float *out = w->scratch->total; // free between attention tasks, and wide enough
    w->isa->rmsnorm(w->m->scratch.h + (size_t)token * d, weights, d, w->m->c.norm_eps, out);
    w->isa->quantize(out, d, into, token, 0);
}

// Normalizes the residual into quantized activations, after adding a branch that has its own norm (post-norm models).
static void norm_phase(ctx_t *w, const float *weights, const float *post) {
    const int d = w->m->c.d_model;
    TASKS(t, w->T, 1) {
        if (post) {
            float *branch = w->m->scratch.branch + (size_t)t * d;
            w->isa->rmsnorm(branch, post, d, w->m->c.norm_eps, branch);
            w->isa->add(w->m->scratch.h + (size_t)t * d, branch, d);
        }
        if (weights) norm_token(w, weights, t, &w->m->scratch.x);
    }
    pool_meet(w->walk, w->T);
}

static void layer(ctx_t *w, int index, const float *previous_post) {
    model_t *m = w->m;
    const layer_t *l = m->layers + index;
    const step_t *s = w->s;
    const int hd = m->c.head_dim, q_rows = m->c.num_heads * hd, kv_rows = m->c.num_kv_heads * hd;
    const size_t qkv_ld = (size_t)(q_rows + 2 * kv_rows), d = (size_t)m->c.d_model;
    const int accumulate = !m->c.post_norms;
    float *into = accumulate ? m->scratch.h : m->scratch.branch;

    norm_phase(w, l->vecs[VEC_ATTN_NORM], previous_post);

    const int qb = l->mats[MAT_Q].num_blocks, kb = l->mats[MAT_K].num_blocks, vb = l->mats[MAT_V].num_blocks;
    const int qkv_chunk = chunk_of(w, qb + kb + vb);
    TASKS(i, qb + kb + vb, qkv_chunk) {
        if (i < qb)
            project(w, &l->mats[MAT_Q], i, &m->scratch.x, w->T, m->scratch.qkv, qkv_ld, l->vecs[VEC_Q_BIAS], 0);
        else if (i < qb + kb)
            project(w, &l->mats[MAT_K], i - qb, &m->scratch.x, w->T, m->scratch.qkv + q_rows, qkv_ld, l->vecs[VEC_K_BIAS], 0);
        else
            project(w, &l->mats[MAT_V], i - qb - kb, &m->scratch.x, w->T, m->scratch.qkv + q_rows + kv_rows, qkv_ld,
                    l->vecs[VEC_V_BIAS], 0);
    }
    pool_meet(w->walk, qb + kb + vb);

    if (!m->plan.fused) {
        TASKS(t, w->T, 4) for (int h = 0; h < m->c.num_kv_heads; h++) attention_append(m, s, index, t, h, w->scratch);
        pool_meet(w->walk, w->T);
    }
    TASKS(i, m->plan.num_tasks, 1) attention_run(m, s, index, m->scratch.task + i, m->plan.fused, w->scratch);
    pool_meet(w->walk, m->plan.num_tasks);
    if (m->plan.num_combines) {
        TASKS(i, m->plan.num_combines, 1) attention_combine(m, m->scratch.combine + i, w->scratch, s);
        pool_meet(w->walk, m->plan.num_combines);
    }

    const int ob = l->mats[MAT_O].num_blocks, pairs = m->c.d_ff / GROUP, db = l->mats[MAT_DOWN].num_blocks;
    const int o_chunk = chunk_of(w, ob), pair_chunk = chunk_of(w, pairs), down_chunk = chunk_of(w, db);
    TASKS(i, ob, o_chunk) project(w, &l->mats[MAT_O], i, &m->scratch.attention, w->T, into, d, NULL, accumulate);
    pool_meet(w->walk, ob);
    norm_phase(w, l->vecs[VEC_MLP_NORM], l->vecs[VEC_ATTN_POST_NORM]);
    TASKS(i, pairs, pair_chunk) gate_and_up(w, l, i);
    pool_meet(w->walk, pairs);
    TASKS(i, db, down_chunk) project(w, &l->mats[MAT_DOWN], i, &m->scratch.ff, w->T, into, d, NULL, accumulate);
    pool_meet(w->walk, db);
}

static void enter(ctx_t *w) {
    model_t *m = w->m;
    const step_t *s = w->s;
    const int half = m->c.head_dim / 2;
    const size_t d = (size_t)m->c.d_model;
    TASKS(t, w->T, 4) {
        float *h = m->scratch.h + (size_t)t * d;
        if (m->c.has_embedding) {
            mat_row(&m->embed, s->tokens[t], h);
            if (m->c.embedding_scale != 1) w->isa->scale(h, m->c.embedding_scale, (int)d);
        } else
            memcpy(h, s->hidden + (size_t)t * d, d * 4);
        for (int r = 0; r < m->num_ropes; r++) {
            const size_t at = ((size_t)r * (size_t)m->scratch.tokens + (size_t)t) * (size_t)half;
            for (int i = 0; i < half; i++) { // in double, so that every C library rounds to the same float
                double angle = (double)((float)m->scratch.position[t] * m->ropes[r].inverse_frequencies[i]);
                m->scratch.cos[at + (size_t)i] = (float)cos(angle) * m->ropes[r].factor;
                m->scratch.sin[at + (size_t)i] = (float)sin(angle) * m->ropes[r].factor;
            }
        }
    }
    pool_meet(w->walk, w->T);
}

static void leave(ctx_t *w, const float *post) {
    model_t *m = w->m;
    const step_t *s = w->s;
    const size_t d = (size_t)m->c.d_model;
    if (post) norm_phase(w, NULL, post);
    if (!m->c.has_head) {
        TASKS(t, w->T, 16) memcpy(s->out + (size_t)t * d, m->scratch.h + (size_t)t * d, d * 4);
        pool_meet(w->walk, w->T);
        return;
    }
    const int rows = s->num_logits;
    if (!rows) return;
    TASKS(i, rows, 1) {
        float *out = w->scratch->total;
        w->isa->rmsnorm(m->scratch.h + (size_t)s->logit_rows[i] * d, m->norm, (int)d, m->c.norm_eps, out);
        w->isa->quantize(out, (int)d, &m->scratch.x, i, 0);
    }
    pool_meet(w->walk, rows);
    const mat_t *head = m->head.kind == MAT_NONE ? &m->embed : &m->head;
    TASKS(i, head->num_blocks, 8) project(w, head, i, &m->scratch.x, rows, s->out, (size_t)head->rows, NULL, 0);
    pool_meet(w->walk, head->num_blocks);
}

static void walk_layers(void *arg, walk_t *walk) {
    model_t *m = arg;
    ctx_t state = {m, m->isa, m->threads + walk->thread, &m->step, m->step.num_tokens, walk}, *w = &state;
    const float *post = NULL;
    enter(w);
    for (int i = 0; i < m->c.num_layers; i++) {
        layer(w, i, post);
        post = m->layers[i].vecs[VEC_MLP_POST_NORM];
    }
    leave(w, post);
}

static int reserve(model_t *m, int T) {
    scratch_t *w = &m->scratch;
    if (T <= w->tokens) return 0;
    const size_t n = (size_t)T, d = (size_t)m->c.d_model, hd = (size_t)m->c.head_dim;
    free(w->h), free(w->qkv), free(w->branch), free(w->cos), free(w->sin), free(w->position), free(w->span_of);
    act_free(&w->x), act_free(&w->attention), act_free(&w->ff);
    w->tokens = 0; // until all of it is there
    w->h = aligned_zeroed(n * d * 4);
    w->qkv = aligned_zeroed(n * hd * (size_t)(m->c.num_heads + 2 * m->c.num_kv_heads) * 4);
    w->branch = m->c.post_norms ? aligned_zeroed(n * d * 4) : NULL;
    w->cos = aligned_zeroed((size_t)m->num_ropes * n * hd / 2 * 4);
    w->sin = aligned_zeroed((size_t)m->num_ropes * n * hd / 2 * 4);
    w->position = aligned_zeroed(n * 4);
    w->span_of = aligned_zeroed(n * 4);
    if (!w->h || !w->qkv || (m->c.post_norms && !w->branch) || !w->cos || !w->sin || !w->position || !w->span_of ||
        act_init(&w->x, T, m->c.d_model, m->needs_floats) ||
        act_init(&w->attention, T, m->c.num_heads * m->c.head_dim, m->needs_floats) ||
        act_init(&w->ff, T, m->c.d_ff, m->needs_floats))
        return -1;
    w->tokens = T;
    return 0;
}

// Returns 0, or -1 when memory ran out (nothing was computed).
EXPORT int roost_step(model_t *m, const step_t *s) {
    if (s->num_tokens < 1) return 0;
    pool_begin(m->pool);
    if (reserve(m, s->num_tokens) || attention_plan(m, s)) return -1;
    for (int i = 0, token = 0; i < s->num_spans; i++)
        for (int k = 0; k < s->count[i]; k++, token++) m->scratch.position[token] = s->start[i] + k, m->scratch.span_of[token] = i;
    m->step = *s;
    pool_run(m->pool, walk_layers, m);
    return 0;
}
