/* The decode step of models with weights and keys and values in bfloat16. Arithmetic is in float. */

#include "vectors.h"

#ifndef WIDE
#define BFLOAT16
#include "decode.c"
#endif
