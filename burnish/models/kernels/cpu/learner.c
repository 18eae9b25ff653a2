/* Row-wise operations of the learner, forward and backward: norms, rotations, gated activations.

   A task is ROWS_PER_TASK rows, for any number of threads. Sums over all rows are computed within a task first and then over
   the tasks in order, so that they do not depend on the number of threads. */

#include "rows.h"

#define ROWS_PER_TASK 64 /* rows of a task */

INLINE long num_tasks(long rows) { return (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }

/* --- root-mean-square norm ---------------------------------------------------------------------------------------- */

struct norm {
    const real *x, *weight, *grad;
    real *y, *scale, *parts;
    long rows, size;
    double eps, shift;
};

static void norm_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct norm *n = arguments;
    for (long i = task * ROWS_PER_TASK; i < min_long(n->rows, (task + 1) * ROWS_PER_TASK); i++)
        n->scale[i] = norm_row(n->x + i * n->size, n->weight, n->y + i * n->size, n->size, n->eps, n->shift, 1);
}

/* y = x * scale * (shift + weight) with scale [rows] = 1 / rms(x). */
EXPORT void norm_forward(const real *x, const real *weight, real *y, real *scale, long rows, long size, double eps, double shift,
                         long threads) {
    struct norm n = {x, weight, 0, y, scale, 0, rows, size, eps, shift};
    in_parallel(norm_task, &n, num_tasks(rows), threads);
}

/* With normal = x * scale and slope = grad * (shift + weight): dx = scale * (slope - normal * mean(slope * normal)) and
   dweight = sum over rows of grad * normal. */
static void norm_back_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct norm *n = arguments;
    long size = n->size;
    real *part = n->parts + task * size;
    memset(part, 0, size * sizeof(real));
    for (long i = task * ROWS_PER_TASK; i < min_long(n->rows, (task + 1) * ROWS_PER_TASK); i++) {
        const real *x = n->x + i * size, *grad = n->grad + i * size;
        real scale = n->scale[i];
        vec sum = {0};
        for (long c = 0; c < size; c += LANES) {
            vec by = load_upto(grad + c, size - c) * (load_upto(x + c, size - c) * scale);
            store_upto(part + c, load_upto(part + c, size - c) + by, size - c);
            sum = fused(by, load_upto(n->weight + c, size - c) + (real)n->shift, sum);
        }
        real mean = total(sum) / (real)size * scale;
        for (long c = 0; c < size; c += LANES) {
            vec slope = load_upto(grad + c, size - c) * (load_upto(n->weight + c, size - c) + (real)n->shift);
            store_upto(n->y + i * size + c, scale * fused(load_upto(x + c, size - c), all(-mean), slope), size - c);
        }
    }
}

/* Gradients dx [rows, size] and dweight [size]; parts [tasks, size] is working memory. */
EXPORT void norm_backward(const real *grad, const real *x, const real *weight, real *scale, real *grad_x, real *grad_weight,
                          real *parts, long rows, long size, double shift, long threads) {
    struct norm n = {x, weight, grad, grad_x, scale, parts, rows, size, 0, shift};
    in_parallel(norm_back_task, &n, num_tasks(rows), threads);
    memset(grad_weight, 0, size * sizeof(real));
    for (long task = 0; task < num_tasks(rows); task++)
        for (long c = 0; c < size; c++) grad_weight[c] += parts[task * size + c];
}

EXPORT long norm_parts(long rows) { return num_tasks(rows); }

/* --- rotation ----------------------------------------------------------------------------------------------------- */

struct rotation {
    const real *x, *cos, *sin;
    real *y, way;
    long rows, heads, dim, x_row;
};

static void rotate_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct rotation *r = arguments;
    for (long i = task * ROWS_PER_TASK; i < min_long(r->rows, (task + 1) * ROWS_PER_TASK); i++)
        for (long h = 0; h < r->heads; h++)
            rotate_row(r->x + i * r->x_row + h * r->dim, r->cos + i * r->dim, r->sin + i * r->dim,
                       r->y + (i * r->heads + h) * r->dim, r->dim, r->way);
}

/* Rotates heads x, whose rows are x_row apart, by cos and sin [rows, dim]; way -1 is the inverse rotation. */
EXPORT void rotate_heads(const real *x, const real *cos, const real *sin, real *y, long rows, long heads, long dim, long x_row,
                         double way, long threads) {
    struct rotation r = {x, cos, sin, y, (real)way, rows, heads, dim, x_row};
    in_parallel(rotate_task, &r, num_tasks(rows), threads);
}

/* --- gated activation --------------------------------------------------------------------------------------------- */

struct gate {
    const real *gate_up, *grad;
    real *y;
    long rows, size;
    int is_gelu;
};

static void gate_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct gate *g = arguments;
    for (long i = task * ROWS_PER_TASK; i < min_long(g->rows, (task + 1) * ROWS_PER_TASK); i++)
        gate_row(g->gate_up + i * 2 * g->size, g->y + i * g->size, g->size, g->is_gelu);
}

/* y = act(gate) * up of rows [gate, up]. */
EXPORT void gate_forward(const real *gate_up, real *y, long rows, long size, long is_gelu, long threads) {
    struct gate g = {gate_up, 0, y, rows, size, (int)is_gelu};
    in_parallel(gate_task, &g, num_tasks(rows), threads);
}

/* With s = logistic(z): act = gate * s, and act' = s + gate * s (1 - s) z'. */
static void gate_back_task(void *arguments, long task, long thread) {
    (void)thread;
    const struct gate *g = arguments;
    long n = g->size;
    for (long i = task * ROWS_PER_TASK; i < min_long(g->rows, (task + 1) * ROWS_PER_TASK); i++) {
        const real *gate_up = g->gate_up + i * 2 * n, *grads = g->grad + i * n;
        real *into = g->y + i * 2 * n;
        for (long c = 0; c < n; c += LANES) {
            vec gate = load_upto(gate_up + c, n - c), up = load_upto(gate_up + n + c, n - c), grad = load_upto(grads + c, n - c);
            vec s = logistic(g->is_gelu ? gelu_argument(gate) : gate);
            vec inner = g->is_gelu ? fused((real)0.21406444881780076 * gate, gate, all((real)1.5957691216057308)) : all(1);
            store_upto(into + c, grad * up * fused(gate * s * (1 - s), inner, s), n - c);
            store_upto(into + n + c, grad * (gate * s), n - c);
        }
    }
}

/* The gradient of rows [gate, up]. */
EXPORT void gate_backward(const real *grad, const real *gate_up, real *grad_gate_up, long rows, long size, long is_gelu,
                          long threads) {
    struct gate g = {gate_up, grad, grad_gate_up, rows, size, (int)is_gelu};
    in_parallel(gate_back_task, &g, num_tasks(rows), threads);
}
