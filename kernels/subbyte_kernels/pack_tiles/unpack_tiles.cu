// Records -> states: words, codes, table entries, scale, the rotation backwards, mean, in one pass over the records and in
// the reference's order. Definitions: tile.cuh; DTYPE is that of the states.

#include "tile.cuh"

struct Params {
    const u32 *records;     // [M, RECORD]
    const float *mean;      // [M, D] or null
    const float *signs;     // [D]
    const float *table;     // [ENTRIES, DIM]
    void *states;           // [M, 128, D]
    u64 units;              // 2 M
};

DEVICE float value_of(u32 code, int within) {
    if constexpr (DIM > 1) {
        return reinterpret_cast<const float *>(shared)[code * DIM + within];
    } else if constexpr (KIND == FP6) {
        return __uint_as_float(__float_as_uint(__uint_as_float((code & 31u) << 20) * 0x1p126f) | (code & 32u) << 26);
    } else {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)code));
        return from_half(halves & 0xffff);
    }
}

DEVICE void store(void *states, u64 at, const float (&x)[OWN]) {
    constexpr float MOST = DTYPE == 0 ? 3.40282347e38f : DTYPE == 1 ? 65504.0f : BF16_MAX;
    float y[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) y[i] = fminf(fmaxf(x[i], -MOST), MOST);
#if DTYPE == 0
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i)
        reinterpret_cast<float4 *>(reinterpret_cast<float *>(states) + at)[i] = make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
#else
#pragma unroll
    for (int i = 0; i < OWN / 8; ++i) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#if DTYPE == 1
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(y[8 * i + 2 * j + 1]), "f"(y[8 * i + 2 * j]));
#else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j]) : "f"(y[8 * i + 2 * j + 1]), "f"(y[8 * i + 2 * j]));
#endif
        }
        reinterpret_cast<uint4 *>(reinterpret_cast<u16 *>(states) + at)[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#endif
}

// Records -> states.
extern "C" __global__ void __launch_bounds__(THREADS, 1) unpack_tiles(const __grid_constant__ Params p) {
    const int warp = __shfl_sync(FULL, threadIdx.x >> 5, 0);
    u8 *stage = shared + ENTRIES * DIM * 4 + warp * STAGE;
    const Lane own = lane_of(p.signs);
    const int channel = own.active ? own.part * OWN : 0;
    for (int i = threadIdx.x; i < ENTRIES * DIM; i += THREADS) reinterpret_cast<float *>(shared)[i] = p.table[i];
    __syncthreads();
    for (u64 unit = (u64)blockIdx.x * WARPS + warp; unit < p.units; unit += (u64)gridDim.x * WARPS) {
        const u32 *record = p.records + unit / 2 * RECORD;
        read(stage, record + (unit & 1) * (WORDS / 2), own.lane);
        __syncwarp();
        const u16 *scales = reinterpret_cast<const u16 *>(record + WORDS + (unit & 1) * 32);
        for (int low = 0; low < UNIT; low += STEP) {
            const int token = low + own.lane / LANES;
            u32 codes[MINE / 4];
            get(codes, stage, token, own);
            const float scale = from_bf16(scales[IN_LANES ? token % 8 * 8 + token / 8 : token]);
            float x[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                x[i] = own.active ? __fmul_rn(value_of(codes[i / DIM / 4] >> (i / DIM % 4 * 8) & 255u, i % DIM), scale) : 0.0f;
            transform(x, own.lane);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                x[i] = __fmul_rn(__fmul_rn(x[i], FACTOR), p.signs[channel + i]);
#if MEAN
                x[i] = __fadd_rn(x[i], p.mean[unit / 2 * D + channel + i]);
#endif
            }
            if (own.active) store(p.states, (unit * UNIT + token) * D + own.part * OWN, x);
        }
        __syncwarp();
    }
}
