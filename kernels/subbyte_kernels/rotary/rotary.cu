// Norms of queries and keys, rotary positions, and the token's way into the window: one warp a head. A lane holds D/64
// neighbouring channels of each half, because the halves are turned into each other. Rounds where the reference rounds.
//
// The host defines: HEAD_DIM, QUERY_HEADS, HEADS, NORMS (0 or 1), MODEL_BF16, ROWS_OF_ANGLES (1: one for all rows).

constexpr int OWN = D / 64, ALL = QUERY_HEADS + 2 * HEADS, WARPS = 4;

struct Params {
    const u16 *projected;       // [B, ALL, D]
    const u16 *cosine, *sine;   // [B or 1, D]
    const u16 *query_norm, *key_norm;  // [D]
    u16 *query;                 // [B, QUERY_HEADS, D]
    u16 *keys, *values;         // [B, HEADS, slots, D]
    const u64 *slots;           // [B]
    u64 row_stride, head_stride;
    float eps;
};

DEVICE float rounded(float x) { return from_model(to_model(x)); }

extern "C" __global__ void __launch_bounds__(32 * WARPS) rotary(const __grid_constant__ Params p) {
    const int head = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (head >= ALL) return;
    const u16 *from = p.projected + ((u64)row * ALL + head) * D;
    float x[2][OWN];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[half][i] = from_model(from[half * D / 2 + lane * OWN + i]);
    const bool is_value = head >= QUERY_HEADS + HEADS, is_key = head >= QUERY_HEADS;
    if (!is_value) {
#if NORMS
        const u16 *weight = is_key ? p.key_norm : p.query_norm;
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < OWN; ++i) sum += x[half][i] * x[half][i];
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) sum += __shfl_xor_sync(FULL, sum, bit);
        const float scale = rsqrtf(sum / D + p.eps);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                x[half][i] = rounded(rounded(x[half][i] * scale) * from_model(weight[half * D / 2 + lane * OWN + i]));
#endif
        const u64 angles = ROWS_OF_ANGLES == 1 ? 0 : (u64)row * D;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u64 first = angles + lane * OWN + i, second = first + D / 2;
            const float a = x[0][i], b = x[1][i];
            x[0][i] = rounded(a * from_model(p.cosine[first])) + rounded(-b * from_model(p.sine[first]));
            x[1][i] = rounded(b * from_model(p.cosine[second])) + rounded(a * from_model(p.sine[second]));
        }
    }
    u16 *to = p.query + ((u64)row * QUERY_HEADS + head) * D;
    if (is_key) {
        const int stored = head - QUERY_HEADS - (is_value ? HEADS : 0);
        to = (is_value ? p.values : p.keys) + row * p.row_stride + stored * p.head_stride + p.slots[row] * D;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < OWN; ++i) to[half * D / 2 + lane * OWN + i] = to_model(x[half][i]);
}
