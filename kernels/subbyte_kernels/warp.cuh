// What every CUDA kernel of this package starts with, behind the host's definitions: names, formats, and a token's D
// channels in a warp, D/32 neighbours a lane.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

enum Kind { VQ175, VQ2, VQ3, VQ4, FP6, FP8 };
constexpr int bits_of(Kind kind) { return kind == VQ175 ? 7 : kind == VQ3 || kind == FP6 ? 6 : 8; }
constexpr int dim_of(Kind kind) { return kind == VQ175 || kind == VQ2 ? 4 : kind == VQ3 || kind == VQ4 ? 2 : 1; }

constexpr u32 FULL = 0xffffffffu;

DEVICE float from_half(u16 bits) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits)); return y; }
DEVICE float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

#ifdef MODEL_BF16  // numbers of the model's dtype, two neighbours, and products

DEVICE float from_model(u16 bits) { return MODEL_BF16 ? from_bf16(bits) : from_half(bits); }
DEVICE u16 to_model(float x) {
    u16 bits;
    if (MODEL_BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

DEVICE float low(u32 pair) {
#if MODEL_BF16
    return from_bf16(pair);
#else
    return from_half(pair);
#endif
}
DEVICE float high(u32 pair) {
#if MODEL_BF16
    return __uint_as_float(pair & 0xffff0000u);
#else
    return from_half(pair >> 16);
#endif
}

DEVICE void mma_model(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (MODEL_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif

#ifdef HEAD_DIM  // of kernels over tokens of a head

constexpr int D = HEAD_DIM;
constexpr int TILE = 128;
constexpr float INV_SQRT_D = D == 128 ? 0.08838834764831845f : 0.125f;
#ifndef ANY_HEAD_DIM
static_assert(D == 128 || D == 64, "and other head dimensions have another kernel");
#endif

// Walsh-Hadamard transform, without its factor of 1 / sqrt(D).
DEVICE void hadamard(float (&x)[D / 32], int lane) {
    constexpr int OWN = D / 32;
#pragma unroll
    for (int bit = 1; bit < OWN; bit <<= 1)
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (!(i & bit)) {
                const float a = x[i], b = x[i | bit];
                x[i] = a + b;
                x[i | bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1)
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float other = __shfl_xor_sync(FULL, x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
}

#endif
