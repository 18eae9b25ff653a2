/* Log-probs and gradients of logits in bfloat16. Arithmetic is in float. */

#include "vectors.h"

#ifndef WIDE
#define BFLOAT16
#include "logits.c"
#endif
