/* Sums of gradients in float of bfloat16 gradients, without a copy of them in float. */

#include "vectors.h"

#ifndef WIDE

#define ELEMENTS_PER_TASK (1L << 16)

struct sum {
    float *total;
    const bfloat16 *x;
    long size;
};

static void add_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct sum *s = arguments;
    long j = task * ELEMENTS_PER_TASK, end = min_long(s->size, j + ELEMENTS_PER_TASK);
    for (; j + LANES <= end; j += LANES) store(s->total + j, load(s->total + j) + load_bfloat16(s->x + j));
    for (; j < end; j++) {
        float wide;
        widen(s->x + j, &wide, 1);
        s->total[j] += wide;
    }
}

/* total += x */
EXPORT void add_bfloat16(float *total, const bfloat16 *x, long size, long threads) {
    struct sum s = {total, x, size};
    in_parallel(add_task, &s, (size + ELEMENTS_PER_TASK - 1) / ELEMENTS_PER_TASK, threads);
}

#endif
