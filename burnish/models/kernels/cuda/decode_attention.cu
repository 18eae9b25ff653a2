// Decode attention over a paged KV cache in bfloat16, for Hopper. One warp computes the query heads of one row that share a key head.
//
// The warp rotates the row's new queries and key, stores the key and the value, and loops over the pages of the row. A page of a head,
// 16 keys of DIM numbers, is one TMA copy. A step has two pages of keys and of values, and STAGES steps are in flight at once. Scores
// are computed as keys x queries and outputs as values^T x weights, so that a page is a tensor-core tile in its stored layout. The new key
// is written into the shared-memory copy of its page. The keys of a long row are divided into splits of one warp each: their partial
// outputs go to `sums`, their largest scores and softmax totals to `joints`.
//
// With EIGHT the cache holds e4m3 numbers and a float32 scale for each key and value, and DIM is 128. Numbers are converted to float16 for
// the tensor cores. A key's scale multiplies its scores, a value's scale its weight. A matrix load gives a thread four neighbouring numbers of
// a line instead of two pairs, so dimensions are permuted: of 16 dimensions of queries and keys, thread column c has 4 c to 4 c + 3; of 16
// output dimensions, thread row g has 2 g and 2 g + 1.
//
// The host defines DIM, STAGES, NORMED (query and key heads have an RMS norm), ROTATED (rows turn by `rotations` instead of their
// positions), EIGHT and QUERIES, at most 8.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) TensorMap {
    char bytes[128];
};

constexpr int PAGE = 16;
constexpr int BYTES = PAGE * DIM * (EIGHT ? 1 : 2);  // of a page of keys or of values
constexpr int SCALES = PAGE * 4;                     // bytes of the scales of a page
constexpr float LARGEST = 448;                       // the largest e4m3 number
#if EIGHT
typedef u8 Stored;
#else
typedef u16 Stored;
#endif
constexpr int STEPS = DIM / 16;
constexpr int HALF = DIM / 2;
constexpr float NONE = -1e30f;  // the score of a masked key; finite, so that NONE - NONE is 0 and not NaN
constexpr float WEIGHT_SCALE = EIGHT ? 32 : 1;  // of weights times the scales of values in float16, so that few become subnormal
constexpr float SLACK = 6;      // how far a score may exceed the running maximum before the sums are rescaled

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000); }

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void read(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}
__device__ __forceinline__ void read_turned(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}
__device__ __forceinline__ u32 turned(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if EIGHT
#define KIND "f16.f16"
#else
#define KIND "bf16.bf16"
#endif
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if EIGHT
__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 both;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 halves(u32 two) {  // two e4m3 numbers in the low bits, as float16
    u32 both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(both) : "r"(two));
    return both;
}
// Quantise a head, of which each lane has two numbers of each half. Returns its scale, and the e4m3 numbers in the low bits of `numbers`.
__device__ __forceinline__ float quantised(u32 (&numbers)[2]) {
    float largest = 0;
    for (int h = 0; h < 2; h++) largest = fmaxf(largest, fmaxf(fabsf(low(numbers[h])), fabsf(high(numbers[h]))));
#pragma unroll
    for (int o = 16; o > 0; o /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    float step = largest > 0 ? largest * (1 / LARGEST) : 1.0f;
    for (int h = 0; h < 2; h++) {
        u16 two;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(__fdiv_rn(high(numbers[h]), step)), "f"(__fdiv_rn(low(numbers[h]), step)));
        numbers[h] = two;
    }
    return step;
}
__device__ __forceinline__ void load(u32 to, const TensorMap* map, int line, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
                 "r"(0), "r"(line), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void load_scales(u32 to, const float* from, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "n"(SCALES),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ float scale_at(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
// Shared-memory offset of a 16-byte piece of a page's line of 128 bytes, with TMA's 128-byte swizzle.
__device__ __forceinline__ u32 at(int line, int piece) { return line * 128 + ((piece ^ line % 8) << 4); }
#else
__device__ __forceinline__ void load(u32 to, const TensorMap* map, int line, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2}], [%4];" ::"r"(to), "l"(map),
                 "r"(0), "r"(line), "r"(barrier)
                 : "memory");
}

