// What packing and unpacking share: a token's channels in lanes, the rotation, and the way of codes between a token's
// lanes, the lanes that own them in a record, and a record's words.
//
// A warp takes a unit of 64 tokens, LANES lanes a token with OWN neighbouring channels each, so that most of a
// Walsh-Hadamard transform happens inside a lane. Sums over a token go pairwise from neighbours up, as reference.py does
// them. Codes wait as bytes in shared memory, ordered by the lane that will own them, until the unit is whole.
//
// The host defines, in front of warp.cuh: HEAD_DIM, KIND, ENTRIES (0 without a table), ORDER_KEYS (1 keys, 0 values),
// DTYPE (0 fp32, 1 fp16, 2 bf16), MEAN (1 if there is a mean), WARPS (of a block).

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK = D & -D;                             // of the rotation
constexpr bool IN_LANES = D % 64 == 0;
constexpr int LANES = IN_LANES ? 4 : D <= 128 ? 8 : 16;  // of a token
constexpr int OWN = IN_LANES ? D / 4 : 16;               // channels of a lane
constexpr int STEP = 32 / LANES, UNIT = 64;              // tokens of a warp at once, and of its unit
constexpr int BITS = bits_of(KIND), DIM = dim_of(KIND);
constexpr int CODES = D / DIM, MINE = OWN / DIM;         // codes of a token and of a lane
constexpr int WORDS = TILE * CODES * BITS / 32, RECORD = WORDS + TILE / 2;
constexpr int BLOCK_WORDS = BITS == 7 ? 7 : BITS == 6 ? 3 : 1, BLOCK_BYTES = BLOCK_WORDS * 32 / BITS;  // one byte a code
constexpr int STAGE = UNIT * CODES;                      // bytes of a unit's codes
constexpr float TINY = 1.17549435e-38f, BF16_MAX = 3.38953139e38f;
constexpr double EXACT_FACTOR = BLOCK == 8 ? 0.35355339059327373 : BLOCK == 16 ? 0.25 : BLOCK == 32 ? 0.17677669529663687
                       : BLOCK == 64 ? 0.125 : BLOCK == 128 ? 0.08838834764831845 : 0.0625;
constexpr float FACTOR = (float)EXACT_FACTOR;
constexpr int RAW = OWN * (DTYPE == 0 ? 4 : 2) / 16;     // 16-byte loads of a lane
static_assert(OWN % 16 == 0 && (!IN_LANES || BLOCK == D), "the rotation's blocks must divide among lanes");

extern __shared__ __align__(16) u8 shared[];

DEVICE u16 to_bf16(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
DEVICE u16 round_up_bf16(float scale) {  // the nearest bf16 that is not below
    const u16 bits = to_bf16(fminf(scale, BF16_MAX));
    return from_bf16(bits) < scale && bits < 0x7f7f ? bits + 1 : bits;
}

// Sum of squares of neighbours, pairwise.
template <int LOW, int COUNT> DEVICE float squares_of(const float (&x)[OWN], float shift) {
    if constexpr (COUNT == 1) {
        const float y = __fmul_rn(x[LOW], shift);
        return __fmul_rn(y, y);
    } else {
        return __fadd_rn(squares_of<LOW, COUNT / 2>(x, shift), squares_of<LOW + COUNT / 2, COUNT / 2>(x, shift));
    }
}
template <int LOW, int COUNT> DEVICE float squares_of(const float (&x)[OWN]) {
    if constexpr (COUNT == 1) return __fmul_rn(x[LOW], x[LOW]);
    else return __fadd_rn(squares_of<LOW, COUNT / 2>(x), squares_of<LOW + COUNT / 2, COUNT / 2>(x));
}
// Of a token, from its lanes: pairwise inside a block of the rotation, then block after block.
DEVICE float sum_of_token(float sum, int lane) {
#pragma unroll
    for (int bit = 1; bit < LANES && bit * OWN < BLOCK; bit <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, bit));
    if constexpr (BLOCK == D) return sum;
    constexpr int OF_BLOCK = BLOCK / OWN;
    const int first = lane & -LANES;
    float total = __shfl_sync(FULL, sum, first);
#pragma unroll
    for (int block = 1; block < D / BLOCK; ++block) total = __fadd_rn(total, __shfl_sync(FULL, sum, first + block * OF_BLOCK));
    return total;
}
DEVICE float largest_of_token(const float (&x)[OWN]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int bit = 1; bit < LANES; bit <<= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bit));
    return largest;
}
DEVICE u32 count_of_token(u32 sum) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit <<= 1) sum += __shfl_xor_sync(FULL, sum, bit);
    return sum;
}

