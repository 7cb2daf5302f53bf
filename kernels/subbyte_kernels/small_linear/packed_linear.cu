// Linear layers of a few tokens from int4 weights, in the byte layout of packed experts (expert_mlp/layout.py). The
// structure is that of small_linear.cu: tokens are the rows of tensor-core products and weights the columns, warps share
// an item by columns, first weights are asked for before the kernel waits.
//
// An item is ROW_BLOCKS blocks of 8 rows, a warp takes 256 columns (two blocks of 128) a pass. A lane loads 16 bytes of a
// block, 32 codes of one row, and the 16 bytes that scale the two rows whose sums it gets. A code joins the mantissa of
// 128 (1,024 in fp16); the constant and the 8 of the middle leave again because a group's accumulator starts with that
// many times minus the sum of the token's values, which is the same for all rows.
//
// The host defines: WIDTH (K, a multiple of 256), TOKENS (T, up to 16), WARPS (of a block, a divisor of WIDTH / 256),
// BLOCKS (of a multiprocessor, at least), ROW_BLOCKS, MODEL_BF16.

#include "linear.cuh"

constexpr int ROWS = 8 * ROW_BLOCKS;
constexpr int CODES = 512, BLOCK = CODES + 64;  // bytes of 8 rows x 128 columns, groups of 32
constexpr u64 ROW_OF_BLOCKS = WIDTH / 128 * BLOCK;
constexpr u32 CODE_BASE = MODEL_BF16 ? 0x43004300u : 0x64006400u;
constexpr float MIDDLE = (MODEL_BF16 ? 128 : 1024) + 8;
DEVICE u32 code_pair(u32 word, int i) { return ((word >> (4 * i)) & 0x000f000fu) | CODE_BASE; }

// Where a row of blocks begins; those behind the last are the last one. Matrices have multiples of 8 rows.
DEVICE const u8 *blocks_of(const Params &p, int row) {
    const Place place = place_of(p, min(row, p.ends[2] - 8));
    return place.matrix + (u64)(place.row / 8) * ROW_OF_BLOCKS;
}

DEVICE float sum_of(uint4 x) {
    return ((low(x.x) + high(x.x)) + (low(x.y) + high(x.y))) + ((low(x.z) + high(x.z)) + (low(x.w) + high(x.w)));
}

// A lane's part of a block: 32 codes of row g, and the scales of rows 2 t and 2 t + 1.
struct Weights {
    uint4 codes, scales;
    DEVICE void load(const u8 *block, int lane) {
        codes = load_weight(block + 16 * lane);
        scales = load_weight(block + CODES + 16 * (lane & 3));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) packed_linear(const __grid_constant__ Params p) {
    __shared__ float parts[WARPS][TOKENS][ROWS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int items = (p.ends[2] + ROWS - 1) / ROWS;
    const u8 *from[ROW_BLOCKS];
    Weights weights[ROW_BLOCKS][2];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
        from[r] = blocks_of(p, ROWS * blockIdx.x + 8 * r) + 2 * warp * BLOCK;
#pragma unroll
        for (int c = 0; c < 2; ++c) weights[r][c].load(from[r] + c * BLOCK, lane);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    uint4 states[HALVES][8];
    float offset[HALVES][8];
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        float sum[ROW_BLOCKS][4] = {};
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (PASSES > 1 || item == blockIdx.x)  // the same for all items, if a pass is all
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const int token = 8 * half + g, column = 32 * (WARPS * pass + warp) + 4 * i + t;
                        states[half][i] = load_state(p.hidden + token * (WIDTH / 8) + column, token < TOKENS);
                    }
            if (PASSES > 1 || item == blockIdx.x)
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float all = sum_of(states[half][i]);
                        all += __shfl_xor_sync(FULL, all, 1);
                        all += __shfl_xor_sync(FULL, all, 2);
                        offset[half][i] = -MIDDLE * all;
                    }
            const bool more = pass + 1 < PASSES || item + gridDim.x < items;
#pragma unroll
            for (int r = 0; r < ROW_BLOCKS; ++r) {
                from[r] = pass + 1 < PASSES ? from[r] + 2 * WARPS * BLOCK
                                            : blocks_of(p, ROWS * (item + gridDim.x) + 8 * r) + 2 * warp * BLOCK;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const uint4 codes = weights[r][c].codes, scales = weights[r][c].scales;
                    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
                    const u32 pairs[2][2] = {{scales.x, scales.y}, {scales.z, scales.w}};
                    if (more) weights[r][c].load(from[r] + c * BLOCK, lane);
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        const int i = 4 * c + q;
                        const uint4 x = states[0][i], y = HALVES > 1 ? states[HALVES - 1][i] : make_uint4(0, 0, 0, 0);
                        const float second = HALVES > 1 ? offset[HALVES - 1][i] : 0.0f;
                        float part[4] = {offset[0][i], offset[0][i], second, second};
                        mma_model(part, x.x, y.x, x.y, y.y, code_pair(words[q], 0), code_pair(words[q], 1));
                        mma_model(part, x.z, y.z, x.w, y.w, code_pair(words[q], 2), code_pair(words[q], 3));
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const u32 pair = pairs[j][q / 2];
                            const float scale = q % 2 ? __uint_as_float(pair & 0xffff0000u) : from_bf16(pair);
                            sum[r][j] += scale * part[j];
                            if (HALVES > 1) sum[r][2 + j] += scale * part[2 + j];
                        }
                    }
                }
            }
        }
        float(*mine)[ROWS] = parts[warp];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
            if (g < TOKENS) *(float2 *)&mine[g][8 * r + 2 * t] = make_float2(sum[r][0], sum[r][1]);
            if (g + 8 < TOKENS) *(float2 *)&mine[g + 8][8 * r + 2 * t] = make_float2(sum[r][2], sum[r][3]);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
            const int token = i / ROWS, row = ROWS * item + i % ROWS;
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all += parts[w][token][i % ROWS];
            if (row < p.ends[2]) p.output[(u64)token * p.ends[2] + row] = to_model(all);
        }
        __syncthreads();
    }
}
