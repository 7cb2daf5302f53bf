// Tiles -> records (formats.py, lanes.py): mean, rotation, scale, codes and their words in one pass over the states.
//
// Every operation is the reference's, in its order; nothing is fused that rounds twice there. Vector codes are searched
// for on a lattice of 1/32, where scores are whole numbers and come out the same in any order (reference.py):
//
//   2-D  the lattice has 255 x 255 points: `pack_lookup` finds the nearest entry of each, packing reads it from shared
//        memory, one byte load for two values.
//   4-D  tensor cores compute scores as rows of vectors times columns of entries (m16n8k8 in fp16, whole numbers below
//        2^11, sums exact in fp32). The eighth bits below the point hold the entry's number, so that a maximum of three
//        is one instruction for two entries and finds number and score at once; ties go to the lower number.
//
// A unit belongs to one warp, or, where there are few, to a block whose warps divide its tokens.
//
// Definitions: tile.cuh; TEAM, the warps of a unit: 1 or WARPS.

#include "tile.cuh"

constexpr int ROWS = DIM == 4 ? 32 * MINE * 16 : 0;      // bytes of the tensor cores' operand
constexpr int LOOKUP = DIM == 2 ? 65536 : 0;
constexpr int SCORING = DIM == 4 ? ENTRIES * 16 : 0;

struct Params {
    const void *states;     // [M, 128, D], or wherever places say
    const u64 *places;      // [M] where tiles begin, or null
    const float *mean;      // [M, D] or null
    const float *signs;     // [D]
    const float *table;     // [ENTRIES, DIM]
    const u8 *lookup;       // [256, 256]: second coordinate, first one
    u32 *records;           // [M, RECORD]
    u64 units;              // 2 M
};

// lookup | scoring | norms of entries | of each unit in work: stage, scales, rows of each warp
constexpr int NORMS_AT = LOOKUP + SCORING, TEAMS_AT = NORMS_AT + 4 * ENTRIES, OF_TEAM = STAGE + TEAM * ROWS + 2 * UNIT;
constexpr int TEAMS = WARPS / TEAM;
static_assert(TEAM == 1 || TEAM == WARPS, "a unit belongs to a warp or to a block");

// Two values as fp16, limited to +-127 steps.
DEVICE u32 limited(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("min.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x57f057f0u));  // 127
    asm("max.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0xd7f0d7f0u));
    return pair;
}
DEVICE u32 plus(u32 pair, u32 other) { asm("add.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(other)); return pair; }

// 2-D codes, four to a word.
DEVICE void look_up(u32 (&codes)[MINE / 4], const float (&x)[OWN], float steps) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        // 1152 + n: whole numbers, n + 128 in the low byte
        const u32 pair = plus(limited(__fmul_rn(x[2 * i], steps), __fmul_rn(x[2 * i + 1], steps)), 0x64806480u);
        const u32 code = shared[__byte_perm(pair, 0, 0x4420)];
        codes[i / 4] = i % 4 ? codes[i / 4] | code << (i % 4 * 8) : code;
    }
}

DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

// 4-D codes, four to a word. Vector j of a lane is row 32 j + lane: its steps, then twice 1 for the entry's offset.
DEVICE void score(u32 (&codes)[MINE / 4], const float (&x)[OWN], float steps, u8 *rows, int lane) {
    constexpr int TOGETHER = MINE < 4 ? MINE : 4;
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        u32 half[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)  // 1536 + n - 1536: whole numbers
            half[h] = plus(plus(limited(__fmul_rn(x[4 * j + 2 * h], steps), __fmul_rn(x[4 * j + 2 * h + 1], steps)), 0x66006600u), 0xe600e600u);
        *reinterpret_cast<uint4 *>(rows + (32 * j + lane) * 16) = make_uint4(half[0], half[1], 0x3c003c00u, 0);
    }
    __syncwarp();
    const u32 *entries = reinterpret_cast<const u32 *>(shared + LOOKUP);
#pragma unroll
    for (int low = 0; low < MINE; low += TOGETHER) {
        u32 a[TOGETHER][4];
        int best[TOGETHER][8];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const u32 at = (u32)__cvta_generic_to_shared(rows + (32 * (low + j) + lane) * 16);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a[j][0]), "=r"(a[j][1]), "=r"(a[j][2]), "=r"(a[j][3]) : "r"(at));
#pragma unroll
            for (int i = 0; i < 8; ++i) best[j][i] = 0;
        }