// Walsh-Hadamard transform of the blocks, without its factor.
DEVICE void transform(float (&x)[OWN], int lane) {
#pragma unroll
    for (int bit = 1; bit < OWN && bit < BLOCK; bit <<= 1)
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (!(i & bit)) {
                const float a = x[i], b = x[i | bit];
                x[i] = a + b;
                x[i | bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit * OWN < BLOCK; bit <<= 1) {
        const float sign = lane & bit ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(FULL, x[i], bit));
    }
}

struct Lane {
    int lane, part;          // place in the warp, part of the token
    bool active;             // the part has channels
    const float *signs;      // of the rotation, at the part
    u32 flips[RAW * 4];       // sign bits of the rotation, as they lie in loaded words
#if MEAN
    float mean[OWN];         // times the signs
#endif
};

// What a lane knows of itself, but for the mean.
DEVICE Lane lane_of(const float *signs) {
    Lane own;
    own.lane = threadIdx.x & 31;
    own.part = own.lane % LANES;
    own.active = IN_LANES || own.part * OWN < D;
    own.signs = signs + (own.active ? own.part * OWN : 0);
#pragma unroll
    for (int i = 0; i < RAW * 4; ++i) {
#if DTYPE == 0
        own.flips[i] = own.signs[i] < 0.0f ? 0x80000000u : 0u;
#else
        own.flips[i] = (own.signs[2 * i] < 0.0f ? 0x8000u : 0u) | (own.signs[2 * i + 1] < 0.0f ? 0x80000000u : 0u);
#endif
    }
    return own;
}
#if MEAN
DEVICE void take_mean(Lane &own, const float *mean) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) own.mean[i] = own.active ? mean[own.part * OWN + i] * own.signs[i] : 0.0f;
}
#endif

// Of a token whose first channel lies at `at`.
DEVICE void load(uint4 (&raw)[RAW], const void *states, u64 at, const Lane &own) {
    const u64 byte = (at + own.part * OWN) * (DTYPE == 0 ? 4 : 2);
    const uint4 *from = reinterpret_cast<const uint4 *>(reinterpret_cast<const u8 *>(states) + byte);
#pragma unroll
    for (int i = 0; i < RAW; ++i) raw[i] = own.active ? __ldg(from + i) : make_uint4(0, 0, 0, 0);
}

// Centred and rotated.
DEVICE void rotate(float (&x)[OWN], const uint4 (&raw)[RAW], const Lane &own) {
#pragma unroll
    for (int i = 0; i < RAW; ++i) {
        const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 word = words[j] ^ own.flips[4 * i + j];
#if DTYPE == 0
            x[4 * i + j] = __uint_as_float(word);
#elif DTYPE == 1
            x[8 * i + 2 * j] = from_half(word & 0xffff);
            x[8 * i + 2 * j + 1] = from_half(word >> 16);
#else
            x[8 * i + 2 * j] = __uint_as_float(word << 16);
            x[8 * i + 2 * j + 1] = __uint_as_float(word & 0xffff0000u);
#endif
        }
    }
#if MEAN
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = x[i] - own.mean[i];
#endif
    transform(x, own.lane);
}

// Root mean square of a token, before FACTOR, and what makes its values whole steps of 1/32 root mean square.
DEVICE float root_mean_square(float (&x)[OWN], float &steps, int lane) {
    float squares = sum_of_token(squares_of<0, OWN>(x), lane), shift = 1.0f;
    if (!(squares > 0x1p-60f && squares < 0x1p100f)) {  // squares that vanish or overflow: by a power of two
        const u32 exponent = min(__float_as_uint(largest_of_token(x)) >> 23, 253u);
        shift = __uint_as_float((254u - exponent) << 23);
    }
    if (__any_sync(FULL, shift != 1.0f)) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], shift);
        squares = sum_of_token(squares_of<0, OWN>(x), lane);
    }
    const float root = __fsqrt_rn(__fmul_rn(squares, (float)(1.0 / D)));
    steps = __fmul_rn(__fdiv_rn(1.0f, fmaxf(root, TINY)), 32.0f);
    return __fdiv_rn(root, shift);
}

