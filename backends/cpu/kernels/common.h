// Shapes shared by all kernels.
//
// Weights are packed in panels of 16 rows ("blocks"). Inside a panel the inputs are interleaved by 4, so that one
// 64-byte load holds 4 inputs of each of 16 rows and an 8-bit dot product leaves one 32-bit sum per row: no horizontal
// sums, and one broadcast of 4 activations feeds 16 rows. Activations are int8 with one scale per 32 inputs.
//
// Every float sum has one order, whatever the batch, the thread count or the instruction set: a token's result depends
// on nothing but its own sequence, to the bit.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ROWS 16        // rows in a panel
#define GROUP 32       // inputs that share an activation scale
#define PAGE 32        // tokens in a KV page; must equal PAGE_TOKENS in backends/base.py
#define SPLIT_PAGES 16 // attention is summed in splits of this many pages, merged in order
#define TILE_TOKENS 8  // most tokens that one gemm call takes
#define ATTN_TOKENS 16 // most query tokens in one attention task

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t half_t;

enum { MAT_NONE, MAT_Q4, MAT_Q5, MAT_Q6, MAT_Q8, MAT_F16, MAT_BF16, MAT_F32 };
enum { ACT_SILU, ACT_GELU_TANH };

// One packed matrix. A quantized panel holds a record for each group of 32 inputs: the low 4 bits (or all 8) of 16 rows, the
// plane of higher bits, float16 scales [32 / group][16], float16 biases [16]. A product reads it front to back as one stream.
typedef struct {
    int32_t kind, rows, cols, group, symmetric;
    int32_t num_blocks, num_groups;
    float unit; // stored scales and biases are to be multiplied by this power of two
    size_t record_bytes, block_bytes, num_bytes;
    uint8_t *data;
} mat_t;

// Where the parts of a record begin.
INLINE int high_at(int bits) { return bits == 8 ? 512 : 256; }
INLINE int scale_at(int bits) { return high_at(bits) + (bits == 5 ? 64 : bits == 6 ? 128 : 0); }
INLINE int bias_at(int bits, int group) { return scale_at(bits) + GROUP / group * ROWS * 2; }

// Activations of T tokens, quantized (for quantized matrices) and plain (for float ones).
typedef struct {
    int32_t cols, num_groups;
    int8_t *q;       // [T][cols]
    float *scale;    // [T][groups]
    float *weighted; // [T][groups]: scale times the sum of the group's codes
    int32_t *sum;    // [T][groups]: sum of codes
    int32_t *sum16;  // [T][groups][2]: the same for each half of the group
    float *f;        // [T][cols], or NULL when no consumer is a float matrix
} act_t;

// One running softmax: maximum, denominator and numerator, summed page after page.
typedef struct {
    float max, sum;
} softmax_t;

// What differs between instruction sets.
typedef struct {
    const char *name;
    int tile; // tokens that one gemm call likes best
    // out[token][16] = rows of panel `block` times activations of tokens t0 .. t0 + n - 1 (n <= TILE_TOKENS)
    void (*gemm)(const mat_t *m, int block, const act_t *x, int t0, int n, float *out);
    void (*quantize)(const float *x, int n, const act_t *a, int token, int col);
    void (*rmsnorm)(const float *x, const float *w, int n, float eps, float *out);
    void (*add)(float *x, const float *y, int n);
    void (*scale)(float *x, float s, int n);
    void (*rope)(float *x, const float *cos, const float *sin, int head_dim);
    void (*gate)(int activation, float *gate, const float *up, int n); // gate = act(gate) * up
    void (*to_half)(const float *x, half_t *out, int n);
    void (*from_half)(const half_t *x, float *out, int n);
    // One page of attention for `rows` query rows q[rows][head_dim]. Row r sees tokens lo[r] <= j < hi[r] of the page.
    // state[r], o[r][head_dim] are updated. `work` holds rows * PAGE floats, `page` 2 * head_dim * PAGE floats.
    void (*attend)(int rows, int head_dim, const float *q, const half_t *keys, const half_t *values, const int *lo,
                   const int *hi, softmax_t *state, float *o, float *work, float *page);
    // total += part, both being numerators with their state
    void (*merge)(int head_dim, softmax_t *total, float *o, const softmax_t *part, const float *po);
} isa_t;

const isa_t *roost_isa_portable(void);
const isa_t *roost_isa_avx2(void);   // NULL where this CPU or build has no such thing
const isa_t *roost_isa_avx512(void);
const isa_t *roost_isa_neon(void);
const isa_t *roost_isa_by_name(const char *name); // "auto" or NULL: the best one

INLINE float half_to_float(half_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mantissa = h & 0x3ff, exponent = (h >> 10) & 31, bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        union { float f; uint32_t u; } v = {(float)mantissa * 0x1p-24f};
        bits = sign | v.u;
    }
    union { uint32_t u; float f; } out = {bits};
    return out.f;
}

INLINE half_t float_to_half(float x) { // rounds to nearest even, like F16C and NEON do
    union { float f; uint32_t u; } v = {x};
    uint32_t sign = v.u >> 16 & 0x8000, a = v.u & 0x7fffffff;
    if (a > 0x7f800000) return (half_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000) return (half_t)(sign | 0x7c00);
    if (a < 0x38800000) { // subnormal: let the float adder round it
        union { float f; uint32_t u; } s = {.u = a};
        s.f += 0.5f;
        return (half_t)(sign | (s.u - 0x3f000000));
    }
    a += 0xfff + (a >> 13 & 1);
    return (half_t)(sign | (a - 0x38000000) >> 13);
}
