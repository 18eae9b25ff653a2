/* Causal attention of packed sequences, forward and backward, for short sequences.

   A sequence has rows of its own and may share a prefix with earlier sequences, whose rows are keys only. Keys of a
   sequence and head are copied once into the layout that the products read. Queries run in blocks, so that a block's
   scores stay in the core's cache. A task is one key head of all sequences of a prefix tree, in order: no two threads add
   to the same address, and sums are the same for any number of threads. The backward pass recomputes the attention
   weights from the log-sum-exp. */

#include "product.h"
#include "rows.h"

#define QUERIES 24 /* queries of a block */

struct sequence {
    int64_t first, length; /* its own rows */
    int64_t prefix_length; /* rows of the shared prefix */
    int64_t token;         /* its first token, an index into row_of */
};

struct attention {
    const real *q, *k, *v; /* rows [heads, dim] and [kv_heads, dim] with these strides: */
    long q_row, k_row, v_row;
    const struct sequence *sequences;
    const int64_t *row_of; /* [tokens] the row of each token */
    const int64_t *groups; /* [groups + 1] offsets of the sequences of a prefix tree; the owner of a row comes first */
    long heads, kv_heads, dim, window;
    real *out, *lse; /* [rows, heads, dim], [rows, heads] */
    const real *grad;
    real *grad_q, *grad_k, *grad_v;
    real *workspace;
    long workspace_size, longest;
};

/* Copies rows of a head to a dense matrix whose rows are padded with zeros to `columns`. */
static void gather(const int64_t *rows, long first, long last, const real *x, long x_row, long dim, real *into, long columns) {
    for (long j = first; j < last; j++) {
        const real *from = x + rows[j] * x_row;
        for (long d = 0; d < dim; d += LANES) store(into + (j - first) * columns + d, load_upto(from + d, dim - d));
    }
}

/* Copies rows of a head transposed to [dim, width]. */
static void gather_across(const int64_t *rows, long length, const real *x, long x_row, long dim, real *into, long width) {
    for (long j = 0; j < width; j += LANES) {
        const real *from[WIDTH / sizeof(real)];
        for (long i = 0; i < LANES; i++) from[i] = x + rows[min_long(j + i, length - 1)] * x_row;
        for (long d = 0; d < dim; d++)
            for (long i = 0; i < LANES; i++) into[d * width + j + i] = from[i][d];
    }
}

/* The dot product of x and y; n is a multiple of LANES. */
INLINE real inner(const real *x, const real *y, long n) {
    vec sum = {0};
    for (long i = 0; i < n; i += LANES) sum = fused(load(x + i), load(y + i), sum);
    return total(sum);
}

/* A query at position i attends to the keys [first_key, i]. */
INLINE long first_key(const struct attention *a, long i) { return a->window ? max_long(0, i - a->window + 1) : 0; }

/* --- forward ------------------------------------------------------------------------------------------------------ */

static void forward_head(const struct attention *a, const struct sequence *s, long head, real *workspace) {
    long dim = a->dim, columns = padded(dim), length = s->prefix_length + s->length, width = padded(length);
    long shared = a->heads / a->kv_heads;
    real *keys = workspace, *values = keys + dim * width, *scores = values + length * columns, *mixed = scores + QUERIES * width;
    const int64_t *rows = a->row_of + s->token;
    real scale = (real)(1 / sqrt((double)dim));
    gather_across(rows, length, a->k + head * dim, a->k_row, dim, keys, width);
    gather(rows, 0, length, a->v + head * dim, a->v_row, dim, values, columns);
    for (long h = head * shared; h < (head + 1) * shared; h++)
        for (long i = 0; i < s->length; i += QUERIES) {
            long count = min_long(QUERIES, s->length - i), at = s->prefix_length + i, seen = at + count;
            long begin = first_key(a, at) / LANES * LANES, across = padded(seen - begin);
            const real *q = a->q + (s->first + i) * a->q_row + h * dim;
            product(0, count, across, dim, q, a->q_row, 1, keys + begin, width, scores, width);
            real sums[QUERIES]; /* and then their inverses */
            for (long r = 0; r < count; r++) {
                real best;
                sums[r] = exponentials(scores + r * width, across, first_key(a, at + r) - begin, at + r + 1 - begin, scale, &best);
                a->lse[(s->first + i + r) * a->heads + h] = best + logarithm(sums[r]);
                sums[r] = 1 / sums[r];
            }
            product(0, count, columns, seen - begin, scores, width, 1, values + begin * columns, columns, mixed, columns);
            for (long r = 0; r < count; r++) {
                real *out = a->out + ((s->first + i + r) * a->heads + h) * dim;
                for (long d = 0; d < dim; d++) out[d] = mixed[r * columns + d] * sums[r];
            }
        }
}

