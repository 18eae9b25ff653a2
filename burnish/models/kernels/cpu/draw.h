/* Samples a token from a row of logits (`draw.c`). */

#ifndef BURNISH_DRAW_H
#define BURNISH_DRAW_H

#include "vectors.h"

struct token_list {
    const int64_t *tokens;
    long number;
};

INLINE int is_one_of(struct token_list list, int64_t token) {
    for (long k = 0; k < list.number; k++)
        if (list.tokens[k] == token) return 1;
    return 0;
}

/* Draws from softmax(x / temperature) with a uniform number, but none of `never`; returns the token and sets its log-prob. */
int64_t draw_token(const real *x, long vocab, double uniform, double asked_temperature, struct token_list never, real *logp);

#endif
