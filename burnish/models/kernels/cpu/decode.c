/* Decode steps: one new token per row through all layers of a decoder, over a dense KV cache.

   Rows are independent, so a thread takes a block of rows from the embedding to the logits, and may draw their tokens and go on
   for several steps (`decode_and_draw`). Threads synchronise once per call, and a block's activations stay in the core's cache.
   Weights are transposed and stored in panels (`pack`).

   Matrices, keys and values are stored in the type of the arithmetic, or in bfloat16 (`decode_bfloat16.c`). */

#include "draw.h"
#include "product.h"
#include "rows.h"

#ifdef BFLOAT16
typedef bfloat16 stored;
#define NAMED(name) name##_bfloat16
#ifdef HAS_TILES
#define ON_TILES
#define BLOCK 128L /* most rows of a task: each task reads all weights */
#endif
#define AT_ONCE 256L /* positions whose keys or values are widened at once: they stay in the core's cache */
#else
typedef real stored;
#define NAMED(name) name
#define AT_ONCE ((long)1 << 40)
#endif

struct linear {
    const stored *weight; /* packed */
    const real *bias;     /* may be NULL */
};

struct layer {
    const real *attention_norm, *mlp_norm;
    const real *q_norm, *k_norm, *attention_out_norm, *mlp_out_norm; /* NULL if the family has none */
    struct linear qkv, out, gate_up, down;
    const real *cos, *sin; /* [positions, head_dim] */
    stored *keys;          /* [rows, kv_heads, head_dim, capacity] */
    stored *values;        /* [rows, kv_heads, capacity, head_dim] */
    long window;           /* attention window; 0 is no limit */
};

struct decoder {
    long num_layers, hidden, heads, kv_heads, head_dim, mlp, vocab, is_gelu;
    double eps, shift, query_scale, embedding_scale;
    const stored *embedding;
    const real *norm;
    struct linear head;
    const struct layer *layers;
};

struct step {
    const struct decoder *model;
    long rows, block, capacity, workspace_size;
    const int64_t *tokens, *positions, *rotations; /* rotations: rows of cos and sin */
    real *logits, *workspace;
};

/* Several steps, each token drawn from the logits before it. */
struct sampling {
    struct step step;
    long steps;
    const double *uniforms, *temperatures; /* [rows, steps], [rows] or NULL */
    const int64_t *limits;                 /* [rows] most tokens to draw */
    struct token_list never, stops;        /* a row ends with a token of `stops` */
    int64_t *tokens, *counts;              /* [rows, steps], [rows] tokens drawn */
    real *logp;                            /* [rows, steps] */
};

/* Rows of the cache that run now, with their last tokens, the positions of those and their rotations. */
struct running {
    long number;
    const int64_t *rows, *tokens, *positions, *rotations;
};

#ifndef BLOCK
#define BLOCK 64L
#endif

struct matrix {
    const stored *weight;
    stored *packed;
    long outputs, inputs;
};

/* The place of an output's number in a panel, for input p. */
INLINE long place_in_panel(long output, long p, int tiled) {
    (void)tiled, (void)p;
#ifdef BFLOAT16
    if (tiled) return p / 2 * 2 * PANEL + 2 * output + p % 2;
    output = output % LANES * 2 + output / LANES;
#endif
    return p * PANEL + output;
}

static void pack_panel(void *arguments, long panel, long thread) {
    (void)thread;
    const struct matrix *m = arguments;
    stored *into = m->packed + panel * PANEL * m->inputs;
    int tiled = sizeof(stored) == 2 && runs_on_tiles(m->inputs);
    for (long j = 0; j < PANEL; j++) {
        long output = panel * PANEL + j;
        const stored *row = m->weight + output * m->inputs;
        for (long p = 0; p < m->inputs; p++) into[place_in_panel(j, p, tiled)] = output < m->outputs ? row[p] : 0;
    }
}

/* Packs W [outputs, inputs] into panels [inputs, PANEL] of PANEL outputs each; missing outputs are 0. In bfloat16 outputs j and
   LANES + j of a panel are side by side, or, for matrix tiles, inputs 2 p and 2 p + 1 of an output. */
EXPORT void NAMED(pack)(const stored *weight, stored *packed, long outputs, long inputs, long threads) {
    struct matrix m = {weight, packed, outputs, inputs};
    in_parallel(pack_panel, &m, (outputs + PANEL - 1) / PANEL, threads);
}

EXPORT long NAMED(panel_width)(void) { return PANEL; }