// Shared-memory offset of a 16-byte piece of a page's line: halves of 64 numbers, lines of 128 bytes, with TMA's 128-byte swizzle.
__device__ __forceinline__ u32 at(int line, int piece) { return (piece / 8) * (PAGE * 128) + line * 128 + ((piece % 8 ^ line % 8) << 4); }
#endif

// RMS norm of two neighbouring numbers of a head, rounded as the torch operations round.
__device__ __forceinline__ u32 normed(u32 x, float scale, u32 weight, float shift, float factor) {
    u32 y = pack(low(x) * scale * (low(weight) + shift), high(x) * scale * (high(weight) + shift));
    return factor == 1.0f ? y : pack(low(y) * factor, high(y) * factor);
}
__device__ __forceinline__ u32 rotated(u32 x, u32 other, u32 cos, u32 sin) {
    return pack(low(x) * low(cos) + low(other) * low(sin), high(x) * high(cos) + high(other) * high(sin));
}
__device__ __forceinline__ float squares(u32 x) { return low(x) * low(x) + high(x) * high(x); }

extern "C" __global__ void __launch_bounds__(32)
    decode_attention(const __grid_constant__ TensorMap keys_map, const __grid_constant__ TensorMap values_map, const u16* qkv,
                     const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, Stored* keys, Stored* values, float* key_scales,
                     float* value_scales, const int* table,
                     const long long* positions, const long long* rotations, u16* out, float* sums, float* joints, float scale, float eps, float shift, float factor,
                     int table_stride, int width, int window, int splits, int least, int kv_heads, int lines) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 full[STAGES];
    u32 ring = (shared(memory) + 1023) & ~1023u;
    int lane = threadIdx.x, row = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads, split = blockIdx.y;
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[s])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    int position = (int)positions[row];
    const int* pages = table + (u64)row * table_stride;
    int names = lane < width ? pages[lane] : 0, ahead = 32 + lane < width ? pages[32 + lane] : 0;  // loaded before the position is known
    u64 pair = (u64)row * kv_heads + head;
    u16* mine = out + pair * QUERIES * DIM;
    if (position < 0) {  // an empty row
        if (split == 0)
            for (int i = lane; i < QUERIES * DIM / 2; i += 32) ((u32*)mine)[i] = 0;
        return;
    }
    int first = max(0, position + 1 - window);
    int split_keys = max(least, ((position - first + splits - 1) / splits + 31) / 32 * 32);
    int active = max(1, (position - first + split_keys - 1) / split_keys);
    if (split >= active) return;
    bool is_last = split == active - 1;
    int start = first + split * split_keys, stop = is_last ? position + 1 : start + split_keys;
    int page = start / PAGE, count = (stop - 1) / PAGE - page + 1;
    __syncwarp();

    // Page indices are held 32 at a time, the next 32 prefetched. A missing second page is read past the end of the cache, as zeros.
    if (page > 0) {
        names = lane < count ? pages[page + lane] : 0;
        ahead = 32 + lane < count ? pages[page + 32 + lane] : 0;
    }
    auto fetch = [&](int i) {
        if (i % 16 == 0 && i > 0) {
            names = ahead;
            ahead = 2 * i + 32 + lane < count ? pages[page + 2 * i + 32 + lane] : 0;
        }
        int one = __shfl_sync(~0u, names, 2 * i % 32), two = __shfl_sync(~0u, names, 2 * i % 32 + 1);
        if (lane == 0) {
            u32 barrier = shared(&full[i % STAGES]), to = ring + i % STAGES * 4 * BYTES;
            int line = (one * kv_heads + head) * PAGE, next = 2 * i + 1 < count ? (two * kv_heads + head) * PAGE : lines;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(4 * BYTES + (EIGHT ? 4 * SCALES : 0)) : "memory");
#if EIGHT
            u32 scales = ring + STAGES * 4 * BYTES + i % STAGES * 4 * SCALES;
            int second = next < lines ? next : line;  // a missing second page has no scales
            load_scales(scales, key_scales + line, barrier);
            load_scales(scales + SCALES, key_scales + second, barrier);
            load_scales(scales + 2 * SCALES, value_scales + line, barrier);
            load_scales(scales + 3 * SCALES, value_scales + second, barrier);
#endif
            load(to, &keys_map, line, barrier);
            load(to + BYTES, &keys_map, next, barrier);
            load(to + 2 * BYTES, &values_map, line, barrier);
            load(to + 3 * BYTES, &values_map, next, barrier);
        }
    };
    int steps = (count + 1) / 2;
    for (int i = 0; i < min(STAGES, steps); i++) fetch(i);

    // Queries in tensor-core layout: of every 16 numbers of query lane / 4, numbers 2 (lane % 4) and the next, and those eight further.
    const u16* line = qkv + (u64)row * (QUERIES + 2) * kv_heads * DIM;
