/* Samples one token per row from one uniform number by inverting the cumulative distribution, with its log-prob.

   Tokens of the list `never` are not drawn. Log-probs are those of the whole distribution all the same. */

#include "rows.h"

struct draw {
    const real *logits; /* [rows, vocab] */
    const double *uniform, *temperature;
    const int64_t *never;
    long vocab, num_never;
    int64_t *tokens;
    real *logp;
};

/* exp((x - best) / temperature) of up to LANES logits; missing lanes are 0. */
INLINE vec weights(const real *x, long n, real best, real temperature) {
    vec e = load_upto(x, n) - best;
    e = exponential(temperature == 1 ? e : e / temperature);
    for (long j = n; j < LANES; j++) e[j] = 0;
    return e;
}

/* Sets the weights of tokens that are never drawn to 0; the first lane is token `first`. */
INLINE vec drawable(const struct draw *d, vec e, long first) {
    for (long k = 0; k < d->num_never; k++) {
        long lane = d->never[k] - first;
        if (lane >= 0 && lane < LANES) e[lane] = 0;
    }
    return e;
}

static int is_never(const struct draw *d, long token) {
    for (long k = 0; k < d->num_never; k++)
        if (d->never[k] == token) return 1;
    return 0;
}

static void draw_row(void *arguments, long row, long thread) {
    (void)thread;
    const struct draw *d = arguments;
    const real *x = d->logits + row * d->vocab;
    double asked = d->temperature ? d->temperature[row] : 1, sum = 0, open = 0, reached = 0;
    real temperature = asked == 0 ? 1 : (real)asked;
    long best = 0, token = d->vocab - 1; /* with NaN logits no token is reached, and the log-prob is NaN */
    for (long j = 1; j < d->vocab; j++) best = x[j] > x[best] ? j : best;
    for (long j = 0; j < d->vocab; j += LANES) {
        vec e = weights(x + j, d->vocab - j, x[best], temperature);
        for (long i = 0; i < LANES; i++) sum += e[i];
        if (d->num_never) {
            e = drawable(d, e, j);
            for (long i = 0; i < LANES; i++) open += e[i];
        }
    }
    double target = d->uniform[row] * (d->num_never ? open : sum);
    for (long j = 0; j < d->vocab && reached < target; j += LANES) {
        vec e = drawable(d, weights(x + j, d->vocab - j, x[best], temperature), j);
        for (long i = 0; i < LANES; i++) {
            reached += e[i];
            if (reached >= target) {
                token = j + i;
                break;
            }
        }
    }
    if (asked == 0) {
        token = best;
        if (is_never(d, best)) /* the likeliest of the others */
            for (long j = 0, found = 0; j < d->vocab; j++)
                if (!is_never(d, j) && (!found || x[j] > x[token])) token = j, found = 1;
    }
    d->tokens[row] = token;
    d->logp[row] = (real)(((double)x[token] - x[best]) / temperature - log(sum));
}

/* Tokens [rows] and their log-probs under softmax(logits / temperature). Temperature 0 takes the likeliest token and
   reports its log-prob at temperature 1; a NULL temperature is 1. `never` lists tokens that are not drawn. */
EXPORT void draw(const real *logits, const double *uniform, const double *temperature, const int64_t *never, long num_never, long rows,
                 long vocab, int64_t *tokens, real *logp, long threads) {
    struct draw draw = {logits, uniform, temperature, never, vocab, num_never, tokens, logp};
    in_parallel(draw_row, &draw, rows, threads);
}
