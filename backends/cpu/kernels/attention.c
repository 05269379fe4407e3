// Attention over paged keys and values.
//
// A row (one query token, one head) is summed page after page inside a split of SPLIT_PAGES pages, and splits are
// merged in order. Both grids are fixed by absolute position, so a row's bits do not depend on how the prompt was
// chunked or on who computes which split. Decode at long context spreads the splits over threads.
#include "model.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SPLIT = SPLIT_PAGES * PAGE };

static int grow(void **p, size_t count, size_t size) {
    void *q = realloc(*p, count * size);
    if (!q) return -1;
    *p = q;
    return 0;
}

// Lists the tasks of a step. `fused` says that every span is one token, whose keys its own task can append.
int attention_plan(model_t *m, const step_t *s) {
    scratch_t *w = &m->scratch;
    const int heads = m->c.num_kv_heads, group = m->c.num_heads / heads;
    int tasks = 0, combines = 0, partials = 0;
    for (int pass = 0; pass < 2; pass++) { // count, then fill
        tasks = combines = partials = 0;
        m->plan.fused = 1;
        for (int i = 0; i < s->num_spans; i++) {
            if (s->count[i] > 1) m->plan.fused = 0;
            const int alone = s->count[i] <= m->attn_tokens;
            for (int first = 0; first < s->count[i]; first += m->attn_tokens) {
                const int count = s->count[i] - first < m->attn_tokens ? s->count[i] - first : m->attn_tokens;
                const int splits = (s->start[i] + first + count - 1) / SPLIT + 1;
                for (int h = 0; h < heads; h++) {
                    attn_task_t t = {i, first, count, h, 0, splits, -1};
                    if (alone && splits > 1) {
                        t.partial = partials;
                        if (pass) w->combine[combines] = t;
                        combines++;
                        t.num_splits = 1;
                        for (int p = 0; p < splits; p++, t.split++, t.partial++)
                            if (pass) w->task[tasks + p] = t;
                        tasks += splits, partials += splits;
                    } else {
                        if (pass) w->task[tasks] = t;
                        tasks++;
                    }
                }
            }
        }
        if (pass) break;
        if (tasks > w->tasks) {
            if (grow((void **)&w->task, (size_t)tasks, sizeof(attn_task_t))) return -1;
            w->tasks = tasks;
        }
        if (combines > w->combines) {
            if (grow((void **)&w->combine, (size_t)combines, sizeof(attn_task_t))) return -1;
            w->combines = combines;
        }
        const int rows = partials * m->attn_tokens * group;
        if (rows > w->partial_rows) {
            if (grow((void **)&w->partial_state, (size_t)rows, sizeof(softmax_t))) return -1;
            if (grow((void **)&w->partial_o, (size_t)rows, (size_t)m->c.head_dim * 4)) return -1;
            w->partial_rows = rows;
        }
    }
    m->plan.num_tasks = tasks, m->plan.num_combines = combines;
    return 0;
}

static void head_norm_and_rope(const model_t *m, const layer_t *l, float *x, const float *norm, int token) {
    const int hd = m->c.head_dim;
    const size_t at = ((size_t)l->rope * (size_t)m->scratch.tokens + (size_t)token) * (size_t)(hd / 2);
    if (norm) m->isa->rmsnorm(x, norm, hd, m->c.norm_eps, x);
    m->isa->rope(x, m->scratch.cos + at, m->scratch.sin + at, hd);
}

// Writes one token's key and value of one head into its page.
void attention_append(model_t *m, const step_t *s, int layer, int token, int kv_head, thread_scratch_t *t) {
    const layer_t *l = m->layers + layer;
    const int hd = m->c.head_dim, heads = m->c.num_heads, kv = m->c.num_kv_heads;
    const int span = m->scratch.span_of[token], position = m->scratch.position[token], lane = position % PAGE;
    float *row = m->scratch.qkv + (size_t)token * (size_t)((heads + 2 * kv) * hd);
    float *key = row + (size_t)(heads + kv_head) * hd, *value = row + (size_t)(heads + kv + kv_head) * hd;
    half_t *page = kv_page(m, layer, s->pages[s->page_offset[span] + position / PAGE], kv_head);
    head_norm_and_rope(m, l, key, l->vecs[VEC_K_NORM], token);
    m->isa->to_half(key, t->half, hd);
    for (int d = 0; d < hd; d++) page[(size_t)d * PAGE + lane] = t->half[d];
    m->isa->to_half(value, page + (size_t)hd * PAGE + (size_t)lane * hd, hd);
}

