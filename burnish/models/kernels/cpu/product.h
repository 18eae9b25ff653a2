/* Products of small matrices, a tile of registers at a time. */

#ifndef BURNISH_PRODUCT_H
#define BURNISH_PRODUCT_H

#include "vectors.h"

#define ACROSS 2 /* vectors of a tile: few, so that a panel of the right matrix stays in the nearest cache */
#if defined(__AVX512F__) || defined(__aarch64__)
#define DOWN 12 /* rows of a tile: what 32 registers hold beside a row of the right matrix */
#else
#define DOWN 6
#endif
#define PANEL (ACROSS * LANES)

/* C [rows, columns] = A [rows, depth] B [depth, columns], or added to C. A may be strided in any way, rows of B and C lie
   together; columns are a multiple of LANES. */
void product(int adds, long rows, long columns, long depth, const real *a, long a_row, long a_column, const real *b, long b_row,
             real *c, long c_row);

#endif
