/* Products of bfloat16 matrices on the matrix tiles of x86 processors (AMX), summed in float. */

#include "product.h"

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16                  /* rows of a tile, and its columns of float */
#define PAIRS (2 * TILE)         /* columns of a tile of bfloat16: pairs of numbers are summed at once */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM: Linux grants a process the tiles' state on request */
#define TILE_STATE 18

_Static_assert(PANEL == 2 * TILE, "a panel is two tiles wide");

static int has_permission(void) {
    static int known; /* 0 is unknown; every thread would find the same */
    int state = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!state) {
        state = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_STATE) ? -1 : 1;
        __atomic_store_n(&known, state, __ATOMIC_RELAXED);
    }
    return state > 0;
}

int runs_on_tiles(long depth) { return depth % PAIRS == 0 && has_permission(); }

EXPORT int has_tiles(void) { return has_permission(); }

EXPORT void begin_tiles(void) {
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

EXPORT void end_tiles(void) {
    if (has_permission()) _tile_release();
}

static void copy(const float *from, long from_row, float *to, long to_row, long rows, long columns) {
    for (long i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, columns * sizeof *to);
}

EXPORT void product_tiles(int adds, long rows, long columns, long depth, const bfloat16 *a, const bfloat16 *b, float *c,
                          long c_row) {
    __asm__ volatile("" : : : "memory"); /* gcc's _tile_loadd does not say that it reads memory */
    long a_bytes = depth * sizeof *a;
    for (long i = 0; i < rows; i += 2 * TILE) {
        /* Sums of every block begin with C, so that a row's bits do not depend on the rows beside it. */
        float block[2 * TILE * PANEL];
        long height = min_long(2 * TILE, rows - i), into_row = c_row;
        int is_tall = height > TILE, is_whole = height == 2 * TILE && columns == PANEL;
        float *into = c + i * c_row;
        if (!is_whole) {
            memset(block, 0, sizeof block);
            if (adds) copy(into, c_row, block, PANEL, height, columns);
            into = block, into_row = PANEL;
            __asm__ volatile("" : : : "memory");
        }
        long c_bytes = into_row * sizeof *c;
        if (adds) {
            _tile_loadd(0, into, c_bytes);
            _tile_loadd(1, into + TILE, c_bytes);
            _tile_loadd(2, into + TILE * into_row, c_bytes);
            _tile_loadd(3, into + TILE * into_row + TILE, c_bytes);
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
        _tile_stored(0, into, c_bytes);
        _tile_stored(1, into + TILE, c_bytes);
        _tile_stored(2, into + TILE * into_row, c_bytes);
        _tile_stored(3, into + TILE * into_row + TILE, c_bytes);
        if (!is_whole) copy(block, PANEL, c + i * c_row, c_row, height, columns);
    }
}

#else

EXPORT int has_tiles(void) { return 0; }

#endif
