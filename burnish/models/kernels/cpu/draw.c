/* Samples one token per row from one uniform number by inverting the cumulative distribution, with its log-prob.

   Tokens of the list `never` are not drawn. Log-probs are those of the whole distribution all the same. */

#include "draw.h"
#include "rows.h"

/* exp((x - best) / temperature) of up to LANES logits; missing lanes are 0. */
INLINE vec weights(const real *x, long n, real best, real temperature) {
    vec e = load_upto(x, n) - best;
    e = exponential(temperature == 1 ? e : e / temperature);
    for (long j = n; j < LANES; j++) e[j] = 0;
    return e;
}

/* Sets the weights of tokens that are never drawn to 0; the first lane is token `first`. */
INLINE vec drawable(struct token_list never, vec e, long first) {
    for (long k = 0; k < never.number; k++) {
        long lane = never.tokens[k] - first;
        if (lane >= 0 && lane < LANES) e[lane] = 0;
    }
    return e;
}

/* The first of the largest numbers, or 0 if the first is NaN. */
static long largest_of(const real *x, long n) {
    vec top = all(x[0]);
    for (long j = 0; j + LANES <= n; j += LANES) {
        vec y = load(x + j);
        top = pick(y > top, y, top);
    }
    real best = largest(top);
    for (long j = n / LANES * LANES; j < n; j++) best = x[j] > best ? x[j] : best;
    for (long j = 0; j < n; j++)
        if (x[j] == best) return j;
    return 0;
}

int64_t draw_token(const real *x, long vocab, double uniform, double asked_temperature, struct token_list never, real *logp) {
    double sum = 0, open = 0, reached = 0;
    real temperature = asked_temperature == 0 ? 1 : (real)asked_temperature;
    long best = largest_of(x, vocab), token = vocab - 1; /* with NaN logits no token is reached, and the log-prob is NaN */
    for (long j = 0; j < vocab; j += LANES) {
        vec e = weights(x + j, vocab - j, x[best], temperature);
        for (long i = 0; i < LANES; i++) sum += e[i];
        if (never.number) {
            e = drawable(never, e, j);
            for (long i = 0; i < LANES; i++) open += e[i];
        }
    }
    double target = uniform * (never.number ? open : sum);
    for (long j = 0; j < vocab && reached < target; j += LANES) {
        vec e = drawable(never, weights(x + j, vocab - j, x[best], temperature), j);
        for (long i = 0; i < LANES; i++) {
            reached += e[i];
            if (reached >= target) {
                token = j + i;
                break;
            }
        }
    }
    if (asked_temperature == 0) {
        token = best;
        if (is_one_of(never, best)) /* the likeliest of the others */
            for (long j = 0, found = 0; j < vocab; j++)
                if (!is_one_of(never, j) && (!found || x[j] > x[token])) token = j, found = 1;
    }
    *logp = (real)(((double)x[token] - x[best]) / temperature - log(sum));
    return token;
}

struct draw {
    const real *logits; /* [rows, vocab] */
    const double *uniform, *temperature;
    struct token_list never;
    long vocab;
    int64_t *tokens;
    real *logp;
};

static void draw_row(void *arguments, long row, long thread) {
    (void)thread;
    const struct draw *d = arguments;
    double temperature = d->temperature ? d->temperature[row] : 1;
    d->tokens[row] = draw_token(d->logits + row * d->vocab, d->vocab, d->uniform[row], temperature, d->never, d->logp + row);
}

/* Tokens [rows] and their log-probs under softmax(logits / temperature). Temperature 0 takes the likeliest token and
   reports its log-prob at temperature 1; a NULL temperature is 1. `never` lists tokens that are not drawn. */
EXPORT void draw(const real *logits, const double *uniform, const double *temperature, const int64_t *never, long num_never, long rows,
                 long vocab, int64_t *tokens, real *logp, long threads) {
    struct draw draw = {logits, uniform, temperature, {never, num_never}, vocab, tokens, logp};
    in_parallel(draw_row, &draw, rows, threads);
}
