// A router for 1 to 16 tokens in one launch: logits, scores, groups, choice and weights; with the same states, a second
// router (the next layer's) whose choice is a prediction.
//
// Every block computes the logits of ROWS experts for all tokens: WARPS / ROWS warps share a row of the router's matrix,
// which they load before they wait for the kernel that makes the states. The block that finishes last reads all logits
// back and chooses, one warp a token. Sums are fp32; whatever the model rounds is rounded in the same place.
//
// The choice is by largest value; among equal ones by smallest expert, as torch.topk chooses on a GPU.
//
// The host defines, in front of warp.cuh and this text: HIDDEN, EXPERTS, TOP_K, NEXT_TOP_K (0 without prediction),
// MAX_TOKENS, ROWS, WARPS, STATES (dtype of states: 0 fp32, 1 fp16, 2 bf16), MATRIX (of the matrix and its bias), LOGITS
// (what logits are rounded to), LOGITS_OUT (of the logits that are returned), WEIGHTS (of the weights), SCORE (0 logits,
// 1 softmax, 2 sigmoid), GROUPS (1 without), GROUPS_KEPT, GROUP_SCORE (1 best, 2 sum of the two best), MASKED (what
// experts of other groups score), NORM (0 none, 1 by the sum, 2 by the sum and NORM_EPS, 3 by the sum but at least
// NORM_EPS, 4 softmax), NORM_EPS, SCALE, SORTED.

struct Problem {
    const u8* matrix;       // [EXPERTS, HIDDEN]
    const u8* matrix_bias;  // [EXPERTS] or null
    const float* correction;  // [EXPERTS] added to scores for the choice, or null
    float* sums;            // [T, EXPERTS], room
    u8* logits;             // [T, EXPERTS] or null
    u8* weights;            // [T, K] or null
    long long* index;       // [T, K]
    u32* arrived;           // zero between launches
};
struct Params {
    const u8* states;  // [T, HIDDEN]
    Problem problem[NEXT_TOP_K ? 2 : 1];
    int tokens;
};

constexpr int THREADS = 32 * WARPS;
constexpr int SHARE = WARPS / ROWS;  // warps of a row
constexpr int LENGTH = MATRIX == 0 ? 4 : 8;  // values of a 16-byte load
constexpr int STRIDE = 32 * LENGTH * SHARE;
constexpr int LOADS = (HIDDEN + STRIDE - 1) / STRIDE;
constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane, when a warp chooses
constexpr int MAX_K = TOP_K > NEXT_TOP_K ? TOP_K : NEXT_TOP_K;
#define NEVER __int_as_float(0xff800000)
static_assert(WARPS % ROWS == 0 && EXPERTS % ROWS == 0 && HIDDEN % 8 == 0 && MAX_K <= 32 && GROUPS <= 32, "");

DEVICE float rounded(float x, int kind) {
    u16 bits;
    if (kind == 1) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return from_half(bits); }
    if (kind == 2) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return from_bf16(bits); }
    return x;
}
DEVICE void store(u8* to, u64 at, float x, int kind) {
    if (kind == 0) { ((float*)to)[at] = x; return; }
    u16 bits;
    if (kind == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    ((u16*)to)[at] = bits;
}
DEVICE float load(const u8* from, u64 at, int kind) {
    if (kind == 0) return ((const volatile float*)from)[at];
    const u16 bits = ((const volatile u16*)from)[at];
    return kind == 1 ? from_half(bits) : from_bf16(bits);
}
DEVICE uint4 load_quad(const u8* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
template <int kind>
DEVICE void spread(float* to, uint4 from) {  // 4 values of fp32, else 8
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (kind == 0) to[i] = __uint_as_float(words[i]);
        else {
            to[2 * i] = kind == 1 ? from_half((u16)words[i]) : from_bf16(words[i] & 0xffff);
            to[2 * i + 1] = kind == 1 ? from_half((u16)(words[i] >> 16)) : __uint_as_float(words[i] & 0xffff0000u);
        }
}
DEVICE void load_states(float (&x)[LENGTH], const u8* states, u64 at) {
    if (STATES == 0) {
        spread<0>(x, load_quad(states + 4 * at));
        if (LENGTH == 8) spread<0>(x + LENGTH - 4, load_quad(states + 4 * at + 16));
    } else if (LENGTH == 8) {
        spread<STATES ? STATES : 1>(x, load_quad(states + 2 * at));
    } else {
        float y[8];
        u32 low, high;
        asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(low), "=r"(high) : "l"(states + 2 * at) : "memory");
        spread<STATES ? STATES : 1>(y, make_uint4(low, high, 0, 0));
        for (int i = 0; i < 4; ++i) x[i] = y[i];
    }
}

// Larger for larger values; unsigned.
DEVICE u32 order_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE u32 max_of_warp(u32 x) { u32 y; asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x)); return y; }
DEVICE u32 min_of_warp(u32 x) { u32 y; asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x)); return y; }
DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) x += __shfl_xor_sync(FULL, x, bit);
    return x;
}
DEVICE float largest_of_warp(float x) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, bit));
    return x;
}

