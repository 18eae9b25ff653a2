/* Log-probs of target tokens from rows of logits, and the gradient of those logits in their place.

   Logits are stored in the type of the arithmetic, or in bfloat16 (`logits_bfloat16.c`). A task is one row. */

#include "rows.h"

#ifdef BFLOAT16
typedef bfloat16 stored;
#define NAMED(name) name##_bfloat16
#else
typedef real stored;
#define NAMED(name) name
#endif

struct logits {
    stored *logits; /* [rows, vocab] */
    const int64_t *targets;
    real *logp, *log_normaliser, *entropy; /* [rows]; entropy may be NULL */
    const real *grad_logp, *grad_entropy;  /* [rows]; NULL is 0 */
    long vocab;
    real temperature;
};

/* Up to LANES logits; missing lanes are minus infinity. */
INLINE vec read_logits(const stored *x, long n) {
#ifdef BFLOAT16
    if (n >= LANES) return load_bfloat16(x);
    real some[WIDTH / sizeof(real)];
    widen(x, some, n);
#else
    if (n >= LANES) return load(x);
    real some[WIDTH / sizeof(real)];
    memcpy(some, x, n * sizeof(real));
#endif
    for (long i = n; i < LANES; i++) some[i] = -INFINITY;
    return load(some);
}

INLINE void write_logits(stored *x, vec y, long n) {
#ifdef BFLOAT16
    if (n >= LANES) {
        store_bfloat16(x, y);
        return;
    }
    real some[WIDTH / sizeof(real)];
    store(some, y);
    for (long i = 0; i < n; i++) x[i] = narrow(some[i]);
#else
    store_upto(x, y, n);
#endif
}

INLINE vec divided(vec x, real temperature) { return temperature == 1 ? x : x / temperature; }

/* With x = logits / temperature, s = x - max x and S = sum e^s: log-prob s[target] - log S, entropy log S - sum e^s s / S. */
static void logprob_row(void *arguments, long row, long thread) {
    (void)thread;
    const struct logits *l = arguments;
    const stored *x = l->logits + row * l->vocab;
    long vocab = l->vocab;
    vec top = all(-INFINITY);
    for (long j = 0; j < vocab; j += LANES) {
        vec y = read_logits(x + j, vocab - j);
        top = pick(y > top, y, top);
    }
    real best = largest(top);
    vec sum = {0}, moment = {0};
    for (long j = 0; j < vocab; j += LANES) {
        vec s = divided(read_logits(x + j, vocab - j) - best, l->temperature), e = exponential(s);
        sum += e;
        if (l->entropy) moment += pick(e > 0, e * s, (vec){0});
    }
    double mass = total(sum), chosen = read_logits(x + l->targets[row], 1)[0];
    l->logp[row] = (real)((chosen - best) / l->temperature - log(mass));
    l->log_normaliser[row] = (real)((double)best / l->temperature + log(mass));
    if (l->entropy) l->entropy[row] = (real)(log(mass) - total(moment) / mass);
}

/* d logp / d logits = (onehot - p) / temperature and d entropy / d logits = -p (log p + entropy) / temperature. */
static void gradient_row(void *arguments, long row, long thread) {
    (void)thread;
    const struct logits *l = arguments;
    stored *x = l->logits + row * l->vocab;
    long vocab = l->vocab, target = l->targets[row];
    real log_normaliser = l->log_normaliser[row], slope = l->grad_logp ? l->grad_logp[row] : 0;
    real at_target = exponential(divided(all(read_logits(x + target, 1)[0]), l->temperature) - log_normaliser)[0];
    real entropy_slope = l->grad_entropy ? l->grad_entropy[row] : 0, entropy = l->grad_entropy ? l->entropy[row] : 0;
    for (long j = 0; j < vocab; j += LANES) {
        vec logp = divided(read_logits(x + j, vocab - j), l->temperature) - log_normaliser, p = exponential(logp);
        vec grad = p * -slope;
        if (l->grad_entropy) grad -= pick(p > 0, p * entropy_slope * (logp + entropy), (vec){0});
        if (target >= j && target < j + LANES) {
            real own = slope * (1 - at_target);
            if (l->grad_entropy && at_target > 0) own -= at_target * entropy_slope * (logp[target - j] + entropy);
            grad[target - j] = own;
        }
        write_logits(x + j, divided(grad, l->temperature), vocab - j);
    }
}

/* Of each row: the target's log-prob under softmax(logits / temperature), the logarithm of the normaliser, and the entropy
   unless it is NULL. */
EXPORT void NAMED(logprob_rows)(stored *logits, const int64_t *targets, real *logp, real *log_normaliser, real *entropy,
                                long rows, long vocab, double temperature, long threads) {
    struct logits l = {logits, targets, logp, log_normaliser, entropy, 0, 0, vocab, (real)temperature};
    in_parallel(logprob_row, &l, rows, threads);
}

/* Overwrites logits with their gradient, given those of the log-probs and of the entropies. */
EXPORT void NAMED(logit_gradients)(stored *logits, const int64_t *targets, real *log_normaliser, real *entropy, const real *grad_logp,
                                   const real *grad_entropy, long rows, long vocab, double temperature, long threads) {
    struct logits l = {logits, targets, 0, log_normaliser, entropy, grad_logp, grad_entropy, vocab, (real)temperature};
    in_parallel(gradient_row, &l, rows, threads);
}
