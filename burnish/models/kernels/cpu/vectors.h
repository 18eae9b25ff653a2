/* SIMD vectors of the machine's width, their exponential, and the interface for threads.

   Numbers are float, or double if WIDE is defined. There is no fast-math: sums are computed in the order written and
   rounded where written, so that a result is the same for any number of threads. Vectors are the compiler's extension, so
   that one source serves every machine. */

#ifndef BURNISH_VECTORS_H
#define BURNISH_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef WIDE
#define REAL double
#else
#define REAL float
#endif

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES ((long)(WIDTH / sizeof(REAL)))
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef REAL real;
typedef uint16_t bfloat16; /* the upper half of a float; only for storage */
typedef real vec __attribute__((vector_size(WIDTH)));
typedef real loose __attribute__((vector_size(WIDTH), aligned(sizeof(real)), may_alias));
#ifdef WIDE
typedef int64_t bits __attribute__((vector_size(WIDTH)));
#else
typedef int32_t bits __attribute__((vector_size(WIDTH)));
#endif

INLINE vec load(const real *p) { return *(const loose *)p; }
INLINE void store(real *p, vec x) { *(loose *)p = x; }
INLINE vec all(real x) { return x - (vec){0}; }
/* a * b + c, rounded once if the machine has FMA. It is explicit because a compiler contracts products and sums in some
   places and not in others; a row's bits would then depend on its tile (-ffp-contract=off forbids that). */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__) && defined(WIDE)
    return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__) && defined(WIDE)
    return _mm256_fmadd_pd(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__) && defined(WIDE)
    return (vec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec pick(bits where, vec yes, vec no) { return (vec)((where & (bits)yes) | (~where & (bits)no)); }
/* x, or `bound` where it is larger or smaller; NaN stays NaN. */
INLINE vec at_least(vec x, vec bound) {
#if defined(__AVX512F__) && !defined(WIDE)
    return _mm512_max_ps(bound, x);
#else
    return pick(x < bound, bound, x);
#endif
}
INLINE vec at_most(vec x, vec bound) {
#if defined(__AVX512F__) && !defined(WIDE)
    return _mm512_min_ps(bound, x);
#else
    return pick(x > bound, bound, x);
#endif
}

INLINE real logarithm(real x) { return sizeof(real) == 8 ? (real)log((double)x) : (real)logf((float)x); }
INLINE long padded(long n) { return (n + LANES - 1) / LANES * LANES; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

typedef bits loose_bits __attribute__((aligned(sizeof(real)), may_alias));

/* (first, first + 1, ...), for first < 9. */
INLINE bits numbers_from(long first) {
    static const __typeof__((bits){0}[0]) number[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                                      12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
    return *(const loose_bits *)(number + first);
}

/* Lane i of the result is lane i + by of x, counted modulo LANES. */
INLINE vec shifted_lanes(vec x, long by) {
#ifdef __clang__ /* which makes one shuffle of this loop; gcc would store and load the vector */
    vec y = x;
    for (long i = 0; i < LANES; i++) y[i] = x[(i + by) % LANES];
    return y;
#else
    return __builtin_shuffle(x, numbers_from(by));
#endif
}

/* The sum of all lanes, in a fixed order: the upper half is added to the lower half, repeatedly. */
INLINE real total(vec x) {
#pragma GCC unroll 4
    for (long half = LANES / 2; half; half /= 2) x += shifted_lanes(x, half);
    return x[0];
}

INLINE real largest(vec x) {
#pragma GCC unroll 4
    for (long half = LANES / 2; half; half /= 2) {
        vec y = shifted_lanes(x, half);
        x = pick(y > x, y, x);
    }
    return x[0];
}

/* The first n < LANES numbers, padded with zeros. */
INLINE vec load_some(const real *p, long n) {
    vec x = {0};
    memcpy(&x, p, n * sizeof(real));
    return x;
}

INLINE void store_some(real *p, vec x, long n) { memcpy(p, &x, n * sizeof(real)); }

INLINE vec load_upto(const real *p, long n) { return n >= LANES ? load(p) : load_some(p, n); }

INLINE void store_upto(real *p, vec x, long n) {
    if (n >= LANES)
        store(p, x);
    else
        store_some(p, x, n);
}

#ifndef WIDE
typedef uint32_t pairs __attribute__((vector_size(WIDTH)));
typedef uint32_t loose_pairs __attribute__((vector_size(WIDTH), aligned(sizeof(bfloat16)), may_alias));

/* 2 LANES numbers stored in pairs (x[0], x[LANES]), (x[1], x[LANES + 1]), ...: one shift and one mask widen them. */
INLINE void load_pairs(const bfloat16 *p, vec *first, vec *second) {
    pairs both = *(const loose_pairs *)p;
    *first = (vec)(both << 16);
    *second = (vec)(both & 0xffff0000u);
}

INLINE void widen(const bfloat16 *x, float *y, long n) {
    for (long i = 0; i < n; i++) {
        uint32_t wide = (uint32_t)x[i] << 16;
        memcpy(y + i, &wide, sizeof wide);
    }
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE bfloat16 narrow(float x) {
    uint32_t wide;
    memcpy(&wide, &x, sizeof wide);
    return (bfloat16)(x != x ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

typedef uint16_t halves __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t loose_halves __attribute__((vector_size(WIDTH / 2), aligned(sizeof(bfloat16)), may_alias));

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 9
INLINE vec load_bfloat16(const bfloat16 *p) {
    float wide[WIDTH / sizeof(float)];
    widen(p, wide, LANES);
    return load(wide);
}

INLINE void store_bfloat16(bfloat16 *p, vec x) {
    for (long i = 0; i < LANES; i++) p[i] = narrow(x[i]);
}
#else
INLINE vec load_bfloat16(const bfloat16 *p) { return (vec)(__builtin_convertvector(*(const loose_halves *)p, pairs) << 16); }

/* `narrow` of LANES numbers. */
INLINE void store_bfloat16(bfloat16 *p, vec x) {
    pairs wide = (pairs)x, is_nan = (pairs)(x != x);
    wide = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    *(loose_halves *)p = __builtin_convertvector((wide & ~is_nan) | (is_nan & 0x7fc0), halves);
}
#endif
#endif

/* e^x = 2^n e^r with |r| <= ln 2 / 2, accurate to one or two units in the last place: a polynomial gives e^r, and n is
   added to the exponent bits. Below the smallest normal number the result is 0; NaN stays NaN. */
INLINE vec exponential(vec x) {
    const int is_wide = sizeof(real) == 8;
    const real low = is_wide ? (real)-708.0 : (real)-87.3, high = is_wide ? (real)709.0 : (real)88.7;
    const real magic = is_wide ? (real)6755399441055744.0 : (real)12582912.0; /* 1.5 * 2^52 or 2^23: adding it rounds */
    const real upper = is_wide ? (real)6.93147180369123816490e-01 : (real)0.693359375;
    const real lower = is_wide ? (real)1.90821492927058770002e-10 : (real)-2.12194440e-4;
    vec inside = at_most(at_least(x, all(low)), all(high));
    vec shifted = fused(inside, all((real)1.4426950408889634), all(magic));
    vec n = shifted - magic;
    vec r = fused(n, all(-lower), fused(n, all(-upper), inside));
    static const double inverse[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                     1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                     1.0 / 6,          0.5,             1.0,            1.0};
    vec sum = all((real)inverse[is_wide ? 0 : 6]);
#pragma GCC unroll 16
    for (int i = is_wide ? 1 : 7; i < 14; i++) sum = fused(sum, r, all((real)inverse[i]));
    const int exponent = is_wide ? 52 : 23; /* the sum is about 1: n is added to its exponent */
    vec y = pick(x < low, (vec){0}, (vec)((bits)sum + ((bits)shifted << exponent)));
    return pick(x != x, x, y);
}

/* One task: called with its index and the index of its thread. The result must not depend on the thread. */
typedef void (*work)(void *arguments, long task, long thread);

void in_parallel(work what, void *arguments, long tasks, long threads);

#endif