// ---------------------------------------------------------------------------------------------- choice, one warp

DEVICE void score_all(float (&score)[OWN], int lane) {
    if (SCORE == 1) {
        float largest = NEVER, sum = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) largest = fmaxf(largest, score[i]);
        largest = largest_of_warp(largest);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            score[i] = 32 * i + lane < EXPERTS ? expf(score[i] - largest) : 0.f;
            sum += score[i];
        }
        sum = sum_of_warp(sum);
#pragma unroll
        for (int i = 0; i < OWN; ++i) score[i] = __fdiv_rn(score[i], sum);
    } else if (SCORE == 2) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) score[i] = __fdiv_rn(1.f, 1.f + expf(-score[i]));
    }
}

// Experts outside the best groups to MASKED; `room` holds EXPERTS floats.
DEVICE void keep_groups(float (&choice)[OWN], float* room, int lane) {
    constexpr int SIZE = EXPERTS / GROUPS;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (32 * i + lane < EXPERTS) room[32 * i + lane] = choice[i];
    __syncwarp();
    float best = NEVER, second = NEVER;
    if (lane < GROUPS)
        for (int j = 0; j < SIZE; ++j) {
            const float x = room[lane * SIZE + (j + lane) % SIZE];
            second = fmaxf(second, fminf(best, x));
            best = fmaxf(best, x);
        }
    const u32 mine = lane < GROUPS ? order_of(GROUP_SCORE == 1 || SIZE == 1 ? best : best + second) : 0;
    int before = 0;
    for (int other = 0; other < GROUPS; ++other) {
        const u32 theirs = __shfl_sync(FULL, mine, other);
        before += theirs > mine || (theirs == mine && other < lane);
    }
    const u32 kept = __ballot_sync(FULL, lane < GROUPS && before < GROUPS_KEPT);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (!(kept >> ((32 * i + lane) / SIZE) & 1)) choice[i] = MASKED;
}