#if ROTATED
    int angle = (int)rotations[row];
#else
    int angle = position;
#endif
    const u16 *turn = cos + (u64)angle * DIM, *slant = sin + (u64)angle * DIM;
    int query = lane / 4, column = lane % 4 * 2;
    constexpr int APART = EIGHT ? 2 : 8;  // between the two pairs of numbers that a thread has of 16
    int own = EIGHT ? lane % 4 * 4 : column;
    u32 q[STEPS][2];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            q[k][e] = query < QUERIES ? *(const u32*)(line + (head * QUERIES + query) * DIM + 16 * k + APART * e + own) : 0;
#if NORMED
    float square = 0;
#pragma unroll
    for (int k = 0; k < STEPS; k++) square += squares(q[k][0]) + squares(q[k][1]);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    float size = rsqrtf(square / DIM + eps);
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) q[k][e] = normed(q[k][e], size, *(const u32*)(q_norm + 16 * k + APART * e + own), shift, factor);
#endif
#pragma unroll
    for (int k = 0; k < STEPS / 2; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int d = 16 * k + APART * e + own;
            u32 x = q[k][e], y = q[k + STEPS / 2][e];
            q[k][e] = rotated(x, y, *(const u32*)(turn + d), *(const u32*)(slant + d));
            q[k + STEPS / 2][e] = rotated(y, x, *(const u32*)(turn + HALF + d), *(const u32*)(slant + HALF + d));
        }