/* y [rows, columns] = x [rows, inputs] times one panel of up to PANEL columns; with `adds` it is added to y. */
static void project_panel(int adds, const real *x, const stored *panel, real *y, long y_row, long rows, long inputs, long columns) {
#ifdef BFLOAT16
    product_bfloat16(adds, rows, columns, inputs, x, inputs, panel, y, y_row);
#else
    long full = columns / LANES * LANES;
    product(adds, rows, full, inputs, x, inputs, 1, panel, PANEL, y, y_row);
    if (full < columns) /* the last, incomplete vector */
        for (long i = 0; i < rows; i++) {
            real some[WIDTH / sizeof(real)];
            product(0, 1, LANES, inputs, x + i * inputs, inputs, 1, panel + full, PANEL, some, LANES);
            for (long c = 0; c < columns - full; c++) {
                real *into = y + i * y_row + full + c;
                *into = some[c] + (adds ? *into : 0);
            }
        }
#endif
}

INLINE stored to_stored(real x) {
#ifdef BFLOAT16
    return narrow(x);
#else
    return x;
#endif
}

/* y [rows, outputs] = x [rows, inputs] W^T + bias; with `adds` it is added to y. `narrowed` has room for x in bfloat16. */
static void project(struct linear by, int adds, const real *x, real *y, long rows, long inputs, long outputs, real *narrowed) {
    int tiled = sizeof(stored) == 2 && runs_on_tiles(inputs);
    if (tiled)
        for (long i = 0; i < rows * inputs; i++) ((stored *)narrowed)[i] = to_stored(x[i]);
    for (long j = 0; j < outputs; j += PANEL) {
        long columns = min_long(PANEL, outputs - j);
        if (by.bias)
            for (long i = 0; i < rows; i++)
                for (long c = 0; c < columns; c++) {
                    real *into = y + i * outputs + j + c;
                    *into = by.bias[j + c] + (adds ? *into : 0);
                }
#ifdef ON_TILES
        if (tiled) {
            product_tiles(adds || by.bias, rows, columns, inputs, (stored *)narrowed, by.weight + j * inputs, y + j, outputs);
            continue;
        }
#endif
        project_panel(adds || by.bias, x, by.weight + j * inputs, y + j, outputs, rows, inputs, columns);
    }
}

/* Adds a projection to the residual, through an output norm if the family has one. */
static void add_to_residual(const struct decoder *m, struct linear by, const real *norm, const real *from, real *x,
                            real *between, long rows, long inputs, real *narrowed) {
    if (!norm) {
        project(by, 1, from, x, rows, inputs, m->hidden, narrowed);
        return;
    }
    project(by, 0, from, between, rows, inputs, m->hidden, narrowed);
    for (long i = 0; i < rows; i++) {
        real *y = between + i * m->hidden;
        norm_row(y, norm, y, m->hidden, m->eps, m->shift, 1);
        for (long c = 0; c < m->hidden; c++) x[i * m->hidden + c] += y[c];
    }
}

/* `rows` rows of `columns` stored numbers in the type of the arithmetic, and the distance of their rows. */
INLINE const real *as_real(const stored *x, long rows, long columns, long *row, real *wide) {
#ifdef BFLOAT16
    for (long i = 0; i < rows; i++) widen(x + i * *row, wide + i * columns, columns);
    *row = columns;
    return wide;
#else
    (void)rows, (void)columns, (void)row, (void)wide;
    return x;
#endif
}

/* Norms (if the family does so) and rotates the heads of one row, and writes its key and value to the cache. */
static void place(const struct decoder *m, const struct layer *l, real *qkv, long row, long at, long turn,
                  long capacity) {
    long dim = m->head_dim;
    const real *cos = l->cos + turn * dim, *sin = l->sin + turn * dim;
    for (long h = 0; h < m->heads + m->kv_heads; h++) {
        real *x = qkv + h * dim;
        int is_key = h >= m->heads;
        if (l->q_norm)
            norm_row(x, is_key ? l->k_norm : l->q_norm, x, dim, m->eps, m->shift, is_key ? 1 : (real)m->query_scale);
        rotate_row(x, cos, sin, x, dim, 1);
    }
    for (long h = 0; h < m->kv_heads; h++) {
        const real *k = qkv + (m->heads + h) * dim, *v = k + m->kv_heads * dim;
        long head = (row * m->kv_heads + h) * dim * capacity;
        for (long d = 0; d < dim; d++) l->keys[head + d * capacity + at] = to_stored(k[d]);
        for (long d = 0; d < dim; d++) l->values[head + at * dim + d] = to_stored(v[d]);
    }
}