// Where codes wait: [4 bytes of a stream][lane that owns it] in lanes, else token after token.
DEVICE void put(u8 *stage, const u32 (&codes)[MINE / 4], int token, const Lane &own) {
    u32 *words = reinterpret_cast<u32 *>(stage);
    if constexpr (!IN_LANES) {
        if (!own.active) return;
#pragma unroll
        for (int i = 0; i < MINE / 4; ++i) words[(token * CODES + own.part * MINE) / 4 + i] = codes[i];
    } else if constexpr (ORDER_KEYS) {
#pragma unroll
        for (int i = 0; i < MINE / 4; ++i) words[((token >> 3) * (MINE / 4) + i) * 32 + own.lane] = codes[i];
    } else {
        constexpr int PIECE = MINE / 2;  // codes of an eighth of the channels; a part is two of them
        const int owner = 8 * own.part + (token & 3), first = (token >> 2) * PIECE;
        if constexpr (PIECE >= 4) {
#pragma unroll
            for (int i = 0; i < MINE / 4; ++i)
                words[(first / 4 + i % (PIECE / 4)) * 32 + owner + i / (PIECE / 4) * 4] = codes[i];
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<u16 *>(stage + (first / 4 * 32 + owner + 4 * i) * 4 + first % 4) = codes[0] >> (16 * i);
        }
    }
}

// One byte a code -> words (bitpack.py): whole codes from the low bits up, on top pieces of those that follow.
DEVICE void squeeze(u32 (&words)[BLOCK_WORDS], const u32 (&bytes)[BLOCK_BYTES / 4]) {
    if constexpr (BITS == 8) {
        words[0] = bytes[0];
    } else if constexpr (BITS == 7) {
        u32 dense[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 pairs = (bytes[i] & 0x007f007fu) | (bytes[i] & 0x7f007f00u) >> 1;
            dense[i] = (pairs & 0x3fffu) | (pairs >> 2 & 0x0fffc000u);
        }
#pragma unroll
        for (int i = 0; i < 7; ++i) words[i] = dense[i] | dense[7] >> (4 * i) << 28;
    } else {
        u32 dense[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 pairs = (bytes[i] & 0x003f003fu) | (bytes[i] & 0x3f003f00u) >> 2;
            dense[i] = (pairs & 0xfffu) | (pairs >> 4 & 0xfff000u);
        }
        const u32 last = dense[3] >> 18;
        words[0] = dense[0] | (dense[1] & 0x3fu) << 24 | last << 30;
        words[1] = dense[1] >> 6 | (dense[2] & 0xfffu) << 18 | last >> 2 << 30;
        words[2] = dense[2] >> 12 | (dense[3] & 0x3ffffu) << 12 | last >> 4 << 30;
    }
}

// A unit's words, by one of `team` warps.
DEVICE void write(u32 *record, const u8 *stage, int lane, int member, int team) {
    const u32 *bytes = reinterpret_cast<const u32 *>(stage);
    if constexpr (IN_LANES) {
        constexpr int STREAM = WORDS / 64;  // words of a lane
        constexpr int VECTOR = STREAM % 4 == 0 ? 4 : STREAM % 2 == 0 ? 2 : 1;
        constexpr int BLOCKS = VECTOR == 1 || BLOCK_WORDS % VECTOR == 0 ? 1 : BLOCK_WORDS % 2 == 0 && VECTOR == 4 ? 2 : VECTOR;
        constexpr int GROUP = BLOCKS * BLOCK_WORDS;  // whole blocks and whole vectors
        for (int low = member * GROUP; low < STREAM; low += team * GROUP) {
            u32 words[GROUP];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                u32 some[BLOCK_BYTES / 4], squeezed[BLOCK_WORDS];
#pragma unroll
                for (int i = 0; i < BLOCK_BYTES / 4; ++i)
                    some[i] = bytes[((low / BLOCK_WORDS + block) * (BLOCK_BYTES / 4) + i) * 32 + lane];
                squeeze(squeezed, some);
#pragma unroll
                for (int i = 0; i < BLOCK_WORDS; ++i) words[block * BLOCK_WORDS + i] = squeezed[i];
            }
#pragma unroll
            for (int i = 0; i < GROUP; i += VECTOR) {
                u32 *to = record + ((low + i) / VECTOR * 32 + lane) * VECTOR;
                if constexpr (VECTOR == 4) *reinterpret_cast<uint4 *>(to) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
                else if constexpr (VECTOR == 2) *reinterpret_cast<uint2 *>(to) = make_uint2(words[i], words[i + 1]);
                else *to = words[i];
            }
        }
    } else {
        for (int block = 32 * member + lane; block < STAGE / BLOCK_BYTES; block += 32 * team) {
            u32 some[BLOCK_BYTES / 4], squeezed[BLOCK_WORDS];
#pragma unroll
            for (int i = 0; i < BLOCK_BYTES / 4; ++i) some[i] = bytes[block * (BLOCK_BYTES / 4) + i];
            squeeze(squeezed, some);
#pragma unroll
            for (int i = 0; i < BLOCK_WORDS; ++i) record[block * BLOCK_WORDS + i] = squeezed[i];
        }
    }
}

