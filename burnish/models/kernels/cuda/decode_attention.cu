// Decode attention over a paged KV cache in bfloat16, for Hopper. One warp computes the query heads of one row that share a key head.
//
// The warp rotates the row's new queries and key, stores the key and the value, and loops over the pages of the row. A page of a head,
// 16 keys of DIM numbers, is one TMA copy. A step has two pages of keys and of values, and STAGES steps are in flight at once. Scores
// are computed as keys x queries and outputs as values^T x weights, so that a page is a tensor-core tile in its stored layout. The new key
// is written into the shared-memory copy of its page. The keys of a long row are divided into splits of one warp each: their partial
// outputs go to `sums`, their largest scores and softmax totals to `joints`.
//
// The host defines DIM, STAGES, NORMED (query and key heads have an RMS norm), ROTATED (rows turn by `rotations` instead of their
// positions) and QUERIES, at most 8.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    char bytes[128];
};

constexpr int PAGE = 16;
constexpr int BYTES = PAGE * DIM * 2;  // of a page of keys or of values
constexpr int STEPS = DIM / 16;
constexpr int HALF = DIM / 2;
constexpr float NONE = -1e30f;  // the score of a masked key; finite, so that NONE - NONE is 0 and not NaN
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int line, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2}], [%4];" ::"r"(to), "l"(map),
                 "r"(0), "r"(line), "r"(barrier)
                 : "memory");
}

// Shared-memory offset of a 16-byte piece of a page's line: halves of 64 numbers, lines of 128 bytes, with TMA's 128-byte swizzle.
__device__ __forceinline__ u32 at(int line, int piece) { return (piece / 8) * (PAGE * 128) + line * 128 + ((piece % 8 ^ line % 8) << 4); }

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
                     const u16* q_norm, const u16* k_norm, const u16* cos, const u16* sin, u16* keys, u16* values, const int* table,
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
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(4 * BYTES) : "memory");
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
    u32 q[STEPS][2];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            q[k][e] = query < QUERIES ? *(const u32*)(line + (head * QUERIES + query) * DIM + 16 * k + 8 * e + column) : 0;
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
        for (int e = 0; e < 2; e++) q[k][e] = normed(q[k][e], size, *(const u32*)(q_norm + 16 * k + 8 * e + column), shift, factor);
#endif
#pragma unroll
    for (int k = 0; k < STEPS / 2; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int d = 16 * k + 8 * e + column;
            u32 x = q[k][e], y = q[k + STEPS / 2][e];
            q[k][e] = rotated(x, y, *(const u32*)(turn + d), *(const u32*)(slant + d));
            q[k + STEPS / 2][e] = rotated(y, x, *(const u32*)(turn + HALF + d), *(const u32*)(slant + HALF + d));
        }

    // The new key and value: each lane has two numbers of each half.
    u32 new_key[2] = {0, 0}, new_value[2] = {0, 0};
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
            u64 slot = (((u64)pages[position / PAGE] * kv_heads + head) * PAGE + position % PAGE) * DIM + 2 * lane;
            for (int h = 0; h < 2; h++) {
                *(u32*)(keys + slot + h * HALF) = new_key[h];
                *(u32*)(values + slot + h * HALF) = new_value[h];
            }
        }
    }

    float best[2] = {NONE, NONE}, total[2] = {0, 0}, mixed[STEPS][4] = {};
    u32 key_at = (lane % 16) * 128, key_turn = lane % 8, value_at = (lane % 8 + lane / 16 * 8) * 128;
    for (int i = 0; i < steps; i++) {
        u32 k_pages = ring + i % STAGES * 4 * BYTES, v_pages = k_pages + 2 * BYTES;
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
                    u32 to = at(slot, d / 8) + d % 8 * 2;
                    asm volatile("st.shared.u32 [%0], %1;\nst.shared.u32 [%2], %3;" ::"r"(k_page + to), "r"(new_key[h]), "r"(v_page + to),
                                 "r"(new_value[h])
                                 : "memory");
                }
            for (int p = lane; p < (PAGE - 1 - slot) * (DIM / 8); p += 32)
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v_page + at(slot + 1 + p / (DIM / 8), p % (DIM / 8))), "r"(0)
                             : "memory");
            __syncwarp();
        }
        float score[2][4] = {}, odd[2][4] = {};  // per page: keys lane / 4 and eight further, queries column and the next
        u32 v[2][STEPS][4];
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
        int key = (page + 2 * i) * PAGE + lane / 4;
        bool is_above = false;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int index = key + h * PAGE + e / 2 * 8;
                score[h][e] = index >= start && index < stop ? (score[h][e] + odd[h][e]) * scale : NONE;
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
            }
            weight[h][0] = turned(pack(score[h][0], score[h][1]));
            weight[h][1] = turned(pack(score[h][2], score[h][3]));
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
    if (active == 1) {
        float inverse[2] = {1.0f / total[0], 1.0f / total[1]};
        // Store through shared memory, so that whole lines are written.
        u16* stage = (u16*)(memory + (ring - shared(memory)));
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 both = pack(mixed[d][e] * inverse[e % 2], 0);
                stage[(column + e % 2) * (DIM + 8) + 16 * d + lane / 4 + e / 2 * 8] = (u16)both;
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
        float* to = sums + (place + column + e) * DIM + lane / 4;
#pragma unroll
        for (int d = 0; d < STEPS; d++) to[16 * d] = mixed[d][e], to[16 * d + 8] = mixed[d][e + 2];
        if (lane < 4) joints[(place + column + e) * 2] = best[e], joints[(place + column + e) * 2 + 1] = total[e];
    }
}