/* Attention of the query heads of one row over the keys of its window. */
static void attend(const struct decoder *m, const struct layer *l, const real *qkv, real *mixed, real *scores,
                   long row, long at, long capacity) {
    long dim = m->head_dim, shared = m->heads / m->kv_heads, first = l->window ? max_long(0, at - l->window + 1) : 0;
    long begin = first / LANES * LANES, width = padded(at + 1 - begin), full = dim / LANES * LANES;
    real scale = (real)(1 / sqrt((double)dim));
    for (long h = 0; h < m->kv_heads; h++) {
        long head = (row * m->kv_heads + h) * dim * capacity;
        const real *q = qkv + h * shared * dim;
        real *out = mixed + h * shared * dim, best, *inverse = scores + shared * width, *wide = inverse + padded(shared);
        for (long j = 0; j < width; j += AT_ONCE) {
            long some = min_long(AT_ONCE, width - j), key_row = capacity;
            const real *keys = as_real(l->keys + head + begin + j, dim, some, &key_row, wide);
            product(0, shared, some, dim, q, dim, 1, keys, key_row, scores + j, width);
        }
        for (long s = 0; s < shared; s++)
            inverse[s] = 1 / exponentials(scores + s * width, width, first - begin, at + 1 - begin, scale, &best);
        for (long j = 0; j < at + 1 - begin; j += AT_ONCE) {
            long some = min_long(AT_ONCE, at + 1 - begin - j), value_row = dim;
            const real *values = as_real(l->values + head + (begin + j) * dim, some, dim, &value_row, wide);
            product(j > 0, shared, full, some, scores + j, width, 1, values, dim, out, dim);
            for (long s = 0; s < shared; s++)
                for (long d = full; d < dim; d++) {
                    real sum = j > 0 ? out[s * dim + d] : 0;
                    for (long k = 0; k < some; k++) sum += scores[s * width + j + k] * values[k * dim + d];
                    out[s * dim + d] = sum;
                }
        }
        for (long s = 0; s < shared; s++)
            for (long d = 0; d < dim; d++) out[s * dim + d] *= inverse[s];
    }
}

/* Room for the inputs of a product in bfloat16, in whole tiles. */
static long narrowed_size(const struct decoder *m) {
    return sizeof(stored) == 2 ? BLOCK * max_long(m->hidden, max_long(m->heads * m->head_dim, m->mlp)) / 2 : 0;
}

/* What a thread does before its first product and after its last one. Float32 would only lose time with tiles. */
static void begin_products(void) {
#ifdef ON_TILES
    begin_tiles();
#endif
}

static void end_products(void) {
#ifdef ON_TILES
    end_tiles();
#endif
}

/* Logits [rows, vocab] of the next token of up to a block of rows. */
static void forward_rows(const struct step *s, struct running now, real *logits, long thread) {
    const struct decoder *m = s->model;
    long rows = now.number;
    long heads = m->heads * m->head_dim, all_heads = heads + 2 * m->kv_heads * m->head_dim;
    real *x = s->workspace + thread * s->workspace_size, *normed = x + s->block * m->hidden, *wide = normed + s->block * m->hidden;
    real *mixed = wide + s->block * max_long(all_heads, 2 * m->mlp), *narrowed = mixed + s->block * max_long(heads, m->mlp);
    real *scores = narrowed + narrowed_size(m);
    for (long i = 0; i < rows; i++) {
        long row = m->hidden;
        const real *from = as_real(m->embedding + now.tokens[i] * m->hidden, 1, m->hidden, &row, normed);
        for (long c = 0; c < m->hidden; c++) x[i * m->hidden + c] = from[c] * (real)m->embedding_scale;
    }
    for (const struct layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        for (long i = 0; i < rows; i++)
            norm_row(x + i * m->hidden, l->attention_norm, normed + i * m->hidden, m->hidden, m->eps, m->shift, 1);
        project(l->qkv, 0, normed, wide, rows, m->hidden, all_heads, narrowed);
        for (long i = 0; i < rows; i++) {
            long row = now.rows[i], at = now.positions[i];
            place(m, l, wide + i * all_heads, row, at, now.rotations[i], s->capacity);
            attend(m, l, wide + i * all_heads, mixed + i * heads, scores, row, at, s->capacity);
        }
        add_to_residual(m, l->out, l->attention_out_norm, mixed, x, normed, rows, heads, narrowed);
        for (long i = 0; i < rows; i++)
            norm_row(x + i * m->hidden, l->mlp_norm, normed + i * m->hidden, m->hidden, m->eps, m->shift, 1);
        project(l->gate_up, 0, normed, wide, rows, m->hidden, 2 * m->mlp, narrowed);
        for (long i = 0; i < rows; i++) gate_row(wide + i * 2 * m->mlp, mixed + i * m->mlp, m->mlp, (int)m->is_gelu);
        add_to_residual(m, l->down, l->mlp_out_norm, mixed, x, normed, rows, m->mlp, narrowed);
    }
    for (long i = 0; i < rows; i++)
        norm_row(x + i * m->hidden, m->norm, normed + i * m->hidden, m->hidden, m->eps, m->shift, 1);
    project(m->head, 0, normed, logits, rows, m->hidden, m->vocab, narrowed);
}

