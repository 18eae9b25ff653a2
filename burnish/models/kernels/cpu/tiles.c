/* Products of bfloat16 matrices on the matrix tiles of x86 processors (AMX), summed in float. */

#include "product.h"

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16                  /* rows of a tile, and its columns of float */
#define PAIRS (2 * TILE)         /* columns of a tile of bfloat16: pairs of numbers are summed at once */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM: Linux grants a process the tiles' state on request */
#define TILE_STATE 18

static int has_permission(void) {
    static int state; /* 0 is unknown; every thread would find the same */
    if (!state) state = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_STATE) ? -1 : 1;
    return state > 0;
}

int runs_on_tiles(long depth) { return depth % PAIRS == 0 && has_permission(); }

void begin_tiles(void) {
    if (!has_permission()) return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 4 * TILE, shapes.rows[i] = TILE;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* gcc's _tile_loadconfig only says that it reads the first bytes */
    _tile_loadconfig(&shapes);
}

void end_tiles(void) {
    if (has_permission()) _tile_release();
}

/* Writes or adds the first rows and columns of a block of two by two tiles. */
static void put(const float *block, int adds, long rows, long columns, float *c, long c_row) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) c[i * c_row + j] = block[i * PANEL + j] + (adds ? c[i * c_row + j] : 0);
}

void product_tiles(int adds, long rows, long columns, long depth, const bfloat16 *a, const bfloat16 *b, float *c, long c_row) {
    long a_bytes = depth * sizeof *a, c_bytes = c_row * sizeof *c;
    for (long i = 0; i < rows; i += 2 * TILE) {
        int is_tall = rows - i > TILE, is_whole = rows - i >= 2 * TILE && columns == PANEL;
        float *into = c + i * c_row;
        if (is_whole && adds) {
            _tile_loadd(0, into, c_bytes);
            _tile_loadd(1, into + TILE, c_bytes);
            _tile_loadd(2, into + TILE * c_row, c_bytes);
            _tile_loadd(3, into + TILE * c_row + TILE, c_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const bfloat16 *left = a + i * depth;
        for (long p = 0; p < depth; p += PAIRS) {
            const bfloat16 *right = b + p * PANEL;
            _tile_loadd(4, left + p, a_bytes);
            _tile_loadd(6, right, 4 * PANEL);
            _tile_loadd(7, right + PAIRS, 4 * PANEL);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (is_tall) {
                _tile_loadd(5, left + TILE * depth + p, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        if (is_whole) {
            _tile_stored(0, into, c_bytes);
            _tile_stored(1, into + TILE, c_bytes);
            _tile_stored(2, into + TILE * c_row, c_bytes);
            _tile_stored(3, into + TILE * c_row + TILE, c_bytes);
        } else {
            float block[2 * TILE * PANEL];
            _tile_stored(0, block, 4 * PANEL);
            _tile_stored(1, block + TILE, 4 * PANEL);
            if (is_tall) {
                _tile_stored(2, block + TILE * PANEL, 4 * PANEL);
                _tile_stored(3, block + TILE * PANEL + TILE, 4 * PANEL);
            }
            put(block, adds, min_long(2 * TILE, rows - i), columns, into, c_row);
        }
    }
}

#endif