template <int K>
DEVICE void choose(const Problem& p, int token, float* room, int lane) {
    float score[OWN], choice[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int expert = 32 * i + lane;
        score[i] = expert < EXPERTS ? ((const volatile float*)p.sums)[(u64)token * EXPERTS + expert] : NEVER;
        if (p.logits && expert < EXPERTS) store(p.logits, (u64)token * EXPERTS + expert, score[i], LOGITS_OUT);
    }
    score_all(score, lane);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int expert = 32 * i + lane;
        choice[i] = p.correction && expert < EXPERTS ? score[i] + p.correction[expert] : score[i];
    }
    if (GROUPS > 1) keep_groups(choice, room, lane);
    u32 order[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) order[i] = 32 * i + lane < EXPERTS ? order_of(choice[i]) : 0;
    u32 picked_order = 0;
    int picked = 0;
    float weight = 0;
    for (int k = 0; k < K; ++k) {
        u32 mine = 0, at = ~0u;
#pragma unroll
        for (int i = 0; i < OWN; ++i) mine = max(mine, order[i]);
        const u32 best = max_of_warp(mine);
#pragma unroll
        for (int i = OWN - 1; i >= 0; --i)
            if (order[i] == best && best) at = 32 * i + lane;
        const u32 expert = min_of_warp(at);
        float value = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (32 * i + lane == expert) value = p.correction ? score[i] : choice[i], order[i] = 0;
        value = __shfl_sync(FULL, value, expert % 32);
        if (lane == k) picked = expert, picked_order = best, weight = value;
    }
    if (NORM == 4) {
        const float largest = largest_of_warp(lane < K ? weight : NEVER);
        weight = lane < K ? expf(weight - largest) : 0.f;
    }
    const float sum = sum_of_warp(lane < K ? weight : 0.f);
    if (NORM == 1 || NORM == 4) weight = __fdiv_rn(weight, sum);
    if (NORM == 2) weight = __fdiv_rn(weight, sum + NORM_EPS);
    if (NORM == 3) weight = __fdiv_rn(weight, fmaxf(sum, NORM_EPS));
    int place = lane;
    if (!SORTED) {  // first those above the last value, then those equal to it, each by expert
        const u32 last = __shfl_sync(FULL, picked_order, K - 1);
        place = 0;
        for (int other = 0; other < K; ++other) {
            const u32 theirs = __shfl_sync(FULL, picked_order, other);
            const int expert = __shfl_sync(FULL, picked, other);
            const bool above = theirs > last, mine_above = picked_order > last;
            place += above == mine_above ? expert < picked : above;
        }
    }
    if (lane < K) {
        const u64 at = (u64)token * K + place;
        p.index[at] = picked;
        if (p.weights) store(p.weights, at, SCALE * weight, WEIGHTS);
    }
}

// ---------------------------------------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS) router(const Params p) {
    __shared__ float sums[WARPS][MAX_TOKENS];
    __shared__ float room[GROUPS > 1 ? WARPS * EXPERTS : 1];
    __shared__ bool last;
    const Problem& problem = p.problem[NEXT_TOP_K ? blockIdx.y : 0];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = blockIdx.x * ROWS + warp / SHARE;
    const int first = (warp % SHARE * 32 + lane) * LENGTH;
    uint4 row[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        row[i] = first + i * STRIDE < HIDDEN
            ? load_quad(problem.matrix + ((u64)expert * HIDDEN + first + i * STRIDE) * (16 / LENGTH)) : make_uint4(0, 0, 0, 0);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (int token = 0; token < p.tokens; ++token) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STRIDE < HIDDEN) {
                float a[8], x[LENGTH];
                spread<MATRIX>(a, row[i]);
                load_states(x, p.states, (u64)token * HIDDEN + first + i * STRIDE);
#pragma unroll
                for (int j = 0; j < LENGTH; ++j) sum += a[j] * x[j];
            }
        sum = sum_of_warp(sum);
        if (lane == 0) sums[warp][token] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * p.tokens; i += THREADS) {
        const int r = i % ROWS, token = i / ROWS, which = blockIdx.x * ROWS + r;
        float sum = 0;
        for (int s = 0; s < SHARE; ++s) sum += sums[r * SHARE + s][token];
        if (problem.matrix_bias) sum += load(problem.matrix_bias, which, MATRIX);
        problem.sums[(u64)token * EXPERTS + which] = rounded(sum, LOGITS);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(problem.arrived) : "memory");
        last = before == gridDim.x - 1;
        if (last) *problem.arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    for (int token = warp; token < p.tokens; token += WARPS) {
        float* mine = room + (GROUPS > 1 ? warp * EXPERTS : 0);
        if (NEXT_TOP_K && blockIdx.y) choose<NEXT_TOP_K ? NEXT_TOP_K : 1>(problem, token, mine, lane);
        else choose<TOP_K>(problem, token, mine, lane);
    }
}
