/* Products of small matrices, a tile of registers at a time. */

#ifndef BURNISH_PRODUCT_H
#define BURNISH_PRODUCT_H

#include "vectors.h"

/* A tile of C = A B or C += A B: `down` rows, `across` vectors wide; both are constants where this is called. */
INLINE void tile(int down, int across, int adds, long depth, const real *a, long a_row, long a_column, const real *b,
                 long b_row, real *c, long c_row) {
    vec sum[DOWN][ACROSS];
    for (int i = 0; i < down; i++)
        for (int j = 0; j < across; j++) sum[i][j] = adds ? load(c + i * c_row + j * LANES) : (vec){0};
    for (long p = 0; p < depth; p++) {
        vec right[ACROSS];
        for (int j = 0; j < across; j++) right[j] = load(b + p * b_row + j * LANES);
        for (int i = 0; i < down; i++) {
            vec left = all(a[i * a_row + p * a_column]);
            for (int j = 0; j < across; j++) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < down; i++)
        for (int j = 0; j < across; j++) store(c + i * c_row + j * LANES, sum[i][j]);
}

#define TILE_ROWS(n, across) \
    case n: tile(n, across, adds, depth, a, a_row, a_column, b, b_row, c, c_row); break;
#define TILE(name, across)                                                                                          \
    static void name(int down, int adds, long depth, const real *a, long a_row, long a_column, const real *b,       \
                     long b_row, real *c, long c_row) {                                                             \
        switch (down) {                                                                                             \
            TILE_ROWS(1, across) TILE_ROWS(2, across) TILE_ROWS(3, across) TILE_ROWS(4, across) TILE_ROWS(5, across) \
            default: tile(6, across, adds, depth, a, a_row, a_column, b, b_row, c, c_row);                           \
        }                                                                                                           \
    }

TILE(tile_one, 1)
TILE(tile_two, 2)
TILE(tile_all, ACROSS)

/* C [rows, columns] = A [rows, depth] B [depth, columns], or added to C. A may be strided in any way, rows of B and C lie
   together; columns are a multiple of LANES. */
static void product(int adds, long rows, long columns, long depth, const real *a, long a_row, long a_column,
                    const real *b, long b_row, real *c, long c_row) {
    long j = 0;
    for (; j + PANEL <= columns; j += PANEL)
        for (long i = 0; i < rows; i += DOWN)
            tile_all((int)least(DOWN, rows - i), adds, depth, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        for (long i = 0; i < rows; i += DOWN)
            tile_two((int)least(DOWN, rows - i), adds, depth, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
    for (; j < columns; j += LANES)
        for (long i = 0; i < rows; i += DOWN)
            tile_one((int)least(DOWN, rows - i), adds, depth, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
}

#endif
