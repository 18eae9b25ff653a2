// Products of rows x [rows, inputs] and a matrix for Hopper, with outputs in bfloat16:
//
//     GATED    act(x gate^T) * (x up^T), with one matrix [2 outputs, inputs], gate above up
//     else     x weight^T, with a matrix [outputs, inputs], as `parts` partial sums over ranges of the inputs
//
// Both factors are in bfloat16, or with EIGHT in e4m3 with a float32 scale for each row of x and each row of the matrix.
//
// A persistent thread block computes tiles of ROWS x WIDTH outputs. Its first warp (the producer) loads slices of 128 bytes of the rows and
// of the matrix by TMA into a ring of STAGES; GROUPS warp groups (the consumers) multiply them, BLOCKS x 64 rows each.
// Gate and up of an output are in the same registers of the same thread, so that the epilogue multiplies them without exchange.
//
// The host defines ROWS, WIDTH (an odd multiple of 8, so that stored rows have no bank conflicts), STAGES, GROUPS, BLOCKS, MOST
// (registers of a consumer thread), GATED, EIGHT, GELU and `multiply`, the wgmma instruction for COLUMNS columns and 32 bytes of inputs.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    char bytes[128];
};

constexpr int LINE = 128;               // bytes of a slice of one row
constexpr int INPUTS = EIGHT ? 128 : 64;
constexpr int COLUMNS = GATED ? 2 * WIDTH : WIDTH;
constexpr int ROW_BYTES = ROWS * LINE;
constexpr int WEIGHT_BYTES = COLUMNS * LINE;
constexpr int STAGE = ROW_BYTES + WEIGHT_BYTES;
constexpr int SUMS = COLUMNS / 2;       // accumulator registers of a thread for 64 rows
constexpr int PIECES = WIDTH / 8;       // pieces of eight outputs
constexpr int BAND = 16;                // row tiles computed before the next weights, so that both stay in the L2 cache
constexpr int STRIP = 16 * WIDTH * 2;   // bytes of the 16 rows that a warp stores at once

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred p;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(hint)
        : "memory");
}