#if EIGHT
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) q[k][e] = pack_half(low(q[k][e]), high(q[k][e]));
#endif

    // The new key and value: each lane has two numbers of each half.
    u32 new_key[2] = {0, 0}, new_value[2] = {0, 0};
    float new_scale[2] = {1, 1};  // of the key and of the value, in 8 bits
    bool has_part = 2 * lane < HALF;
    if (is_last) {
        const u16* from = line + (QUERIES * kv_heads + head) * DIM + 2 * lane;
        if (has_part) {
            new_key[0] = *(const u32*)from, new_key[1] = *(const u32*)(from + HALF);
            new_value[0] = *(const u32*)(from + kv_heads * DIM), new_value[1] = *(const u32*)(from + kv_heads * DIM + HALF);
        }
#if NORMED
        float all = squares(new_key[0]) + squares(new_key[1]);
#pragma unroll
        for (int o = 16; o > 0; o /= 2) all += __shfl_xor_sync(~0u, all, o);
        float long_ = rsqrtf(all / DIM + eps);
        if (has_part)
            for (int h = 0; h < 2; h++) new_key[h] = normed(new_key[h], long_, *(const u32*)(k_norm + h * HALF + 2 * lane), shift, 1.0f);
#endif
        if (has_part) {
            u32 x = new_key[0], y = new_key[1];
            new_key[0] = rotated(x, y, *(const u32*)(turn + 2 * lane), *(const u32*)(slant + 2 * lane));
            new_key[1] = rotated(y, x, *(const u32*)(turn + HALF + 2 * lane), *(const u32*)(slant + HALF + 2 * lane));
        }
#if EIGHT
        new_scale[0] = quantised(new_key), new_scale[1] = quantised(new_value);
#endif
#if STORES
        u64 place = ((u64)pages[position / PAGE] * kv_heads + head) * PAGE + position % PAGE, slot = place * DIM + 2 * lane;
#if EIGHT
        for (int h = 0; h < 2; h++) {
            *(u16*)(keys + slot + h * HALF) = (u16)new_key[h];
            *(u16*)(values + slot + h * HALF) = (u16)new_value[h];
        }
        if (lane == 0) key_scales[place] = new_scale[0], value_scales[place] = new_scale[1];
#else
        if (has_part)
            for (int h = 0; h < 2; h++) {
                *(u32*)(keys + slot + h * HALF) = new_key[h];
                *(u32*)(values + slot + h * HALF) = new_value[h];
            }
#endif
#endif
    }

    float best[2] = {NONE, NONE}, total[2] = {0, 0}, mixed[STEPS][4] = {};
    u32 key_at = (lane % 16) * 128, key_turn = lane % 8, value_at = (lane % 8 + lane / 16 * 8) * 128;
    for (int i = 0; i < steps; i++) {
        u32 k_pages = ring + i % STAGES * 4 * BYTES, v_pages = k_pages + 2 * BYTES;
#if EIGHT
        u32 scales = ring + STAGES * 4 * BYTES + i % STAGES * 4 * SCALES;
#endif
        asm volatile("{\n.reg .pred p;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(
                         shared(&full[i % STAGES])),
                     "r"(i / STAGES % 2)
                     : "memory");
        if (i == steps - 1) {  // last page: insert the new token, and zero the values past the split's end, which may be NaN
            int slot = (stop - 1) % PAGE;
            u32 k_page = k_pages + (count - 1) % 2 * BYTES, v_page = k_page + 2 * BYTES;
            if (is_last && has_part)
                for (int h = 0; h < 2; h++) {
                    int d = h * HALF + 2 * lane;
#if EIGHT
                    u32 to = at(slot, d / 16) + d % 16;
                    asm volatile("st.shared.u16 [%0], %1;\nst.shared.u16 [%2], %3;" ::"r"(k_page + to), "h"((u16)new_key[h]), "r"(v_page + to),
                                 "h"((u16)new_value[h])
                                 : "memory");
                    u32 scale_to = scales + (count - 1) % 2 * SCALES + slot * 4;
                    if (lane == 0)
                        asm volatile("st.shared.f32 [%0], %1;\nst.shared.f32 [%2], %3;" ::"r"(scale_to), "f"(new_scale[0]), "r"(scale_to + 2 * SCALES),
                                     "f"(new_scale[1])
                                     : "memory");
#else
                    u32 to = at(slot, d / 8) + d % 8 * 2;
                    asm volatile("st.shared.u32 [%0], %1;\nst.shared.u32 [%2], %3;" ::"r"(k_page + to), "r"(new_key[h]), "r"(v_page + to),
                                 "r"(new_value[h])
                                 : "memory");
#endif
                }
            constexpr int PIECES = BYTES / PAGE / 16;  // pieces of 16 bytes in a line
            for (int p = lane; p < (PAGE - 1 - slot) * PIECES; p += 32)
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v_page + at(slot + 1 + p / PIECES, p % PIECES)), "r"(0)
                             : "memory");
            __syncwarp();
        }
        float score[2][4] = {}, odd[2][4] = {};  // per page: keys lane / 4 and eight further, queries column and the next
        u32 v[2][STEPS][4];
#if EIGHT
#pragma unroll
        for (int k = 0; k < STEPS; k += 2)
#pragma unroll
            for (int h = 0; h < 2; h++) {  // four matrices: keys 0 to 7 and 8 to 15, of 16 dimensions and of the next 16
                u32 raw[4];
                read(raw, k_pages + h * BYTES + key_at + (((k + lane / 16) ^ key_turn) << 4));
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    u32 a[4] = {halves(raw[2 * n]), halves(raw[2 * n + 1]), halves(raw[2 * n] >> 16), halves(raw[2 * n + 1] >> 16)};
                    multiply(n ? odd[h] : score[h], a, q[k + n][0], q[k + n][1]);
                }
            }
#pragma unroll
        for (int d = 0; d < STEPS; d += 2)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 raw[4];
                read_turned(raw, v_pages + h * BYTES + key_at + (((d + lane / 16) ^ key_turn) << 4));
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {  // keys 2 c and 2 c + 1 of eight, each with dimensions 2 g and 2 g + 1
                        u32 one = halves(raw[2 * n + e]), two = halves(raw[2 * n + e] >> 16);
                        v[h][d + n][2 * e] = __byte_perm(one, two, 0x5410);
                        v[h][d + n][2 * e + 1] = __byte_perm(one, two, 0x7632);
                    }
            }