static void step_task(void *arguments, long task, long thread) {
    const struct step *s = arguments;
    long first = task * s->block;
    int64_t rows[BLOCK];
    struct running now = {min_long(s->block, s->rows - first), rows, s->tokens + first, s->positions + first, s->rotations + first};
    for (long i = 0; i < now.number; i++) rows[i] = first + i;
    begin_products();
    forward_rows(s, now, s->logits + first * s->model->vocab, thread);
    end_products();
}

static void sampling_task(void *arguments, long task, long thread) {
    const struct sampling *g = arguments;
    const struct step *s = &g->step;
    long first = task * s->block, vocab = s->model->vocab;
    int64_t rows[BLOCK], tokens[BLOCK], positions[BLOCK];
    real *logits = s->logits + first * vocab;
    struct running now = {min_long(s->block, s->rows - first), rows, tokens, positions, positions};
    for (long i = 0; i < now.number; i++) {
        rows[i] = first + i;
        tokens[i] = s->tokens[first + i];
        positions[i] = s->positions[first + i];
    }
    begin_products();
    for (long t = 0; t < g->steps && now.number; t++) {
        forward_rows(s, now, logits, thread);
        long left = 0;
        for (long i = 0; i < now.number; i++) {
            long row = rows[i], at = row * g->steps + t;
            double temperature = g->temperatures ? g->temperatures[row] : 1;
            g->tokens[at] = draw_token(logits + i * vocab, vocab, g->uniforms[at], temperature, g->never, g->logp + at);
            g->counts[row] = t + 1;
            if (t + 1 == g->limits[row] || is_one_of(g->stops, g->tokens[at])) continue;
            rows[left] = row;
            tokens[left] = g->tokens[at];
            positions[left++] = positions[i] + 1;
        }
        now.number = left;
    }
    end_products();
}

/* The rows are divided evenly among threads, into blocks of at most BLOCK. */
static struct step step_of(const struct decoder *model, long rows, const int64_t *tokens, const int64_t *positions,
                           const int64_t *rotations, long capacity, real *logits, real *workspace, long workspace_size, long threads) {
    long block = max_long(1, min_long(BLOCK, (rows + threads - 1) / threads));
    return (struct step){model, rows, block, capacity, workspace_size, tokens, positions, rotations, logits, workspace};
}

/* Elements of working memory per thread for a step over positions up to `longest`. */
EXPORT long NAMED(decode_workspace_size)(const struct decoder *m, long longest) {
    long heads = m->heads * m->head_dim, all_heads = heads + 2 * m->kv_heads * m->head_dim;
    long a_row = 2 * m->hidden + max_long(all_heads, 2 * m->mlp) + max_long(heads, m->mlp);
    long shared = m->heads / m->kv_heads, wide = sizeof(stored) < sizeof(real) ? m->head_dim * AT_ONCE : 0;
    return padded(BLOCK * a_row + narrowed_size(m) + shared * padded(longest + 1) + padded(shared) + wide);
}

/* Logits [rows, vocab] of the token after each row's last token, which is at `positions` and turns by `rotations`. */
EXPORT void NAMED(decode)(const struct decoder *model, long rows, const int64_t *tokens, const int64_t *positions,
                   const int64_t *rotations, long capacity, real *logits, real *workspace, long workspace_size, long threads) {
    struct step step = step_of(model, rows, tokens, positions, rotations, capacity, logits, workspace, workspace_size, threads);
    in_parallel(step_task, &step, (rows + step.block - 1) / step.block, threads);
}

/* Draws up to `steps` tokens for each row after its last token, which is at `positions`; rotations are the positions.
   `counts` says how many. `logits` [rows, vocab] is working memory. */
EXPORT void NAMED(decode_and_draw)(const struct decoder *model, long rows, long steps, const int64_t *last, const int64_t *positions,
                                   long capacity, const double *uniforms, const double *temperatures, const int64_t *limits,
                                   const int64_t *never, long num_never, const int64_t *stops, long num_stops, int64_t *tokens,
                                   real *logp, int64_t *counts, real *logits, real *workspace, long workspace_size, long threads) {
    struct step step = step_of(model, rows, last, positions, positions, capacity, logits, workspace, workspace_size, threads);
    struct sampling sampling = {step,   steps,  uniforms, temperatures, limits, {never, num_never}, {stops, num_stops},
                                tokens, counts, logp};
    in_parallel(sampling_task, &sampling, (rows + step.block - 1) / step.block, threads);
}