static void forward_task(void *arguments, long task, long thread) {
    const struct attention *a = arguments;
    long group = task / a->kv_heads, head = task % a->kv_heads;
    for (long s = a->groups[group]; s < a->groups[group + 1]; s++)
        forward_head(a, a->sequences + s, head, a->workspace + thread * a->workspace_size);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static void backward_head(const struct attention *a, const struct sequence *s, long head, real *workspace) {
    long dim = a->dim, columns = padded(dim), length = s->prefix_length + s->length, width = padded(length);
    long shared = a->heads / a->kv_heads, h_row = a->heads * dim;
    real *keys_across = workspace, *values_across = keys_across + dim * width, *keys = values_across + dim * width;
    real *grad_keys = keys + length * columns, *grad_values = grad_keys + length * columns;
    real *weights = grad_values + length * columns, *slopes = weights + QUERIES * width;
    real *queries = slopes + QUERIES * width, *grads = queries + QUERIES * columns;
    real *outs = grads + QUERIES * columns, *grad_queries = outs; /* shares memory: `outs` is read before it is written */
    const int64_t *rows = a->row_of + s->token;
    real scale = (real)(1 / sqrt((double)dim));
    gather_across(rows, length, a->k + head * dim, a->k_row, dim, keys_across, width);
    gather_across(rows, length, a->v + head * dim, a->v_row, dim, values_across, width);
    gather(rows, 0, length, a->k + head * dim, a->k_row, dim, keys, columns);
    memset(grad_keys, 0, 2 * length * columns * sizeof(real));
    for (long h = head * shared; h < (head + 1) * shared; h++)
        for (long i = 0; i < s->length; i += QUERIES) {
            long count = min_long(QUERIES, s->length - i), at = s->prefix_length + i, seen = at + count;
            long begin = first_key(a, at) / LANES * LANES, across = padded(seen - begin);
            gather(rows, at, seen, a->q + h * dim, a->q_row, dim, queries, columns);
            gather(rows, at, seen, a->grad + h * dim, h_row, dim, grads, columns);
            gather(rows, at, seen, a->out + h * dim, h_row, dim, outs, columns);
            product(0, count, across, dim, queries, columns, 1, keys_across + begin, width, weights, width);
            product(0, count, across, dim, grads, columns, 1, values_across + begin, width, slopes, width);
            for (long r = 0; r < count; r++) {
                real *p = weights + r * width, *slope = slopes + r * width, lse = a->lse[(s->first + i + r) * a->heads + h];
                real along = inner(outs + r * columns, grads + r * columns, columns);
                long first = first_key(a, at + r) - begin, last = at + r + 1 - begin;
                for (long j = 0; j < across; j += LANES) {
                    vec e = exponential(fused(load(p + j), all(scale), all(-lse)));
                    e = pick(between(j, first, last), e, (vec){0});
                    store(p + j, e);
                    store(slope + j, e * (load(slope + j) - along) * scale);
                }
            }
            long keys_seen = seen - begin;
            product(0, count, columns, keys_seen, slopes, width, 1, keys + begin * columns, columns, grad_queries, columns);
            product(1, keys_seen, columns, count, slopes, 1, width, queries, columns, grad_keys + begin * columns, columns);
            product(1, keys_seen, columns, count, weights, 1, width, grads, columns, grad_values + begin * columns, columns);
            for (long r = 0; r < count; r++) {
                real *grad_q = a->grad_q + (s->first + i + r) * h_row + h * dim;
                for (long d = 0; d < dim; d += LANES) store_upto(grad_q + d, load(grad_queries + r * columns + d), dim - d);
            }
        }
    for (long j = 0; j < length; j++) {
        real *k = a->grad_k + (rows[j] * a->kv_heads + head) * dim, *v = a->grad_v + (rows[j] * a->kv_heads + head) * dim;
        int is_own = j >= s->prefix_length; /* the owner writes first; later sequences add to it */
        for (long d = 0; d < dim; d++) {
            k[d] = (is_own ? 0 : k[d]) + grad_keys[j * columns + d];
            v[d] = (is_own ? 0 : v[d]) + grad_values[j * columns + d];
        }
    }
}

static void backward_task(void *arguments, long task, long thread) {
    const struct attention *a = arguments;
    long group = task / a->kv_heads, head = task % a->kv_heads;
    for (long s = a->groups[group]; s < a->groups[group + 1]; s++)
        backward_head(a, a->sequences + s, head, a->workspace + thread * a->workspace_size);
}

/* Elements of working memory per thread for sequences up to `longest`. */
EXPORT long attention_workspace_size(long longest, long dim, long is_backward) {
    long columns = padded(dim), width = padded(longest);
    if (!is_backward) return padded(dim * width + longest * columns + QUERIES * (width + columns));
    return padded(2 * dim * width + 3 * longest * columns + QUERIES * (2 * width + 3 * columns));
}

EXPORT void attention_forward(const struct attention *a, long groups, long threads) {
    in_parallel(forward_task, (void *)a, groups * a->kv_heads, threads);
}

EXPORT void attention_backward(const struct attention *a, long groups, long threads) {
    in_parallel(backward_task, (void *)a, groups * a->kv_heads, threads);
}
