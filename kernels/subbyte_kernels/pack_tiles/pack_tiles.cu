// Tiles -> records (formats.py, lanes.py): mean, rotation, scale, codes and their words in one pass over the states.
//
// One block packs one tile. A warp takes a token's D channels, D/32 neighbours a lane: the rotation is a Walsh-Hadamard
// transform inside the warp. For table codes, the warp then holds as many tokens as have 128 vectors, four vectors a
// lane, and walks the table once for all of them; every lane reads the same entry at the same time, which shared memory
// broadcasts. So the arithmetic of the search is what the kernel costs: (vector_dim + 3) instructions for each vector and
// entry. Codes and scales wait in shared memory until the whole tile is there, because a word of a record holds codes of
// several tokens.
//
// The host defines, in front of warp.cuh and this text: HEAD_DIM, KIND, ENTRIES (0 without a table), ORDER_KEYS (1 keys,
// 0 values), DTYPE (0 fp32, 1 fp16, 2 bf16).

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int OWN = D / 32;
constexpr int BITS = bits_of(KIND), DIM = dim_of(KIND);
constexpr int CODES = D / DIM;                       // of a token
constexpr int PITCH = CODES + 4;                     // bytes: tokens start in different banks
constexpr int WORDS = TILE * CODES * BITS / 32;      // of the tile's codes
constexpr int RECORD = WORDS + TILE / 2;
constexpr float TINY = 1.17549435e-38f;
constexpr float BF16_MAX = 3.38953139e38f;

struct Params {
    const void *states;   // [M, 128, D]
    const float *mean;    // [M, D] or null
    const float *signs;   // [D]
    const float *table;   // [ENTRIES, DIM]
    u32 *records;         // [M, RECORD]
};

__shared__ u8 codes[TILE * PITCH];
__shared__ u16 scales[TILE];
__shared__ __align__(16) float table[ENTRIES ? ENTRIES * DIM : 1];
__shared__ float half_norms[ENTRIES ? ENTRIES : 1];
__shared__ __align__(16) float units[ENTRIES ? WARPS * 128 * DIM : 1];

DEVICE float largest_of_warp(float x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, bit));
    return x;
}
DEVICE float sum_of_lanes(float x, int lanes) {
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1)
        if (bit < lanes) x += __shfl_xor_sync(FULL, x, bit);
    return x;
}
DEVICE u16 to_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEVICE float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
DEVICE u16 round_up_bf16(float scale) {  // the nearest bf16 that is not below
    const u16 bits = to_bf16(fminf(scale, BF16_MAX));
    return from_bf16(bits) < scale && bits < 0x7f7f ? bits + 1 : bits;
}

DEVICE void load(float (&x)[OWN], const void *states, u64 token, int lane) {
    const u64 at = token * D + lane * OWN;
#if DTYPE == 0
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = reinterpret_cast<const float *>(states)[at + i];
#else
    u32 words[OWN / 2];
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) words[i] = __ldg(reinterpret_cast<const u32 *>(reinterpret_cast<const u16 *>(states) + at) + i);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u16 bits = words[i / 2] >> (i % 2 * 16);
        x[i] = DTYPE == 2 ? from_bf16(bits) : from_half(bits);
    }
#endif
}

// Centred and rotated.
DEVICE void rotate(float (&x)[OWN], const float *mean, const float *signs, int lane) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = (x[i] - (mean ? mean[lane * OWN + i] : 0.0f)) * signs[lane * OWN + i];
    hadamard(x, lane);
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] *= INV_SQRT_D;
}

DEVICE float largest_magnitude(const float (&x)[OWN]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) largest = fmaxf(largest, fabsf(x[i]));
    return largest_of_warp(largest);
}

// Vector codes of the tokens that make 128 vectors.
DEVICE void vector_codes(const Params &p, const float *mean, u64 tile, int group, int warp, int lane) {
    constexpr int TOKENS = 128 / CODES, SEGMENT = CODES < 32 ? CODES : 32;
    float *unit = units + warp * 128 * DIM;
    float length[TOKENS];  // root mean square times the norm of the unit vector
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        float x[OWN], squares = 0.0f, norm = 0.0f;
        load(x, p.states, tile * TILE + group * TOKENS + k, lane);
        rotate(x, mean, p.signs, lane);
        const float largest = largest_magnitude(x), divisor = fmaxf(largest, TINY);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = __fdiv_rn(x[i], divisor);
            squares += x[i] * x[i];
        }
        const float rms = __fsqrt_rn(sum_of_lanes(squares, 32) / D);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = __fdiv_rn(x[i], fmaxf(rms, TINY));
            norm += x[i] * x[i];
            unit[k * D + lane * OWN + i] = x[i];
        }
        length[k] = largest * rms * __fsqrt_rn(sum_of_lanes(norm, 32));
    }
    __syncwarp();
    float v[4][DIM], best[4];
    int code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        best[i] = -3.0e38f;
        code[i] = 0;
#pragma unroll
        for (int d = 0; d < DIM; ++d) v[i][d] = unit[(i * 32 + lane) * DIM + d];
    }
