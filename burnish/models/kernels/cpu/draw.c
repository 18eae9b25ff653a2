/* Samples one token per row from one uniform number by inverting the cumulative distribution, with its log-prob. */

#include "rows.h"

struct draw {
    const real *logits; /* [rows, vocab] */
    const double *uniform, *temperature;
    long vocab;
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

static void draw_row(void *arguments, long row, long thread) {
    (void)thread;
    const struct draw *d = arguments;
    const real *x = d->logits + row * d->vocab;
    double asked = d->temperature ? d->temperature[row] : 1, sum = 0, reached = 0;
    real temperature = asked == 0 ? 1 : (real)asked;
    long best = 0, token = d->vocab - 1; /* with NaN logits no token is reached, and the log-prob is NaN */
    for (long j = 1; j < d->vocab; j++) best = x[j] > x[best] ? j : best;
    for (long j = 0; j < d->vocab; j += LANES) {
        vec e = weights(x + j, d->vocab - j, x[best], temperature);
        for (long i = 0; i < LANES; i++) sum += e[i];
    }
    double target = d->uniform[row] * sum;
    for (long j = 0; j < d->vocab && reached < target; j += LANES) {
        vec e = weights(x + j, d->vocab - j, x[best], temperature);
        for (long i = 0; i < LANES; i++) {
            reached += e[i];
            if (reached >= target) {
                token = j + i;
                break;
            }
        }
    }
    if (asked == 0) token = best;
    d->tokens[row] = token;
    d->logp[row] = (real)(((double)x[token] - x[best]) / temperature - log(sum));
}

/* Tokens [rows] and their log-probs under softmax(logits / temperature). Temperature 0 takes the likeliest token and
   reports its log-prob at temperature 1; a NULL temperature is 1. */
EXPORT void draw(const real *logits, const double *uniform, const double *temperature, long rows, long vocab, int64_t *tokens,
                 real *logp, long threads) {
    struct draw draw = {logits, uniform, temperature, vocab, tokens, logp};
    in_parallel(draw_row, &draw, rows, threads);
}