#else
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 a[4];
                int piece = 2 * k;
                read(a, k_pages + h * BYTES + piece / 8 * (PAGE * 128) + key_at + (((piece % 8 + lane / 16) ^ key_turn) << 4));
                multiply(k % 2 ? odd[h] : score[h], a, q[k][0], q[k][1]);
            }
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int piece = 2 * d;
                read_turned(v[h][d], v_pages + h * BYTES + piece / 8 * (PAGE * 128) + value_at + (((piece % 8 + lane / 8 % 2) ^ key_turn) << 4));
            }
#endif
        int key = (page + 2 * i) * PAGE + lane / 4;
        bool is_above = false;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int index = key + h * PAGE + e / 2 * 8;
#if EIGHT
                float factor = scale * scale_at(scales + h * SCALES + (lane / 4 + e / 2 * 8) * 4);
#else
                float factor = scale;
#endif
                score[h][e] = index >= start && index < stop ? (score[h][e] + odd[h][e]) * factor : NONE;
                is_above |= score[h][e] > best[e % 2] + SLACK;
            }
        if (__any_sync(~0u, is_above)) {
            float shrink[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float top = fmaxf(fmaxf(score[0][e], score[0][e + 2]), fmaxf(score[1][e], score[1][e + 2]));
#pragma unroll
                for (int o = 4; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
                top = fmaxf(top, best[e]);
                shrink[e] = power(best[e] - top);
                best[e] = top;
                total[e] *= shrink[e];
            }
#pragma unroll
            for (int d = 0; d < STEPS; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) mixed[d][e] *= shrink[e % 2];
        }
        u32 weight[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                score[h][e] = power(score[h][e] - best[e % 2]);  // 0 for a masked key
                total[e % 2] += score[h][e];
#if EIGHT
                // The scale of a masked key may be anything.
                int index = key + h * PAGE + e / 2 * 8;
                score[h][e] = index >= start && index < stop ? score[h][e] * (WEIGHT_SCALE * scale_at(scales + (2 + h) * SCALES + (lane / 4 + e / 2 * 8) * 4)) : 0.0f;
#endif
            }
#if EIGHT
            weight[h][0] = turned(pack_half(score[h][0], score[h][1]));
            weight[h][1] = turned(pack_half(score[h][2], score[h][3]));
#else
            weight[h][0] = turned(pack(score[h][0], score[h][1]));
            weight[h][1] = turned(pack(score[h][2], score[h][3]));
#endif
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int d = 0; d < STEPS; d++) multiply(mixed[d], v[h][d], weight[h][0], weight[h][1]);
        __syncwarp();
        if (i + STAGES < steps) fetch(i + STAGES);
    }

#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int o = 4; o < 32; o *= 2) total[e] += __shfl_xor_sync(~0u, total[e], o);
    constexpr int NEXT = EIGHT ? 1 : 8;  // between the two output dimensions that a thread has of 16
    int output = EIGHT ? lane / 4 * 2 : lane / 4;
    if (active == 1) {
        float inverse[2] = {1.0f / (WEIGHT_SCALE * total[0]), 1.0f / (WEIGHT_SCALE * total[1])};
        // Store through shared memory, so that whole lines are written.
        u16* stage = (u16*)(memory + (ring - shared(memory)));
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 both = pack(mixed[d][e] * inverse[e % 2], 0);
                stage[(column + e % 2) * (DIM + 8) + 16 * d + output + e / 2 * NEXT] = (u16)both;
            }
        __syncwarp();
        for (int p = lane; p < QUERIES * (DIM / 8); p += 32)
            *(uint4*)(mine + p * 8) = *(const uint4*)(stage + p / (DIM / 8) * (DIM + 8) + p % (DIM / 8) * 8);
        return;
    }
    u64 place = (pair * splits + split) * QUERIES;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (column + e >= QUERIES) continue;
        float* to = sums + (place + column + e) * DIM + output;
#pragma unroll
        for (int d = 0; d < STEPS; d++) to[16 * d] = mixed[d][e] / WEIGHT_SCALE, to[16 * d + NEXT] = mixed[d][e + 2] / WEIGHT_SCALE;
        if (lane < 4) joints[(place + column + e) * 2] = best[e], joints[(place + column + e) * 2 + 1] = total[e];
    }
}
