#include "product.h"

/* A tile of C: `down` rows, `across` vectors wide. Both are compile-time constants at every call. */
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
            for (int j = 0; j < across; j++) sum[i][j] = fused(left, right[j], sum[i][j]);
        }
    }
    for (int i = 0; i < down; i++)
        for (int j = 0; j < across; j++) store(c + i * c_row + j * LANES, sum[i][j]);
}

/* A column of tiles: the tallest tiles that fit, then smaller ones. */
#define ROWS_OF(n, across)                                                                                             \
    for (; i + (n) <= rows; i += (n))                                                                                  \
        tile(n, across, adds, depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row);
#define TILES(name, across)                                                                                            \
    static void name(int adds, long rows, long depth, const real *a, long a_row, long a_column, const real *b,         \
                     long b_row, real *c, long c_row) {                                                                \
        long i = 0;                                                                                                    \
        ROWS_OF(DOWN, across) ROWS_OF(4, across) ROWS_OF(2, across) ROWS_OF(1, across)                                 \
    }

TILES(tiles, ACROSS)
TILES(narrow_tiles, 1)

void product(int adds, long rows, long columns, long depth, const real *a, long a_row, long a_column, const real *b, long b_row,
             real *c, long c_row) {
    long j = 0;
    for (; j + PANEL <= columns; j += PANEL) tiles(adds, rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row);
    for (; j < columns; j += LANES) narrow_tiles(adds, rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row);
}
