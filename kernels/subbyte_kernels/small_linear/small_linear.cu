// Linear layers of a few tokens: memory-bound, so everything serves the stream of weights. A warp computes rows of the
// matrices, one after the other; a lane holds 16 bytes of every 512 of a row, a stage of STAGE such loads at a time, and
// asks for the next stage before it uses the last. The first stage is asked for before the kernel waits for the one that
// makes the states: weights do not depend on it.
//
// The host defines: WIDTH (K, a multiple of 256), TOKENS (T), STAGE (loads of a stage, a divisor of WIDTH / 256), WARPS (of
// a block), MODEL_BF16.

constexpr int LOADS = WIDTH / 256, STAGES = LOADS / STAGE;
static_assert(LOADS % STAGE == 0, "stages are whole");

struct Params {
    const uint4 *hidden;     // [T, WIDTH]
    const uint4 *weight[3];  // [rows_i, WIDTH]
    u16 *output;             // [T, rows]
    int ends[3];             // rows of the first matrix, of the first two, of all
    int unused;
};

extern __shared__ uint4 states[];  // [TOKENS, WIDTH / 8]

DEVICE u16 narrow(float x) {
    u16 y;
#if MODEL_BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
}

DEVICE const uint4 *row_of(const Params &p, int row) {
    const int part = row < p.ends[0] ? 0 : row < p.ends[1] ? 1 : 2;
    return p.weight[part] + (u64)(row - (part ? p.ends[part - 1] : 0)) * (WIDTH / 8);
}

DEVICE void load(uint4 (&words)[STAGE], const uint4 *from) {
#pragma unroll
    for (int i = 0; i < STAGE; ++i)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w) : "l"(from + i * 32));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) small_linear(const __grid_constant__ Params p) {
    const int lane = threadIdx.x & 31, step = gridDim.x * WARPS;
    int row = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int rows = p.ends[2];
    uint4 now[STAGE], next[STAGE];
    const uint4 *from = row_of(p, row < rows ? row : 0) + lane;
    load(now, from);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = threadIdx.x; i < TOKENS * WIDTH / 8; i += 32 * WARPS) states[i] = p.hidden[i];
    __syncthreads();
    while (row < rows) {
        float sum[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sum[t] = 0.0f;
        const int following = row + step;
        const uint4 *then = row_of(p, following < rows ? following : row) + lane;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            load(next, stage + 1 < STAGES ? from + (stage + 1) * STAGE * 32 : then);
#pragma unroll
            for (int i = 0; i < STAGE; ++i) {
                const u32 w[4] = {now[i].x, now[i].y, now[i].z, now[i].w};
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    const uint4 read = states[t * (WIDTH / 8) + (stage * STAGE + i) * 32 + lane];
                    const u32 x[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[t] += low(w[e]) * low(x[e]) + high(w[e]) * high(x[e]);
                }
            }
#pragma unroll
            for (int i = 0; i < STAGE; ++i) now[i] = next[i];
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int bit = 1; bit < 32; bit <<= 1) sum[t] += __shfl_xor_sync(FULL, sum[t], bit);
            if (lane == 0) p.output[(u64)t * rows + row] = narrow(sum[t]);
        }
        row = following;
        from = then;
    }
}
