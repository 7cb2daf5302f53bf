// Linear layers of a few tokens: memory-bound, so everything serves the stream of weights.
//
// An item is 8 rows of the matrices. The warps of a block share it by columns, 256 a warp and pass, and add up what they
// got in shared memory. Tokens are operand A of the tensor cores' m16n8k16 (rows), weights operand B (8 columns), so one
// pass over a weight serves up to 16 tokens. Lane 4 g + t (g = 0..7, t = 0..3) holds of B column g and the contracted
// indices 2 t, 2 t + 1, 2 t + 8, 2 t + 9, of A rows g and g + 8 and the same. A sum does not care for the order of its
// terms: lane t takes the 8 neighbours that one 16-byte load brings, and both operands are read in the same order.
//
// Weights go straight to registers, eight loads of a lane in flight: a load's register is asked for again, by the next
// pass or item, as soon as it was multiplied. The first ones are asked for before the kernel waits for the one that makes
// the states: weights do not depend on it.
//
// The host defines: WIDTH (K, a multiple of 256), TOKENS (T, up to 16), WARPS (of a block, a divisor of WIDTH / 256),
// BLOCKS (of a multiprocessor, at least), MODEL_BF16.

#include "linear.cuh"

constexpr int LOADS = 8;

// Where a row begins, in 16-byte words; rows behind the last are the last one.
DEVICE const uint4 *row_of(const Params &p, int row) {
    const Place place = place_of(p, min(row, p.ends[2] - 1));
    return reinterpret_cast<const uint4 *>(place.matrix) + (u64)place.row * (WIDTH / 8);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) small_linear(const __grid_constant__ Params p) {
    __shared__ float parts[2][WARPS][TOKENS][8];  // in turn
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int items = (p.ends[2] + 7) / 8;
    const int column = 32 * warp + t;  // of the first pass, in 16-byte words
    const uint4 *from = row_of(p, 8 * blockIdx.x + g) + column;
    uint4 weights[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) weights[i] = load_weight(from + 4 * i);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    uint4 states[HALVES][LOADS];
    int turn = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
        float sum[2][4] = {};  // two, so that products need not wait for each other
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (PASSES > 1 || item == blockIdx.x)  // the same for all items, if a pass is all
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) {
                        const int token = 8 * half + g;
                        states[half][i] = load_state(p.hidden + token * (WIDTH / 8) + 32 * WARPS * pass + column + 4 * i, token < TOKENS);
                    }
            const bool more = pass + 1 < PASSES || item + gridDim.x < items;
            from = pass + 1 < PASSES ? from + 32 * WARPS : row_of(p, 8 * (item + gridDim.x) + g) + column;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const uint4 w = weights[i], x = states[0][i], y = HALVES > 1 ? states[HALVES - 1][i] : make_uint4(0, 0, 0, 0);
                mma_model(sum[0], x.x, y.x, x.y, y.y, w.x, w.y);
                mma_model(sum[1], x.z, y.z, x.w, y.w, w.z, w.w);
                if (more) weights[i] = load_weight(from + 4 * i);
            }
        }
        float(*mine)[8] = parts[turn][warp];
        if (g < TOKENS) *(float2 *)&mine[g][2 * t] = make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
        if (g + 8 < TOKENS) *(float2 *)&mine[g + 8][2 * t] = make_float2(sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * TOKENS; i += 32 * WARPS) {
            const int token = i / 8, row = 8 * item + i % 8;
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all += parts[turn][w][token][i % 8];
            if (row < p.ends[2]) p.output[(u64)token * p.ends[2] + row] = to_model(all);
        }
    }
}
