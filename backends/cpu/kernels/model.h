// One shard: packed weights, KV pages and the scratch of a step.
#pragma once
#include "common.h"
#include "pool.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_ROPES 4

typedef struct {
    int32_t num_layers; // of this shard
    int32_t d_model, d_ff, num_heads, num_kv_heads, head_dim, vocab_size;
    int32_t activation, has_embedding, has_head, post_norms, num_threads;
    float norm_eps, attention_scale, embedding_scale;
} config_t;

// Slots by which Python names weights; the order is that of backends/cpu/engine.py.
enum { MAT_EMBED, MAT_HEAD, MAT_Q, MAT_K, MAT_V, MAT_O, MAT_GATE, MAT_UP, MAT_DOWN, NUM_MATS };
enum {
    VEC_NORM, VEC_ATTN_NORM, VEC_MLP_NORM, VEC_Q_BIAS, VEC_K_BIAS, VEC_V_BIAS, VEC_Q_NORM, VEC_K_NORM,
    VEC_ATTN_POST_NORM, VEC_MLP_POST_NORM, NUM_VECS
};

typedef struct arena_part {
    struct arena_part *previous;
    size_t size, used;
} arena_part_t;

typedef struct {
    arena_part_t *last;
} arena_t;

typedef struct {
    mat_t mats[NUM_MATS]; // MAT_Q .. MAT_DOWN
    float *vecs[NUM_VECS];
    int32_t window; // 0: sees everything
    int32_t rope;
} layer_t;

typedef struct {
    float *inverse_frequencies; // [head_dim / 2]
    float factor;               // on both cosine and sine
} rope_t;

// One attention task: query tokens first .. first + count - 1 of a span, one KV head, a range of splits.
typedef struct {
    int32_t span, first, count, head, split, num_splits, partial; // partial: index of its result, -1 when it is whole
} attn_task_t;

typedef struct {
    int32_t num_tokens, num_spans, num_logits;
    const int32_t *tokens;      // [tokens], read by the first stage
    const float *hidden;        // [tokens][d_model], read by the others
    const int32_t *start;       // [spans] position of the first token
    const int32_t *count;       // [spans]
    const int32_t *page_offset; // [spans] where a sequence's pages begin in `pages`
    const int32_t *pages;
    const int32_t *logit_rows; // [logits] index of a token
    float *out;                // [logits][vocab_size] at the last stage, else [tokens][d_model]
} step_t;

typedef struct {
    float *q, *o, *total, *work, *page;
    softmax_t *state, *total_state;
    int *lo, *hi;
    half_t *half;
} thread_scratch_t;

typedef struct {
    int32_t tokens, tasks, combines, partial_rows, ropes;
    float *h, *qkv, *branch, *cos, *sin;
    act_t x, attention, ff;
    int32_t *position, *span_of; // [tokens]
    attn_task_t *task, *combine;
    softmax_t *partial_state; // [partial][rows]
    float *partial_o;         // [partial][rows][head_dim]
} scratch_t;

typedef struct model {
    config_t c;
    const isa_t *isa;
    pool_t *pool;
    layer_t *layers;
    arena_t arena; // of all matrices
    mat_t embed, head;
    float *norm;
    rope_t ropes[MAX_ROPES];
    int num_ropes, attn_tokens, needs_floats; // needs_floats: some matrix is not quantized
    half_t *kv;
    size_t kv_bytes;
    int32_t num_pages;
    scratch_t scratch;
    thread_scratch_t *threads;
    step_t step; // the one that is being taken, with its attention plan
    struct { int num_tasks, num_combines, fused; } plan;
} model_t;

// memory.c
void *aligned_zeroed(size_t bytes);                // 64-byte aligned, NULL when there is none
void *arena_take(arena_t *a, size_t bytes);        // the same, freed together
void arena_free(arena_t *a);
int mat_init(mat_t *m, arena_t *arena, int kind, int rows, int cols, int group, int symmetric, float unit);
void mat_row(const mat_t *m, int row, float *out); // dequantizes one row
int act_init(act_t *a, int tokens, int cols, int with_floats);
void act_free(act_t *a);
half_t *kv_page(const model_t *m, int layer, int page, int head); // keys [head_dim][PAGE], then values [PAGE][head_dim]

// attention.c
int attention_plan(model_t *m, const step_t *s);
void attention_append(model_t *m, const step_t *s, int layer, int token, int kv_head, thread_scratch_t *t);
void attention_run(model_t *m, const step_t *s, int layer, const attn_task_t *task, int fused, thread_scratch_t *t);
void attention_combine(model_t *m, const attn_task_t *task, thread_scratch_t *t, const step_t *s);
