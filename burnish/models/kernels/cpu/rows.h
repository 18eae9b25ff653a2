/* Operations on one row, shared by the decode step and the learner's operations. */

#ifndef BURNISH_ROWS_H
#define BURNISH_ROWS_H

#include "vectors.h"

/* 1 / rms(x). */
static inline real rms_scale(const real *x, long n, double eps) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= n; i += LANES) sum = fused(load(x + i), load(x + i), sum);
    if (i < n) {
        vec last = load_some(x + i, n - i);
        sum = fused(last, last, sum);
    }
    return (real)(1 / sqrt((double)total(sum) / n + eps));
}

/* y = x / rms(x) * (shift + weight) * factor; x and y may be the same. Returns 1 / rms(x). */
static inline real norm_row(const real *x, const real *weight, real *y, long n, double eps, double shift, real factor) {
    real scale = rms_scale(x, n, eps), by = scale * factor;
    for (long i = 0; i < n; i += LANES)
        store_upto(y + i, load_upto(x + i, n - i) * by * (load_upto(weight + i, n - i) + (real)shift), n - i);
    return scale;
}

/* Rotates one head in the half-split layout by cos and signed sin [dim]; way -1 is the inverse. x and y may be the same. */
static inline void rotate_row(const real *x, const real *cos, const real *sin, real *y, long dim, real way) {
    long half = dim / 2;
    for (long i = 0; i < half; i += LANES) {
        long n = half - i;
        vec low = load_upto(x + i, n), high = load_upto(x + half + i, n);
        vec c = load_upto(cos + i, n), s = load_upto(sin + half + i, n) * way;
        store_upto(y + i, fused(low, c, -high * s), n);
        store_upto(y + half + i, fused(high, c, low * s), n);
    }
}

/* Which of the columns from j on are in [first, last). */
INLINE bits between(long j, long first, long last) {
    bits column = numbers_from(0);
    return (column >= (__typeof__(column[0]))(first - j)) & (column < (__typeof__(column[0]))(last - j));
}

/* x = exp(scale * x - best) at columns [first, last) and 0 elsewhere, with best the largest scale * x there; `width` is a
   multiple of LANES. Returns the sum. */
static inline real exponentials(real *x, long width, long first, long last, real scale, real *best) {
    vec top = all(-INFINITY), sum = {0};
    for (long j = 0; j < width; j += LANES) {
        vec y = load(x + j);
        top = pick(between(j, first, last) & (y > top), y, top);
    }
    *best = largest(top) * scale;
    for (long j = 0; j < width; j += LANES) {
        vec e = exponential(fused(load(x + j), all(scale), all(-*best)));
        e = pick(between(j, first, last), e, (vec){0});
        sum += e;
        store(x + j, e);
    }
    return total(sum);
}

/* 1 / (1 + e^-x). GELU in its tanh form is x * logistic(gelu_argument(x)), where the argument is twice that of the tanh. */
INLINE vec logistic(vec x) { return 1 / (1 + exponential(-x)); }
INLINE vec gelu_argument(vec x) { return x * fused((real)0.07135481627260025 * x, x, all((real)1.5957691216057308)); }

/* y [n] = act(gate) * up of a row [gate, up], where act is SiLU, x * logistic(x), or GELU. */
static inline void gate_row(const real *gate_up, real *y, long n, int is_gelu) {
    for (long i = 0; i < n; i += LANES) {
        vec gate = load_upto(gate_up + i, n - i), up = load_upto(gate_up + n + i, n - i);
        store_upto(y + i, gate * logistic(is_gelu ? gelu_argument(gate) : gate) * up, n - i);
    }
}

#endif
