// Tiles -> records with codes chosen by what their errors cost under a metric M [D, D] of their head (shaped.py):
//
//   1. channel groups one after the other, each making up for the errors e of those before it: c minimizes
//      (c - u)' A (c - u) + 2 pull . c, where pull = sum over channels before of e times a feedback matrix;
//   2. every group once more with all others as they are: A is M's own block, pull the rest of M times e;
//   3. the scale keeps u' M u.
//
// Four lanes share a token (as in packing: each rotated a quarter of it) and a warp has 32 tokens, four a lane. For a
// strip of 16 channels, lane q first sums over every fourth channel c = 4 j + q what errors outside the strip pull at
// it: four values from shared memory and 16 of a matrix for 64 multiplications. Inside the strip, a changed error is
// added to what is still to come. Each of the four lanes then searches a quarter of the entries for all its tokens.
// So for each value of a token there are 2.5 D multiplications for pulls, and two searches.
//
// Sums are in fp32 in an order of their own: a code differs from the reference's where two entries cost the same to
// within rounding, and codes of the token's later groups may follow it.
//
// Definitions: tile.cuh; DIM 2 or 4, D in lanes.

#include "tile.cuh"

constexpr int STRIP = 16, STRIPS = D / STRIP, GROUPS = STRIP / DIM;  // channels of a strip, groups of a strip
constexpr int PITCH = D + 4;                                        // lanes of a warp meet different banks
constexpr int EACH = 4, TOKENS = EACH * STEP;                       // tokens of a lane, and of a warp
constexpr int TABLE_AT = 0, CODES_AT = ENTRIES * DIM * 4, STATES_AT = CODES_AT + UNIT * CODES;
constexpr int STAGE_AT = STATES_AT + UNIT * PITCH * 4, SCALES_AT = STAGE_AT + STAGE;
static_assert(DIM > 1 && IN_LANES && WARPS == UNIT / TOKENS, "a block packs a unit of vector codes");

struct Params {
    const void *states;      // [M, 128, D], or wherever places say
    const u64 *places;       // [M] where tiles begin, or null
    const float *mean;       // [M, D] or null
    const float *signs;      // [D]
    const float *table;      // [ENTRIES, DIM]
    const long long *heads;  // [M]
    const float *feedback;   // [H, STRIPS, D, STRIP]: row c, column of the strip; zero but for c before the column's group
    const float *others;     // likewise: M without the blocks of groups
    const float *metric;     // likewise: M
    const float *blocks;     // [H, 2, CODES, DIM, DIM]: A of both searches
    const float *halves;     // [H, 2, CODES, ENTRIES]: half of e' A e
    u32 *records;            // [M, RECORD]
};

struct Token {
    float *x;   // its row of states: u where no code is chosen yet, else the error of the code
    u8 *codes;
};

// pulls[k][i] += sum over c = 4 j + part, low <= j < high, of x_k[c] matrix[c][i].
DEVICE void gather(float (&pulls)[EACH][STRIP], const Token (&token)[EACH], const float *matrix, int low, int high, int part) {
#pragma unroll 2
    for (int j = low; j < high; ++j) {
        const int c = 4 * j + part;
        float x[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) x[k] = token[k].x[c];
        const float4 *row = reinterpret_cast<const float4 *>(matrix + c * STRIP);
#pragma unroll
        for (int i = 0; i < STRIP / 4; ++i) {
            const float4 m = __ldg(row + i);
            const float values[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int k = 0; k < EACH; ++k) pulls[k][4 * i + n] = fmaf(x[k], values[n], pulls[k][4 * i + n]);
        }
    }
}