__device__ __forceinline__ u64 describe(u32 address) {  // wgmma descriptor: 128 bytes per row, 128-byte swizzle, eight rows in 1024 bytes
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float activate(float x) {
#if GELU
    float inner = x * (1.5957691216f + 0.0713548162726f * x * x);
#else
    float inner = x;
#endif
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(inner * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return x * r;
}

// Rounded where the torch operations round: gate, up, the activation, the product.
__device__ __forceinline__ u32 gated(float gate0, float gate1, float up0, float up1) {
    u32 gate = pack(gate0, gate1), up = pack(up0, up1), out;
    u32 active = pack(activate(__uint_as_float(gate << 16)), activate(__uint_as_float(gate & 0xFFFF0000)));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(active), "r"(up));
    return out;
}

//MULTIPLY

struct Tile {
    int row, column, part, start, stop;  // slices start to stop of the inputs
};

__device__ __forceinline__ Tile tile(int index, int row_tiles, int column_tiles, int slices, int parts) {
    int tiles = row_tiles * column_tiles, part = index / tiles;
    index -= part * tiles;
    int band = index / (BAND * column_tiles), high = min(BAND, row_tiles - band * BAND), inside = index - band * BAND * column_tiles;
    return {(band * BAND + inside % high) * ROWS, inside / high * WIDTH, part, part * slices / parts, (part + 1) * slices / parts};
}

// Scales of this thread's columns: two neighbours of each piece of eight.
__device__ __forceinline__ float2 column_scales(const float* scales, int column, int outputs) {
    return column < outputs ? *(const float2*)(scales + column) : make_float2(0, 0);
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    product(const __grid_constant__ TensorMap rows_map, const __grid_constant__ TensorMap weight_map,
            const __grid_constant__ TensorMap out_map, const float* row_scales, const float* weight_scales, int rows, int outputs, int slices,
            int row_tiles, int column_tiles, int parts) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    u32 ring = (shared(memory) + 1023) & ~1023u;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = row_tiles * column_tiles * parts;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[s])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&empty[s])), "n"(4 * GROUPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp < 4) {  // the producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 0) return;
        const u64 once = 0x12F0000000000000, again = 0x14F0000000000000;  // L2 hints: evict weights first, rows last
        int stage = 0;
        u32 phase = 1;
        for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
            Tile t = tile(index, row_tiles, column_tiles, slices, parts);
#pragma unroll 1
            for (int k = t.start; k < t.stop; k++) {
                u32 barrier = shared(&full[stage]), to = ring + stage * STAGE;
                wait(shared(&empty[stage]), phase);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(STAGE) : "memory");
                load(to, &rows_map, k * INPUTS, t.row, barrier, again);
                load(to + ROW_BYTES, &weight_map, k * INPUTS, t.column, barrier, once);
#if GATED
                load(to + ROW_BYTES + WEIGHT_BYTES / 2, &weight_map, k * INPUTS, outputs + t.column, barrier, once);
#endif
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST));
    int group = warp / 4 - 1, stage = 0;
    u32 phase = 0;
    u32 strip = ring + STAGES * STAGE + (warp - 4) * STRIP;
    u32 corner = strip + (lane % 16) * WIDTH * 2 + (lane / 16) * 16;  // this lane's row of four 8 x 8 pieces
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        Tile t = tile(index, row_tiles, column_tiles, slices, parts);
        float sums[BLOCKS][SUMS] = {};  // without the zeros CUDA 12 serialises the wgmma instructions
        int before = -1;
        for (int k = t.start; k < t.stop; k++) {
            wait(shared(&full[stage]), phase);
            u32 a = ring + stage * STAGE;
            u64 lines = describe(a + group * BLOCKS * 64 * LINE), columns = describe(a + ROW_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < LINE / 32; i++)
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
                    multiply(sums[block], lines + block * (64 * LINE / 16) + i * 2, columns + i * 2, k != t.start || i != 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (before >= 0) {  // the previous slice is finished
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&empty[before])) : "memory");
            }
            before = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[block][i])::"memory");  // keep the reads of the sums behind the wait
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&empty[before])) : "memory");

#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            int row = t.row + (group * BLOCKS + block) * 64 + (warp % 4) * 16;
#if EIGHT
            float high = row + lane / 4 < rows ? row_scales[row + lane / 4] : 0, low = row + lane / 4 + 8 < rows ? row_scales[row + lane / 4 + 8] : 0;
#pragma unroll
            for (int p = 0; p < SUMS / 4; p++) {  // rows lane / 4 and eight below, columns 2 (lane % 4) and the next
                int column = t.column + p % PIECES * 8 + lane % 4 * 2;
                float2 scale = column_scales(weight_scales + (p < PIECES ? 0 : outputs), column, outputs);
                sums[block][4 * p] *= high * scale.x, sums[block][4 * p + 1] *= high * scale.y;
                sums[block][4 * p + 2] *= low * scale.x, sums[block][4 * p + 3] *= low * scale.y;
            }
#endif
            u32 word[2 * PIECES];
#pragma unroll
            for (int i = 0; i < 2 * PIECES; i++)
#if GATED
                word[i] = gated(sums[block][2 * i], sums[block][2 * i + 1], sums[block][2 * (i + 2 * PIECES)], sums[block][2 * (i + 2 * PIECES) + 1]);
#else
                word[i] = pack(sums[block][2 * i], sums[block][2 * i + 1]);
#endif
            if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the previous store has read the strip
            __syncwarp();
#pragma unroll
            for (int p = 0; p + 1 < PIECES; p += 2)
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(corner + p * 16), "r"(word[2 * p]),
                             "r"(word[2 * p + 1]), "r"(word[2 * p + 2]), "r"(word[2 * p + 3])
                             : "memory");
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(corner + (PIECES - 1) * 16),
                         "r"(word[2 * PIECES - 2]), "r"(word[2 * PIECES - 1])
                         : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0 && row < rows)
                asm volatile(
                    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\ncp.async.bulk.commit_group;" ::"l"(&out_map),
                    "r"(t.column), "r"(row), "r"(t.part), "r"(strip)
                    : "memory");
        }
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