#pragma unroll 2
        for (int n = 0; n < ENTRIES / 8; n += 2) {
            const u32 b[2] = {entries[n * 32 + lane], entries[n * 32 + 32 + lane]};
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    float c[2][4];
                    multiply(c[0], a[j][2 * m], a[j][2 * m + 1], b[0]);
                    multiply(c[1], a[j][2 * m], a[j][2 * m + 1], b[1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i)  // scores of winners are positive, and order like whole numbers
                        best[j][4 * m + i] = __vimax3_s32(best[j][4 * m + i], __float_as_int(c[0][i]), __float_as_int(c[1][i]));
                }
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            // lane 4 g + t has columns 2 t, 2 t + 1 of rows g + 8 c; the best of a row goes to the lane of its number
            int row[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) row[c] = max(best[j][2 * c], best[j][2 * c + 1]);
            const bool odd = lane & 1, high = lane & 2;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int kept = odd ? row[2 + c] : row[c], sent = odd ? row[c] : row[2 + c];
                row[c] = max(kept, __shfl_xor_sync(FULL, sent, 1));
            }
            const int kept = high ? row[1] : row[0], sent = high ? row[0] : row[1];
            const int whole = max(kept, __shfl_xor_sync(FULL, sent, 2));
            const int c = lane >> 3;  // = 2 * odd + high of the lane that has it
            const float found = __int_as_float(__shfl_sync(FULL, whole, (lane & 7) * 4 + (c >> 1) + 2 * (c & 1)));
            const u32 code = 255u - ((u32)(found * 256.0f) & 255u);  // the eight bits behind the point
            codes[(low + j) / 4] = (low + j) % 4 ? codes[(low + j) / 4] | code << ((low + j) % 4 * 8) : code;
        }
    }
    __syncwarp();
}

// Codes of a lane's part of a token, four to a word, and the token's scale.
DEVICE u16 encode(u32 (&codes)[MINE / 4], float (&x)[OWN], u8 *rows, const Lane &own) {
    if constexpr (DIM > 1) {
        float steps;
        const float root = __fmul_rn(root_mean_square(x, steps, own.lane), FACTOR);
        if constexpr (DIM == 2) look_up(codes, x, steps);
        else score(codes, x, steps, rows, own.lane);
        const u32 *norms = reinterpret_cast<const u32 *>(shared + NORMS_AT);
        u32 norm = 0;
#pragma unroll
        for (int i = 0; i < MINE; ++i) norm += norms[codes[i / 4] >> (i % 4 * 8) & 255u];
        norm = count_of_token(own.active ? norm : 0);
        const float decoded = __fsqrt_rn(__fmul_rn((float)norm, (float)(1.0 / (1024.0 * D))));
        return to_bf16(fminf(__fdiv_rn(root, fmaxf(decoded, TINY)), BF16_MAX));
    } else {
        constexpr double MOST = KIND == FP6 ? 7.5 : 448.0;
        const u16 bits = round_up_bf16(__fmul_rn(largest_of_token(x), (float)(EXACT_FACTOR / MOST)));
        const float inverse = __fdiv_rn(FACTOR, fmaxf(from_bf16(bits), TINY));
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const float scaled = __fmul_rn(x[i], inverse);
            u32 code;
            if constexpr (KIND == FP6) {
                // 2^20 of its power of two (1 below 2) added: what is left of the value is rounded once, to steps of E2M3
                const u32 exponent = max(__float_as_uint(scaled) & 0x7f800000u, 0x3f800000u);
                const float sum = __fmaf_rn(__uint_as_float(exponent), 0x1p20f, fabsf(scaled));
                code = (__float_as_uint(sum) + (exponent >> 20) + 8u & 31u) | (__float_as_uint(scaled) >> 26 & 32u);
            } else {
                u16 pair;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(scaled));
                code = pair & 0xff;
            }
            codes[i / 4] = i % 4 ? codes[i / 4] | code << (i % 4 * 8) : code;
        }
        return bits;
    }
}

// An entry in whole steps, and half its squared norm in units of a score (reference.py).
template <int STEPS, int MOST> DEVICE int entry_of(int (&e)[DIM > 1 ? DIM : 1], const float *table, int entry) {
    int squares = 0;
#pragma unroll
    for (int d = 0; d < DIM; ++d) {
        e[d] = (int)rintf(fminf(fmaxf(__fmul_rn(table[entry * DIM + d], (float)STEPS), -(float)MOST), (float)MOST));
        squares += e[d] * e[d];
    }
    return squares * 16 / STEPS;
}