// Inverse of `put`.
DEVICE void get(u32 (&codes)[MINE / 4], const u8 *stage, int token, const Lane &own) {
    const u32 *words = reinterpret_cast<const u32 *>(stage);
    constexpr int PIECE = MINE / 2;
    const int owner = 8 * own.part + (token & 3), first = (token >> 2) * PIECE;
#pragma unroll
    for (int i = 0; i < MINE / 4; ++i) {
        if constexpr (!IN_LANES) codes[i] = own.active ? words[(token * CODES + own.part * MINE) / 4 + i] : 0;
        else if constexpr (ORDER_KEYS) codes[i] = words[((token >> 3) * (MINE / 4) + i) * 32 + own.lane];
        else if constexpr (PIECE >= 4) codes[i] = words[(first / 4 + i % (PIECE / 4 ? PIECE / 4 : 1)) * 32 + owner + i / (PIECE / 4 ? PIECE / 4 : 1) * 4];
        else {
            const u8 *at = stage + (first / 4 * 32 + owner) * 4 + first % 4;
            codes[0] = *reinterpret_cast<const u16 *>(at) | (u32)*reinterpret_cast<const u16 *>(at + 16) << 16;
        }
    }
}

// Inverse of `squeeze`.
DEVICE void spread(u32 (&bytes)[BLOCK_BYTES / 4], const u32 (&words)[BLOCK_WORDS]) {
    if constexpr (BITS == 8) {
        bytes[0] = words[0];
    } else if constexpr (BITS == 7) {
        u32 last = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < 7) last |= words[i < 7 ? i : 0] >> 28 << (4 * i);
            const u32 dense = i < 7 ? words[i < 7 ? i : 0] & 0x0fffffffu : last, pairs = (dense & 0x3fffu) | (dense & 0x0fffc000u) << 2;
            bytes[i] = (pairs & 0x007f007fu) | (pairs << 1 & 0x7f007f00u);
        }
    } else {
        const u32 last = words[0] >> 30 | words[1] >> 30 << 2 | words[2] >> 30 << 4;
        const u32 dense[4] = {words[0] & 0xffffffu, (words[0] >> 24 & 0x3fu) | (words[1] & 0x3ffffu) << 6,
                              (words[1] >> 18 & 0xfffu) | (words[2] & 0xfffu) << 12, (words[2] >> 12 & 0x3ffffu) | last << 18};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 pairs = (dense[i] & 0xfffu) | (dense[i] & 0xfff000u) << 4;
            bytes[i] = (pairs & 0x003f003fu) | (pairs << 2 & 0x3f003f00u);
        }
    }
}

// Inverse of `write`.
DEVICE void read(u8 *stage, const u32 *record, int lane) {
    u32 *bytes = reinterpret_cast<u32 *>(stage);
    constexpr int STREAM = WORDS / 64, VECTOR = STREAM % 4 == 0 ? 4 : STREAM % 2 == 0 ? 2 : 1;
    constexpr int BLOCKS = IN_LANES ? STREAM / BLOCK_WORDS : STAGE / BLOCK_BYTES;
    for (int block = IN_LANES ? 0 : lane; block < BLOCKS; block += IN_LANES ? 1 : 32) {
        u32 words[BLOCK_WORDS], some[BLOCK_BYTES / 4];
#pragma unroll
        for (int i = 0; i < BLOCK_WORDS; ++i) {
            const int word = block * BLOCK_WORDS + i;
            words[i] = record[IN_LANES ? (word / VECTOR * 32 + lane) * VECTOR + word % VECTOR : word];
        }
        spread(some, words);
#pragma unroll
        for (int i = 0; i < BLOCK_BYTES / 4; ++i)
            bytes[IN_LANES ? (block * (BLOCK_BYTES / 4) + i) * 32 + lane : block * (BLOCK_BYTES / 4) + i] = some[i];
    }
}
