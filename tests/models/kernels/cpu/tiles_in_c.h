/* The instructions of matrix tiles that `tiles.c` uses, in C: so its arithmetic is tested on processors without them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0 /* the permission to use them is granted */

static _Thread_local unsigned char tile_registers[8][16][64];

static inline void load_tile(int tile, const void *from, long stride) {
    for (int i = 0; i < 16; i++) memcpy(tile_registers[tile][i], (const char *)from + i * stride, 64);
}

static inline void store_tile(int tile, void *to, long stride) {
    for (int i = 0; i < 16; i++) memcpy((char *)to + i * stride, tile_registers[tile][i], 64);
}

static inline float float_of(const unsigned char *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    uint32_t wide = (uint32_t)half << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* c[i][j] += a[i][2k] b[k][2j] + a[i][2k + 1] b[k][2j + 1] for each k in turn */
static inline void add_products(int c, int a, int b) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float sum;
            memcpy(&sum, &tile_registers[c][i][4 * j], sizeof sum);
            for (int k = 0; k < 16; k++)
                for (int half = 0; half < 4; half += 2)
                    sum += float_of(&tile_registers[a][i][4 * k + half]) * float_of(&tile_registers[b][k][4 * j + half]);
            memcpy(&tile_registers[c][i][4 * j], &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) ((void)(shapes))
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, stride) load_tile(tile, from, stride)
#define _tile_stored(tile, to, stride) store_tile(tile, to, stride)
#define _tile_zero(tile) memset(tile_registers[tile], 0, sizeof tile_registers[tile])
#define _tile_dpbf16ps(c, a, b) add_products(c, a, b)
