// Residual and RMSNorm: one block a token, 8 neighbouring channels a thread. Rounds where the reference rounds: the sum
// and the normalized value to the model's dtype, then the product with the weight.
//
// The host defines: WIDTH (channels, a multiple of 8), MODEL_BF16.

constexpr int THREADS = WIDTH / 8, WARPS = (THREADS + 31) / 32;

struct Params {
    const uint4 *hidden, *residual;  // [T, WIDTH]; residual may be null
    const uint4 *weight;
    uint4 *stream, *normed;          // [T, WIDTH]
    float eps;
};

DEVICE u32 both(float a, float b) {
    u32 y;
#if MODEL_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
#endif
    return y;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) add_norm(const __grid_constant__ Params p) {
    __shared__ float sums[WARPS];
    const int index = threadIdx.x, warp = index >> 5, lane = index & 31;
    const u64 at = (u64)blockIdx.x * THREADS + index;
    const bool inside = index < THREADS;
    uint4 weight = make_uint4(0, 0, 0, 0);
    if (inside) weight = __ldg(p.weight + index);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    uint4 made = make_uint4(0, 0, 0, 0);
    if (inside) {
        made = p.hidden[at];
        if (p.residual) {
            const uint4 more = p.residual[at];
            const u32 a[4] = {made.x, made.y, made.z, made.w}, b[4] = {more.x, more.y, more.z, more.w};
            u32 c[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) c[i] = both(low(a[i]) + low(b[i]), high(a[i]) + high(b[i]));
            made = make_uint4(c[0], c[1], c[2], c[3]);
        }
        p.stream[at] = made;
    }
    const u32 x[4] = {made.x, made.y, made.z, made.w}, w[4] = {weight.x, weight.y, weight.z, weight.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += low(x[i]) * low(x[i]) + high(x[i]) * high(x[i]);
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1) sum += __shfl_xor_sync(FULL, sum, bit);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = lane < WARPS ? sums[lane] : 0.0f;
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1) sum += __shfl_xor_sync(FULL, sum, bit);
    const float scale = rsqrtf(sum / WIDTH + p.eps);
    if (!inside) return;
    u32 y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 normed = both(low(x[i]) * scale, high(x[i]) * scale);
        y[i] = both(low(normed) * low(w[i]), high(normed) * high(w[i]));
    }
    p.normed[at] = make_uint4(y[0], y[1], y[2], y[3]);
}
