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

#ifndef WIDE

/* `tile` with the right matrix in bfloat16, widened in registers. */
INLINE void tile_bfloat16(int down, int adds, long columns, long depth, const real *a, long a_row, const bfloat16 *b, real *c,
                          long c_row) {
    vec sum[DOWN][ACROSS];
    for (int i = 0; i < down; i++)
        for (int j = 0; j < ACROSS; j++)
            sum[i][j] = adds && columns > j * LANES ? load_upto(c + i * c_row + j * LANES, columns - j * LANES) : (vec){0};
    for (long p = 0; p < depth; p++) {
        vec right[ACROSS];
        load_pairs(b + p * PANEL, right, right + 1);
        for (int i = 0; i < down; i++) {
            vec left = all(a[i * a_row + p]);
            for (int j = 0; j < ACROSS; j++) sum[i][j] = fused(left, right[j], sum[i][j]);
        }
    }
    for (int i = 0; i < down; i++)
        for (int j = 0; j < ACROSS; j++)
            if (columns > j * LANES) store_upto(c + i * c_row + j * LANES, sum[i][j], columns - j * LANES);
}

#define ROWS_OF_BFLOAT16(n)                                                                                            \
    for (; i + (n) <= rows; i += (n)) tile_bfloat16(n, adds, columns, depth, a + i * a_row, a_row, b, c + i * c_row, c_row);

/* Inlined with a constant number of columns, so that the tiles of complete panels have no conditions. */
INLINE void panel_bfloat16(int adds, long rows, long columns, long depth, const real *a, long a_row, const bfloat16 *b, real *c,
                           long c_row) {
    long i = 0;
    ROWS_OF_BFLOAT16(DOWN) ROWS_OF_BFLOAT16(4) ROWS_OF_BFLOAT16(2) ROWS_OF_BFLOAT16(1)
}

void product_bfloat16(int adds, long rows, long columns, long depth, const real *a, long a_row, const bfloat16 *b, real *c,
                      long c_row) {
    if (columns == PANEL)
        panel_bfloat16(adds, rows, PANEL, depth, a, a_row, b, c, c_row);
    else
        panel_bfloat16(adds, rows, columns, depth, a, a_row, b, c, c_row);
}

#endif
