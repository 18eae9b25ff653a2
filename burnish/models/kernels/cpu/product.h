/* Products of small matrices, one tile of registers at a time. */

#ifndef BURNISH_PRODUCT_H
#define BURNISH_PRODUCT_H

#include "vectors.h"

#define ACROSS 2 /* vectors of a tile: few, so that a panel of the right matrix stays in the L1 cache */
#if defined(__AVX512F__) || defined(__aarch64__)
#define DOWN 12 /* rows of a tile: as many as 32 registers hold besides a row of the right matrix */
#else
#define DOWN 6
#endif
#define PANEL (ACROSS * LANES)

/* C [rows, columns] = A [rows, depth] B [depth, columns]; with `adds` it is added to C. A may have any strides, rows of B
   and C are contiguous, and `columns` is a multiple of LANES. */
void product(int adds, long rows, long columns, long depth, const real *a, long a_row, long a_column, const real *b, long b_row,
             real *c, long c_row);

#ifndef WIDE
/* C [rows, columns] = A [rows, depth] B [depth, PANEL] with rows of A and C contiguous and columns <= PANEL; with `adds` it is
   added to C. A row of B is in pairs (`load_pairs`). Sums are in float. */
void product_bfloat16(int adds, long rows, long columns, long depth, const real *a, long a_row, const bfloat16 *b, real *c,
                      long c_row);
#endif

#if !defined(WIDE) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES
/* Whether products over so many columns of A run on matrix tiles here (`tiles.c`). */
int runs_on_tiles(long depth);

/* Each thread calls these before and after its products. */
void begin_tiles(void);
void end_tiles(void);

/* C [rows, columns] = A [rows, depth] B [depth, PANEL] with rows contiguous and columns <= PANEL; with `adds` it is added to C.
   A is read in whole tiles: it has room for a multiple of 32 rows. Two rows of B are interleaved: (b[0][j], b[1][j]) are neighbours. */
void product_tiles(int adds, long rows, long columns, long depth, const bfloat16 *a, const bfloat16 *b, float *c, long c_row);
#else
INLINE int runs_on_tiles(long depth) { return (void)depth, 0; }
#endif

#endif