#pragma unroll 4
    for (int entry = 0; entry < ENTRIES; ++entry) {
        float e[DIM];
#pragma unroll
        for (int d = 0; d < DIM; ++d) e[d] = table[entry * DIM + d];
        const float offset = half_norms[entry];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float score = offset;
#pragma unroll
            for (int d = 0; d < DIM; ++d) score = fmaf(v[i][d], e[d], score);
            if (score > best[i]) {
                best[i] = score;
                code[i] = entry;
            }
        }
    }
    float decoded[TOKENS] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int vector = i * 32 + lane;
        codes[(group * TOKENS + vector / CODES) * PITCH + vector % CODES] = code[i];
        if (CODES >= 32) decoded[i * 32 / CODES] -= 2.0f * half_norms[code[i]];
    }
    if (CODES >= 32) {
#pragma unroll
        for (int k = 0; k < TOKENS; ++k) {
            const float norm = __fsqrt_rn(sum_of_lanes(decoded[k], 32));
            if (lane == 0) scales[group * TOKENS + k] = to_bf16(fminf(__fdiv_rn(length[k], fmaxf(norm, TINY)), BF16_MAX));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float norm = __fsqrt_rn(sum_of_lanes(-2.0f * half_norms[code[i]], SEGMENT));
            const float mine = lane < SEGMENT ? length[2 * i] : length[2 * i + 1];
            if (lane % SEGMENT == 0)
                scales[group * TOKENS + 2 * i + lane / SEGMENT] = to_bf16(fminf(__fdiv_rn(mine, fmaxf(norm, TINY)), BF16_MAX));
        }
    }
    __syncwarp();
}

// FP6 or FP8 codes of one token.
DEVICE void float_codes(const Params &p, const float *mean, u64 tile, int token, int lane) {
    constexpr float MOST = KIND == FP6 ? 7.5f : 448.0f;
    float x[OWN];
    load(x, p.states, tile * TILE + token, lane);
    rotate(x, mean, p.signs, lane);
    const u16 bits = round_up_bf16(__fdiv_rn(largest_magnitude(x), MOST));
    const float divisor = fmaxf(from_bf16(bits), TINY);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float scaled = fminf(fmaxf(__fdiv_rn(x[i], divisor), -MOST), MOST), size = fabsf(scaled);
        if (KIND == FP6) {
            const int code = size < 2.0f ? (int)rintf(size * 8.0f) : size < 4.0f ? 8 + (int)rintf(size * 4.0f) : 16 + (int)rintf(size * 2.0f);
            codes[token * PITCH + lane * OWN + i] = code | (scaled < 0.0f) << 5;
        } else {
            u16 pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(scaled));
            codes[token * PITCH + lane * OWN + i] = pair & 0xff;
        }
    }
    if (lane == 0) scales[token] = bits;
}

// Code `place` of the stream of lane 4 g + t in a unit (lanes.py).
DEVICE u32 code_of(int unit, int lane, int place) {
    constexpr int EACH = ORDER_KEYS ? CODES / 4 : CODES / 8;  // codes of a token in a lane
    const int g = lane >> 2, t = lane & 3, owned = place / EACH, within = place % EACH;
    const int token = unit * 64 + (ORDER_KEYS ? 8 * owned + g : 4 * owned + t);
    return codes[token * PITCH + (ORDER_KEYS ? t : g) * EACH + within];
}

// Word of a lane's stream (bitpack.py): whole codes from the low bits up, and on top a piece of the codes that follow.
DEVICE u32 word_of(int unit, int lane, int word) {
    constexpr int EACH = 32 / BITS, SPARE = 32 - EACH * BITS;
    constexpr int BLOCK_WORDS = BITS == 7 ? 7 : BITS == 6 ? 3 : 1, BLOCK_CODES = BLOCK_WORDS * 32 / BITS;
    const int block = word / BLOCK_WORDS, within = word % BLOCK_WORDS, first = block * BLOCK_CODES;
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) packed |= code_of(unit, lane, first + within * EACH + i) << (i * BITS);
    if constexpr (SPARE != 0) {
        u32 spare = 0;
#pragma unroll
        for (int i = 0; i < BLOCK_CODES - BLOCK_WORDS * EACH; ++i)
            spare |= code_of(unit, lane, first + BLOCK_WORDS * EACH + i) << (i * BITS);
        packed |= spare >> (within * SPARE) << (32 - SPARE);
    }
    return packed;
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_tiles(const __grid_constant__ Params p) {
    constexpr int STREAM = WORDS / 64;  // words of a lane in a unit
    constexpr int VECTOR = STREAM % 4 == 0 ? 4 : STREAM % 2 == 0 ? 2 : 1;
    const u64 tile = blockIdx.x;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float *mean = p.mean ? p.mean + tile * D : nullptr;
    for (int entry = threadIdx.x; entry < ENTRIES; entry += THREADS) {
        float norm = 0.0f;
        for (int d = 0; d < DIM; ++d) {
            const float value = p.table[entry * DIM + d];
            table[entry * DIM + d] = value;
            norm += value * value;
        }
        half_norms[entry] = -0.5f * norm;
    }
    __syncthreads();
    if constexpr (DIM > 1) {
        for (int group = warp; group < CODES; group += WARPS) vector_codes(p, mean, tile, group, warp, lane);
    } else {
        for (int token = warp; token < TILE; token += WARPS) float_codes(p, mean, tile, token, lane);
    }
    __syncthreads();
    u32 *record = p.records + tile * RECORD;
    for (int i = threadIdx.x; i < WORDS; i += THREADS) {
        const int unit = i / (32 * STREAM), rest = i % (32 * STREAM);
        record[i] = word_of(unit, rest / VECTOR % 32, rest / (32 * VECTOR) * VECTOR + rest % VECTOR);
    }
    for (int i = threadIdx.x; i < TILE / 2; i += THREADS) {
        // scales [unit][g][i]: two neighbours are tokens 8 i + g and 8 (i + 1) + g
        const int token = i / 32 * 64 + i % 4 * 16 + i / 4 % 8;
        record[WORDS + i] = scales[token] | (u32)scales[token + 8] << 16;
    }
}