static void finish(model_t *m, const step_t *s, const attn_task_t *task, const softmax_t *state, float *o) {
    const int hd = m->c.head_dim, group = m->c.num_heads / m->c.num_kv_heads;
    int token = task->first;
    for (int i = 0; i < task->span; i++) token += s->count[i];
    for (int i = 0; i < task->count; i++, token++)
        for (int g = 0; g < group; g++, state++, o += hd) {
            m->isa->scale(o, 1 / state->sum, hd);
            m->isa->quantize(o, hd, &m->scratch.attention, token, (task->head * group + g) * hd);
        }
}

void attention_run(model_t *m, const step_t *s, int layer, const attn_task_t *task, int fused, thread_scratch_t *t) {
    const layer_t *l = m->layers + layer;
    const int hd = m->c.head_dim, heads = m->c.num_heads, kv = m->c.num_kv_heads, group = heads / kv;
    const int rows = task->count * group, position = s->start[task->span] + task->first;
    int token = task->first;
    for (int i = 0; i < task->span; i++) token += s->count[i];
    if (fused && task->split + task->num_splits > position / SPLIT) attention_append(m, s, layer, token, task->head, t);
    for (int i = 0; i < task->count; i++)
        for (int g = 0; g < group; g++) {
            const float *from = m->scratch.qkv + (size_t)(token + i) * (size_t)((heads + 2 * kv) * hd) + (size_t)(task->head * group + g) * hd;
            float *q = t->q + (size_t)(i * group + g) * hd;
            memcpy(q, from, (size_t)hd * 4);
            head_norm_and_rope(m, l, q, l->vecs[VEC_Q_NORM], token + i);
            m->isa->scale(q, m->c.attention_scale, hd);
        }
    for (int r = 0; r < rows; r++) t->total_state[r] = (softmax_t){-INFINITY, 0};
    const int32_t *pages = s->pages + s->page_offset[task->span];
    const int last = position + task->count - 1;                                       // newest position of any row
    const int oldest = l->window && position >= l->window ? position - l->window + 1 : 0; // oldest that any row sees
    for (int split = task->split; split < task->split + task->num_splits; split++) {
        softmax_t *state = t->state;
        float *o = t->o;
        if (task->partial >= 0) {
            state = m->scratch.partial_state + (size_t)task->partial * (size_t)(m->attn_tokens * group);
            o = m->scratch.partial_o + (size_t)task->partial * (size_t)(m->attn_tokens * group) * hd;
        }
        for (int r = 0; r < rows; r++) state[r] = (softmax_t){-INFINITY, 0};
        memset(o, 0, (size_t)rows * (size_t)hd * 4);
        int from = split * SPLIT, to = (split + 1) * SPLIT - 1;
        if (from < oldest) from = oldest / PAGE * PAGE;
        if (to > last) to = last;
        for (int page = from / PAGE; page * PAGE <= to; page++) {
            for (int i = 0; i < task->count; i++) {
                int hi = position + i + 1 - page * PAGE;
                int lo = l->window ? hi - l->window : 0;
                for (int g = 0; g < group; g++) {
                    t->lo[i * group + g] = lo < 0 ? 0 : lo;
                    t->hi[i * group + g] = hi > PAGE ? PAGE : hi;
                }
            }
            const half_t *keys = kv_page(m, layer, pages[page], task->head);
            m->isa->attend(rows, hd, t->q, keys, keys + (size_t)hd * PAGE, t->lo, t->hi, state, o, t->work, t->page);
        }
        if (task->partial < 0)
            for (int r = 0; r < rows; r++)
                m->isa->merge(hd, t->total_state + r, t->total + (size_t)r * hd, state + r, o + (size_t)r * hd);
    }
    if (task->partial < 0) finish(m, s, task, t->total_state, t->total);
}

void attention_combine(model_t *m, const attn_task_t *task, thread_scratch_t *t, const step_t *s) {
    const int hd = m->c.head_dim, group = m->c.num_heads / m->c.num_kv_heads, rows = task->count * group;
    for (int r = 0; r < rows; r++) t->total_state[r] = (softmax_t){-INFINITY, 0};
    for (int p = 0; p < task->num_splits; p++) {
        const size_t at = (size_t)(task->partial + p) * (size_t)(m->attn_tokens * group);
        for (int r = 0; r < rows; r++)
            m->isa->merge(hd, t->total_state + r, t->total + (size_t)r * hd, m->scratch.partial_state + at + r,
                          m->scratch.partial_o + (at + (size_t)r) * hd);
    }
    finish(m, s, task, t->total_state, t->total);
}
