/* The decoding step's small operations, each in one pass over its data: attention of one query over a cache, rotary positions with
 * the write to the cache, RMS norm, gated activation. What torch does with one to ten calls each is one call here; its matrix products stay.
 *
 * Compiled on first use by the system's C compiler (native/__init__.py), once for float and once for bfloat16 (T, LOAD and STORE
 * below). Sums are in float. Work is cut by sequence, head or row, so results do not depend on the number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t T;
#define NAME(x) x##_bfloat16
static inline float LOAD(T x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline T STORE(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (T)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
#else
typedef float T;
#define NAME(x) x##_float32
#define LOAD(x) (x)
#define STORE(x) (x)
#endif

#define LANES 16     /* positions that stand side by side in the cache of keys */
#define TILE 32      /* positions whose scores are held at a time: two blocks of LANES */
#define MOST_DIM 256 /* largest head */

/* Vectors of 16 floats, whatever the processor has: the compiler cuts them to its own size. */
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline vector load(const T *from) {
#ifdef BFLOAT16
    halves half;
    memcpy(&half, from, sizeof half);
    words wide = __builtin_convertvector(half, words) << 16;
    vector value;
    memcpy(&value, &wide, sizeof value);
#else
    vector value;
    memcpy(&value, from, sizeof value);
#endif
    return value;
}

/* e^x for x <= 0, relative error below 2e-7; 0 below -87. Branch-free, so that loops over it are vectorised. */
static inline float exp_negative(float x) {
    float clipped = x < -87.0f ? -87.0f : x;
    float n = rintf(clipped * 1.44269504f);
    float r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

#define JOIN(a, b, c) a##_##b##_##c
#define ATTEND(group, dim) JOIN(attend, group, dim)

#define GROUP 1
#define DIM 64
#define NAMED 64
#define DIM_BOUND 64
#include "attend.h"
#define GROUP 2
#define DIM 64
#define NAMED 64
#define DIM_BOUND 64
#include "attend.h"
#define GROUP 3
#define DIM 64
#define NAMED 64
#define DIM_BOUND 64
#include "attend.h"
#define GROUP 4
#define DIM 64
#define NAMED 64
#define DIM_BOUND 64
#include "attend.h"
#define GROUP 7
#define DIM 64
#define NAMED 64
#define DIM_BOUND 64
#include "attend.h"
#define GROUP 1
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 2
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 4
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 5
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 7
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 8
#define DIM 128
#define NAMED 128
#define DIM_BOUND 128
#include "attend.h"
#define GROUP 1
#define DIM 32
#define NAMED 32
#define DIM_BOUND 32
#include "attend.h"
#define GROUP 2
#define DIM 32
#define NAMED 32
#define DIM_BOUND 32
#include "attend.h"
#define GROUP 4
#define DIM 32
#define NAMED 32
#define DIM_BOUND 32
#include "attend.h"
#define GROUP 1
#define DIM 80
#define NAMED 80
#define DIM_BOUND 80
#include "attend.h"
#define GROUP 1
#define DIM 256
#define NAMED 256
#define DIM_BOUND 256
#include "attend.h"
#define GROUP 2
#define DIM 256
#define NAMED 256
#define DIM_BOUND 256
#include "attend.h"
#define GROUP 4
#define DIM 256
#define NAMED 256
#define DIM_BOUND 256
#include "attend.h"
/* Any other size, one query at a time. */
#define GROUP 1
#define DIM dim
#define NAMED any
#define DIM_BOUND MOST_DIM
#include "attend.h"

#define CASE(G, D) \
    if (group == G && dim == D) { \
        attend_##G##_##D(query, keys, values, out, first, last, dim, scaling, softcap); \
        return; \
    }
static void attend(const T *query, const T *keys, const T *values, T *out, int64_t first, int64_t last, int group, int dim,
                   float scaling, float softcap) {
    CASE(1, 64) CASE(2, 64) CASE(3, 64) CASE(4, 64) CASE(7, 64) CASE(1, 128)
    CASE(2, 128) CASE(4, 128) CASE(5, 128) CASE(7, 128) CASE(8, 128) CASE(1, 32)
    CASE(2, 32) CASE(4, 32) CASE(1, 80) CASE(1, 256) CASE(2, 256) CASE(4, 256)
    for (int g = 0; g < group; g++) attend_1_any(query + g * dim, keys, values, out + g * dim, first, last, dim, scaling, softcap);
}

/* Attention of n tokens over the cache, where their own keys and values are already: out [n, key_heads * group, dim]; query the same, its
 * rows `stride` apart; keys [slots, key_heads, capacity / LANES, dim, LANES], values [slots, key_heads, capacity, dim]. Token i sees its
 * slot up to positions[i], and no more than `window` positions of it if that is not 0. */
void NAME(attention)(const T *query, int64_t stride, const T *keys, const T *values, T *out, const int64_t *positions,
                     const int64_t *slots, int64_t n, int64_t key_heads, int64_t group, int64_t capacity, int64_t dim, float scaling,
                     float softcap, int64_t window, int threads) {
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t item = 0; item < n * key_heads; item++) {
        /* Tokens of one prompt and head stand together: their keys stay in the processor's cache. */
        int64_t head = item / n, row = item % n;
        int64_t last = positions[row], cache = (slots[row] * key_heads + head) * capacity * dim;
        int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
        attend(query + row * stride + head * group * dim, keys + cache, values + cache,
                   out + (row * key_heads + head) * group * dim, first, last, (int)group, (int)dim, scaling, softcap);
    }
}

