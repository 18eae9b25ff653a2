/* Runs tasks on torch's own threads: Python passes in the address of `GOMP_parallel` of the OpenMP library that torch
   loaded. A second thread pool would compete with torch's for the cores. */

#include "vectors.h"

typedef void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel region;
static int (*number)(void);

EXPORT void use_threads(void *start, void *which) {
    region = (parallel)start;
    number = (int (*)(void))which;
}

struct share {
    work what;
    void *arguments;
    long tasks, next;
};

static void body(void *data) {
    struct share *share = data;
    long task;
    while ((task = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED)) < share->tasks)
        share->what(share->arguments, task, number());
}

/* Runs each task once on one of `threads` threads; a free thread takes the next task. */
void in_parallel(work what, void *arguments, long tasks, long threads) {
    threads = min_long(threads, tasks);
    if (threads < 2 || !region) {
        for (long task = 0; task < tasks; task++) what(arguments, task, 0);
        return;
    }
    struct share share = {what, arguments, tasks, 0};
    region(body, &share, (unsigned)threads, 0);
}