DEVICE float over_lanes(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

// The entry with the largest v . e - half, the first of equals, of all four lanes.
DEVICE void search(int (&code)[EACH], const float (&v)[EACH][DIM], const float *halves, int part) {
    float best[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) best[k] = -3.0e38f, code[k] = 0;
    const float *table = reinterpret_cast<const float *>(shared + TABLE_AT);
#pragma unroll 2
    for (int low = 0; low < ENTRIES; low += 16) {
        const int first = low + 4 * part;
        const float4 four = __ldg(reinterpret_cast<const float4 *>(halves + first));
        const float half[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float e[DIM];
#pragma unroll
            for (int d = 0; d < DIM; ++d) e[d] = table[(first + i) * DIM + d];
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                float score = -half[i];
#pragma unroll
                for (int d = 0; d < DIM; ++d) score = fmaf(v[k][d], e[d], score);
                if (score > best[k]) {
                    best[k] = score;
                    code[k] = first + i;
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k)
#pragma unroll
        for (int bit = 1; bit < 4; bit <<= 1) {
            const float other = __shfl_xor_sync(FULL, best[k], bit);
            const int entry = __shfl_xor_sync(FULL, code[k], bit);
            if (other > best[k] || (other == best[k] && entry < code[k])) {
                best[k] = other;
                code[k] = entry;
            }
        }
}

// One sweep over a token's groups: the first (AGAIN = false) or the second.
template <bool AGAIN>
DEVICE void sweep(const Token (&token)[EACH], const float *matrix, const float *blocks, const float *halves, int part) {
    const float *table = reinterpret_cast<const float *>(shared + TABLE_AT);
    for (int strip = 0; strip < STRIPS; ++strip) {
        const float *rows = matrix + strip * D * STRIP;
        float pulls[EACH][STRIP] = {};
        gather(pulls, token, rows, 0, AGAIN ? D / 4 : strip * STRIP / 4, part);
#pragma unroll
        for (int local = 0; local < GROUPS; ++local) {
            const int group = strip * GROUPS + local, low = strip * STRIP + local * DIM;
            float v[EACH][DIM], u[EACH][DIM], before[EACH][DIM];
            int code[EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
#pragma unroll
                for (int d = 0; d < DIM; ++d) {
                    before[k][d] = AGAIN ? token[k].x[low + d] : 0.0f;
                    u[k][d] = AGAIN ? table[token[k].codes[group] * DIM + d] - before[k][d] : token[k].x[low + d];
                    v[k][d] = -over_lanes(pulls[k][local * DIM + d]);
                }
#pragma unroll
                for (int d = 0; d < DIM; ++d)
#pragma unroll
                    for (int c = 0; c < DIM; ++c) v[k][d] = fmaf(u[k][c], __ldg(blocks + (group * DIM + c) * DIM + d), v[k][d]);
            }
            search(code, v, halves + group * ENTRIES, part);
            const int mine = DIM == 4 ? part : part & 1;  // channel of the group that this lane passes on
            float change[EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                float after = 0.0f, was = 0.0f;
#pragma unroll
                for (int d = 0; d < DIM; ++d)
                    if (d == mine) {
                        after = table[code[k] * DIM + d] - u[k][d];
                        was = before[k][d];
                    }
                change[k] = part < DIM ? after - was : 0.0f;
                __syncwarp();
                if (part < DIM) token[k].x[low + mine] = after;
                if (part == 0) token[k].codes[group] = code[k];
            }
            __syncwarp();
            const float *row = rows + (low + mine) * STRIP;
#pragma unroll
            for (int i = (local + 1) * DIM; i < STRIP; ++i) {
                const float m = __ldg(row + i);
#pragma unroll
                for (int k = 0; k < EACH; ++k) pulls[k][i] = fmaf(change[k], m, pulls[k][i]);
            }
        }
    }
}

// x' M x of a lane's tokens.
DEVICE void lengths(float (&sum)[EACH], const Token (&token)[EACH], const float *matrix, int part) {
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum[k] = 0.0f;
    for (int strip = 0; strip < STRIPS; ++strip) {
        float pulls[EACH][STRIP] = {};
        const float *rows = matrix + strip * D * STRIP;
        gather(pulls, token, rows, 0, strip * STRIP / 4, part);  // M is symmetric: half of it twice
#pragma unroll
        for (int i = 0; i < STRIP; ++i)
#pragma unroll
            for (int k = 0; k < EACH; ++k) pulls[k][i] *= 2.0f;
        gather(pulls, token, rows, strip * STRIP / 4, (strip + 1) * STRIP / 4, part);
#pragma unroll
        for (int i = 0; i < STRIP; ++i)
#pragma unroll
            for (int k = 0; k < EACH; ++k) sum[k] = fmaf(pulls[k][i], token[k].x[strip * STRIP + i], sum[k]);
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum[k] = over_lanes(sum[k]);
}

extern "C" __global__ void __launch_bounds__(THREADS) shape_tiles(const __grid_constant__ Params p) {
    const u64 unit = blockIdx.x, tile = unit / 2;
    const int warp = __shfl_sync(FULL, threadIdx.x >> 5, 0);
    const float *table = reinterpret_cast<const float *>(shared + TABLE_AT);
    u16 *scales = reinterpret_cast<u16 *>(shared + SCALES_AT);
    for (int i = threadIdx.x; i < ENTRIES * DIM; i += THREADS) reinterpret_cast<float *>(shared + TABLE_AT)[i] = p.table[i];
    __syncthreads();
    const u64 head = p.heads[tile], start = (p.places ? p.places[tile] : tile * TILE * D) + (unit & 1) * UNIT * D;
    Token token[EACH];
    float root[EACH];
    int place[EACH], part;
    {
        Lane own = lane_of(p.signs);
#if MEAN
        take_mean(own, p.mean + tile * D);
#endif
        part = own.part;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            place[k] = warp * TOKENS + k * STEP + own.lane / LANES;
            token[k].x = reinterpret_cast<float *>(shared + STATES_AT) + place[k] * PITCH;
            token[k].codes = shared + CODES_AT + place[k] * CODES;
            uint4 raw[RAW];
            load(raw, p.states, start + place[k] * D, own);
            float x[OWN], steps;
            rotate(x, raw, own);
            root[k] = __fmul_rn(root_mean_square(x, steps, own.lane), FACTOR);
#pragma unroll
            for (int i = 0; i < OWN; ++i) token[k].x[part * OWN + i] = __fmul_rn(x[i], steps * 0.03125f);
        }
    }
    __syncwarp();
    const float *metric = p.metric + head * D * D, *blocks = p.blocks + head * 2 * CODES * DIM * DIM;
    const float *halves = p.halves + head * 2 * CODES * ENTRIES;
    float given[EACH], found[EACH];
    lengths(given, token, metric, part);
    sweep<false>(token, p.feedback + head * D * D, blocks, halves, part);
    sweep<true>(token, p.others + head * D * D, blocks + CODES * DIM * DIM, halves + CODES * ENTRIES, part);
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        for (int i = part; i < D; i += 4) token[k].x[i] = table[token[k].codes[i / DIM] * DIM + i % DIM];
    __syncwarp();
    lengths(found, token, metric, part);
    Lane own;
    own.lane = threadIdx.x & 31, own.part = part, own.active = true;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        u32 codes[MINE / 4];
#pragma unroll
        for (int i = 0; i < MINE / 4; ++i) codes[i] = reinterpret_cast<const u32 *>(token[k].codes + part * MINE)[i];
        put(shared + STAGE_AT, codes, place[k], own);
        if (part == 0)
            scales[place[k] % 8 * 8 + place[k] / 8] =
                to_bf16(fminf(root[k] * __fsqrt_rn(given[k] / fmaxf(found[k], TINY)), BF16_MAX));
    }
    __syncthreads();
    if (warp == 0) {
        u32 *record = p.records + tile * RECORD;
        write(record + (unit & 1) * (WORDS / 2), shared + STAGE_AT, own.lane, 0, 1);
        record[WORDS + (unit & 1) * 32 + own.lane] = reinterpret_cast<const u32 *>(scales)[own.lane];
    }
}