DEVICE void prepare(const Params &p) {
    for (int entry = threadIdx.x; entry < ENTRIES; entry += THREADS) {
        float norm = 0.0f;
        for (int d = 0; d < DIM; ++d) norm = __fadd_rn(norm, __fmul_rn(p.table[entry * DIM + d], p.table[entry * DIM + d]));
        reinterpret_cast<u32 *>(shared + NORMS_AT)[entry] = (u32)rintf(__fmul_rn(norm, 1024.0f));
    }
    if constexpr (DIM == 2)
        for (int i = threadIdx.x; i < LOOKUP / 16; i += THREADS)
            reinterpret_cast<uint4 *>(shared)[i] = __ldg(reinterpret_cast<const uint4 *>(p.lookup) + i);
    if constexpr (DIM == 4)
        for (int entry = threadIdx.x; entry < ENTRIES; entry += THREADS) {
            int e[DIM > 1 ? DIM : 1];
            // 8192: winners' scores are positive. Multiples of 8 fit fp16 to 2^14; the rest is below 8 and has 8 bits more.
            const int offset = 8192 - min(entry_of<32, 127>(e, p.table, entry), 16383), most = offset & ~7;
            const float least = (float)(offset & 7) + (float)(255 - entry) * 0.00390625f;
            u32 *to = reinterpret_cast<u32 *>(shared + LOOKUP) + entry / 8 * 32 + entry % 8 * 4;
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to[0]) : "f"((float)e[1]), "f"((float)e[0]));
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to[1]) : "f"((float)e[DIM - 1]), "f"((float)e[DIM > 2 ? 2 : 0]));
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to[2]) : "f"(least), "f"((float)most));
            to[3] = 0;
        }
    __syncthreads();
}

DEVICE void join() {  // the warps that work on a unit
    if constexpr (TEAM == 1) __syncwarp();
    else __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pack_tiles(const __grid_constant__ Params p) {
    const int warp = __shfl_sync(FULL, threadIdx.x >> 5, 0);  // the compiler knows now that a warp shares it
    const int member = warp % TEAM;
    u8 *stage = shared + TEAMS_AT + warp / TEAM * OF_TEAM, *rows = stage + STAGE + 2 * UNIT + member * ROWS;
    u16 *scales = reinterpret_cast<u16 *>(stage + STAGE);
    Lane own = lane_of(p.signs);
    prepare(p);
    for (u64 unit = (u64)blockIdx.x * TEAMS + warp / TEAM; unit < p.units; unit += (u64)gridDim.x * TEAMS) {
#if MEAN
        take_mean(own, p.mean + unit / 2 * D);
#endif
        uint4 raw[RAW];
        const u64 start = (p.places ? p.places[unit / 2] : unit / 2 * TILE * D) + ((unit & 1) * UNIT + own.lane / LANES) * D;
        load(raw, p.states, start + member * STEP * D, own);
        for (int first = member * STEP; first < UNIT; first += TEAM * STEP) {
            const int token = first + own.lane / LANES;
            float x[OWN];
            rotate(x, raw, own);
            if (first + TEAM * STEP < UNIT) load(raw, p.states, start + (first + TEAM * STEP) * D, own);
            u32 codes[MINE / 4];
            const u16 scale = encode(codes, x, rows, own);
            put(stage, codes, token, own);
            if (own.part == 0) scales[IN_LANES ? token % 8 * 8 + token / 8 : token] = scale;
        }
        join();
        u32 *record = p.records + unit / 2 * RECORD;
        write(record + (unit & 1) * (WORDS / 2), stage, own.lane, member, TEAM);
        if (member == 0) record[WORDS + (unit & 1) * 32 + own.lane] = reinterpret_cast<const u32 *>(scales)[own.lane];
        join();
    }
}

// The nearest entry of every point of the lattice, [256, 256]: second coordinate, first one, each 128 too large.
struct LookupParams {
    const float *table;  // [ENTRIES, 2]
    u8 *lookup;          // [256, 256]
};
extern "C" __global__ void pack_lookup(const __grid_constant__ LookupParams p) {
    if constexpr (DIM == 2) {
        int4 *entries = reinterpret_cast<int4 *>(shared);
        for (int entry = threadIdx.x; entry < ENTRIES; entry += blockDim.x) {
            int e[DIM > 1 ? DIM : 1];
            const int half = entry_of<256, 2047>(e, p.table, entry);
            entries[entry] = make_int4(e[0], e[DIM - 1], half, 0);
        }
        __syncthreads();
        const int point = blockIdx.x * blockDim.x + threadIdx.x, x = (point & 255) - 128, y = (point >> 8) - 128;
        int best = -0x7fffffff, code = 0;
#pragma unroll 4
        for (int entry = 0; entry < ENTRIES; ++entry) {
            const int4 e = entries[entry];
            const int score = x * e.x + y * e.y - e.z;
            if (score > best) {
                best = score;
                code = entry;
            }
        }
        p.lookup[point] = code;
    }
}