/* qkv [n, heads + 2 key_heads, dim]: queries and keys are rotated where they stand, keys and values also written to the cache.
 * cos, sin [table positions, width]: sin carries rotate_half's minus. Width 0: no rotation. */
void NAME(rotate_and_write)(T *qkv, const float *cos, const float *sin, const int64_t *positions, const int64_t *slots, T *keys,
                            T *values, int64_t n, int64_t heads, int64_t key_heads, int64_t capacity, int64_t dim, int64_t width,
                            int threads) {
    int64_t all = heads + 2 * key_heads, half = width / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 4)
    for (int64_t row = 0; row < n; row++) {
        T *x = qkv + row * all * dim;
        const float *c = cos + positions[row] * width, *s = sin + positions[row] * width;
        for (int64_t h = 0; h < heads + key_heads; h++) {
            T *low = x + h * dim, *high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float a = LOAD(low[i]), b = LOAD(high[i]);
                low[i] = STORE(a * c[i] + b * s[i]);
                high[i] = STORE(b * c[i + half] + a * s[i + half]);
            }
        }
        for (int64_t k = 0; k < key_heads; k++) {
            int64_t head = (slots[row] * key_heads + k) * capacity * dim, position = positions[row];
            T *column = keys + head + position / LANES * LANES * dim + position % LANES;
            for (int64_t i = 0; i < dim; i++) column[i * LANES] = x[(heads + k) * dim + i];
            memcpy(values + head + position * dim, x + (heads + key_heads + k) * dim, dim * sizeof(T));
        }
    }
}

/* out = x / sqrt(mean x² + eps) * weight, over rows of `width`. */
void NAME(rms_norm)(const T *x, const float *weight, T *out, int64_t n, int64_t width, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * width > 16384)
    for (int64_t row = 0; row < n; row++) {
        const T *from = x + row * width;
        T *to = out + row * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += LOAD(from[i]) * LOAD(from[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = STORE(LOAD(from[i]) * scale * weight[i]);
    }
}

/* gate_up [n, 2 width] → out [n, width] = silu(gate) * up. */
void NAME(silu_mul)(const T *gate_up, T *out, int64_t n, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * width > 16384)
    for (int64_t row = 0; row < n; row++) {
        const T *gate = gate_up + 2 * row * width, *up = gate + width;
        T *to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float x = LOAD(gate[i]), small = exp_negative(x < 0.0f ? x : -x); /* e^-|x| never overflows */
            float sigmoid = (x < 0.0f ? small : 1.0f) / (1.0f + small);
            to[i] = STORE(x * sigmoid * LOAD(up[i]));
        }
    }
}
