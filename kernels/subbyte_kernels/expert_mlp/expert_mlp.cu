// One layer of experts for 1 to 16 tokens: two launches of this text, gate_up (DOWN 0) and down (DOWN 1).
//
// A block is persistent. PRODUCERS warps stream weights into a ring of stages in shared memory by bulk copies; the other
// warps take the stages in turn, SPLIT of them a stage, and have no barrier in the main loop but the ring's. A copy costs
// its warp some sixty cycles whatever its size, so a stage should be few long rows, or whole ones, which are one copy for
// eight of them. Weights are
// operand A of the tensor cores' m16n8k16 (16 rows of weights), tokens operand B (8 columns), so one pass over a weight
// serves up to 8 tokens, or 16 with two columns of tiles. Experts are visited once however many tokens chose them: a
// token that did not choose an expert has weight 0 there.
//
// An item is 16 rows. gate_up: 8 rows of gate above the 8 rows of up that belong to them, so that a lane ends with both
// halves of the same activation; over all distinct experts. It writes weight * act(gate) * up, [distinct, T, I] in the
// model's dtype. down: 16 rows of the output; the contraction runs over all distinct experts, so the weighted sum over
// experts is the accumulator and nothing is added up in memory.
//
// Lane 4 g + t (g = 0..7, t = 0..3) holds of A the rows g and g + 8 and the contracted indices 2 t, 2 t + 1, 2 t + 8,
// 2 t + 9, of B column g and the same. A sum does not care for the order of its terms: lane t takes the 8 (16, 32)
// neighbours that one 16-byte load brings, and B is read in the same order.
//
// Programmatic launches: gate_up waits for what made the tokens and their experts, then lets down start. down streams
// its weights while gate_up still computes, since experts are known, and waits only before it reads activations. With
// several tokens the host launches down without that: it was seen to read activations before they were written.
//
// FIXED (one token, int4): products of integers. Eight neighbouring values of the token share a scale and are 15-bit
// integers, 128 hi + lo with hi and lo of 8 bits; codes are 4-bit integers in the upper halves of bytes, one instruction
// for four of them. m16n8k32 has eight columns and one token needs one, so lane t's eight values go into columns 2 t (hi)
// and 2 t + 1 (lo), with zeros elsewhere: the result that lane t receives are the sums over its own eight values, exact,
// and it multiplies them with their scale. gate_up writes its activations, 8 an item, in the same form.
//
// The host defines, in front of warp.cuh and this text: DOWN, FORMAT (0 the model's dtype, 1 int4, 2 fp8), GROUP
// (values that share a scale), FIXED, MODEL_BF16, ACTIVATION (0 silu, 1 gelu, 2 gelu by tanh, 3 relu), HIDDEN, INTERMEDIATE,
// SHARED_INTERMEDIATE (0 without shared expert), TOP_K, MAX_TOKENS (1, 8, 16), INDEX_BYTES, WEIGHT_KIND (0 fp32, 1 fp16,
// 2 bf16), WARPS (that compute), SPLIT (of them for one stage), PRODUCERS, STAGES, STEP (chunks of a stage),
// MIN_BLOCKS (of a multiprocessor that registers must be enough for).

struct Params {
    const u8* hidden;          // [T, HIDDEN]
    const u8* index;           // [T, TOP_K]
    const u8* weight;          // [T, TOP_K]
    const int* slots;          // [EXPERTS] or null
    const u8* expert_weights;  // of this launch: gate_up or down of slot 0
    u64 expert_stride;         // bytes from slot to slot
    const u8* shared_weights;  // the shared expert's, or null
    const u8* shared_scale;    // [T] fp32, or null
    u8* act;                   // [MAX_LIST (+ shared), T, INTERMEDIATE], or ACT_BYTES each
    u8* out;                   // [T, HIDDEN]
    const u8* residual;        // [T, HIDDEN] or null
    int tokens, experts;
};

constexpr int THREADS = 32 * (WARPS + PRODUCERS);
constexpr int TEAMS = WARPS / SPLIT;
constexpr int OWN = (STEP + SPLIT - 1) / SPLIT;        // chunks of a stage for one warp
constexpr int MAX_LIST = MAX_TOKENS * TOP_K;
constexpr int TILES = MAX_TOKENS > 8 ? 2 : 1;          // columns of tiles
constexpr int COLUMNS = 8 * TILES;
constexpr int CHUNK = FORMAT == 0 ? 32 : 128;          // contracted indices of a chunk
constexpr int GROUPS = FORMAT == 0 ? 0 : 128 / GROUP;  // scales of a row and chunk
constexpr int CODES = FORMAT == 0 ? 0 : FORMAT == 1 ? 512 : 1024;  // bytes of 8 rows of a chunk
constexpr int BLOCK = CODES + 16 * GROUPS;             // with their bf16 scales
constexpr int ROW_BYTES = 2 * CHUNK * STEP;            // of the model's dtype
constexpr bool WHOLE_ROWS = FORMAT == 0 && STEP * CHUNK == (DOWN ? INTERMEDIATE : HIDDEN) && !(DOWN && SHARED_INTERMEDIATE);
constexpr int ROW_STRIDE = WHOLE_ROWS || ROW_BYTES % 128 ? ROW_BYTES : ROW_BYTES + 64;  // neighbours in other banks
constexpr int HALF_BYTES = FORMAT == 0 ? 8 * ROW_STRIDE : STEP * BLOCK;
constexpr int STAGE_BYTES = 2 * HALF_BYTES;
constexpr int RED_FLOATS = WARPS * 16 * COLUMNS;
constexpr int FIXED_CHUNK = 320;                       // of a token's chunk: [t][hi, lo][q][8] integers, [t][q] fp32 scales
constexpr int FIXED_SCALES = 256;                      // where the latter begin
constexpr float FIXED_MOST = 127 * 128;
constexpr int ACT_BYTES = FIXED ? (INTERMEDIATE + 127) / 128 * FIXED_CHUNK : 2 * INTERMEDIATE;  // of an expert and token
constexpr int HIDDEN_BYTES = FIXED && !DOWN ? (HIDDEN + 127) / 128 * FIXED_CHUNK : 0;  // and 32 zeros, in shared memory
constexpr int ROWS = DOWN ? 16 : 8;                    // of output, of an item
constexpr int WIDTH = DOWN ? HIDDEN : INTERMEDIATE;
constexpr int ITEM_TILES = (WIDTH + ROWS - 1) / ROWS;
constexpr int SHARED_TILES = DOWN ? 0 : SHARED_INTERMEDIATE / 8;
static_assert(STAGE_BYTES % 16 == 0 && WARPS % SPLIT == 0, "");
static_assert(!FIXED || (FORMAT == 1 && MAX_TOKENS == 1), "");
// A wait for a phase of a barrier tells it from the one before alone, so whoever waits must have waited for that one too.
static_assert(STAGES % TEAMS == 0 && STAGES % PRODUCERS == 0, "a place in the ring belongs to one team and one producer");

extern __shared__ __align__(128) u8 shared_memory[];

DEVICE u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory"); }
DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" :: "r"(bar), "r"(parity) : "memory");
}
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE uint4 load_shared(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
DEVICE uint4 load_global(const u8* from, bool wanted) {
    uint4 v = {0, 0, 0, 0};
    if (wanted) asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
DEVICE float activation(float x) {
    if (ACTIVATION == 0) return x / (1.f + __expf(-x));
    if (ACTIVATION == 1) return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    if (ACTIVATION == 2) return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0.f);
}

// Two neighbouring int4 codes as 128 + code (bf16) or 1024 + code (fp16); the constant leaves by another product.
constexpr u32 CODE_BASE = MODEL_BF16 ? 0x43004300u : 0x64006400u;
constexpr u32 CODE_OFFSET = MODEL_BF16 ? 0xc308c308u : 0xe408e408u;  // minus (that constant + 8)
DEVICE u32 code_pair(u32 word, int i) { return ((word >> (4 * i)) & 0x000f000fu) | CODE_BASE; }

// Two E4M3 codes in bytes 0 and 2 of a word; exponents are off by 2^120 (bf16) or 2^8 (fp16) until multiplied.
DEVICE u32 float8_pair(u32 word) {
    u32 bits, made;
    if (MODEL_BF16) {
        bits = ((word << 8) & 0x80008000u) | ((word << 4) & 0x07f007f0u);
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(bits), "r"(0x7b807b80u), "r"(0x80008000u));
    } else {
        bits = ((word << 8) & 0x80008000u) | ((word << 7) & 0x3f803f80u);
        asm("mul.f16x2 %0, %1, %2;" : "=r"(made) : "r"(bits), "r"(0x5c005c00u));
    }
    return made;
}

// ---------------------------------------------------------------------------------------------- experts of a step

// With one token, pairs are the list: every warp reads it for itself, so that streaming starts without a barrier of the
// block. With several, all warps make one list together.
constexpr bool ONE = MAX_TOKENS == 1;

struct Lists {
    int slot[ONE ? 1 : MAX_LIST];   // of each pair, -1 where it is not computed
    int first[ONE ? 1 : MAX_LIST];  // the first pair with the same slot
    u32 firsts[ONE ? 1 : (MAX_LIST + 31) / 32];
    int distinct[ONE ? WARPS + PRODUCERS : 1][MAX_LIST];  // slots; with one token -1 where nothing is computed
    float weight[DOWN ? 1 : ONE ? WARPS * MAX_LIST : MAX_LIST * MAX_TOKENS];
    int count;
};

DEVICE float read_weight(const u8* from, int i) {
    if (WEIGHT_KIND == 0) return ((const volatile float*)from)[i];
    const u16 bits = ((const volatile u16*)from)[i];
    return WEIGHT_KIND == 1 ? from_half(bits) : from_bf16(bits);
}

DEVICE int rank_of(const Lists& lists, int pair) {
    int before = 0;
    for (int word = 0; word < pair / 32; ++word) before += __popc(lists.firsts[word]);
    return before + __popc(lists.firsts[pair / 32] & ((1u << (pair % 32)) - 1));
}

DEVICE int slot_of(const Params& p, int pair) {
    const long long id = INDEX_BYTES == 8 ? ((const volatile long long*)p.index)[pair] : ((const volatile int*)p.index)[pair];
    return id < 0 || id >= p.experts ? -1 : p.slots ? ((const volatile int*)p.slots)[id] : (int)id;
}

// The pairs of one token, for one warp.
DEVICE void read_pairs(Lists& lists, const Params& p, int warp, int lane) {
    for (int i = lane; i < TOP_K; i += 32) {
        lists.distinct[warp][i] = max(slot_of(p, i), -1);
        if (!DOWN && warp < WARPS) lists.weight[warp * TOP_K + i] = read_weight(p.weight, i);
    }
    __syncwarp();
}

// Distinct slots in the order of their first pair, and every token's weight in each.
DEVICE void list_experts(Lists& lists, const Params& p, int pairs) {
    const int tid = threadIdx.x;
    for (int i = tid; i < pairs; i += THREADS) lists.slot[i] = max(slot_of(p, i), -1);
    if (!DOWN)
        for (int i = tid; i < pairs * p.tokens; i += THREADS) lists.weight[i] = 0;
    __syncthreads();
    for (int i = tid; i < (pairs + 31) / 32 * 32; i += THREADS) {
        int first = i;
        if (i < pairs)
            for (int q = i - 1; q >= 0; --q)
                if (lists.slot[q] == lists.slot[i]) first = q;
        const u32 word = __ballot_sync(FULL, i < pairs && first == i && lists.slot[i] >= 0);
        if (i < pairs) lists.first[i] = first;
        if (i % 32 == 0) lists.firsts[i / 32] = word;
    }
    __syncthreads();
    for (int i = tid; i < pairs; i += THREADS)
        if (lists.slot[i] >= 0) {
            const int rank = rank_of(lists, lists.first[i]);
            if (lists.first[i] == i) lists.distinct[0][rank] = lists.slot[i];
            if (!DOWN) atomicAdd(&lists.weight[rank * p.tokens + i / TOP_K], read_weight(p.weight, i));
        }
    if (tid == 0) {
        int count = 0;
        for (int word = 0; word < (pairs + 31) / 32; ++word) count += __popc(lists.firsts[word]);
        lists.count = count;
    }
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------- stages

// One contraction of an item: 16 rows of one expert.
struct Part {
    const u8* weights;  // the expert's, null where there is none
    int width;          // contracted indices
    int top, bottom;    // first of the upper and of the lower 8 rows
};

DEVICE Part part_of(const int* slots, int count, const Params& p, int item, int part) {
    Part made;
    const int entry = DOWN ? part : item / ITEM_TILES;
    const bool is_shared = SHARED_INTERMEDIATE > 0 && entry >= count;
    const int slot = slots[is_shared ? 0 : entry];
    made.weights = is_shared ? p.shared_weights : ONE && slot < 0 ? nullptr : p.expert_weights + (u64)slot * p.expert_stride;
    if (DOWN) {
        made.width = is_shared ? SHARED_INTERMEDIATE : INTERMEDIATE;
        made.top = 16 * item;
        made.bottom = 16 * item + 8;
    } else {
        const int tile = is_shared ? item - count * ITEM_TILES : item % ITEM_TILES;
        made.width = HIDDEN;
        made.top = 8 * tile;
        made.bottom = (is_shared ? SHARED_INTERMEDIATE : INTERMEDIATE) + 8 * tile;
    }
    return made;
}

DEVICE int chunks_of(int width) { return (width + CHUNK - 1) / CHUNK; }

DEVICE void stream_stage(const Part& part, int chunk, u32 stage, u32 bar, int lane) {
    const int chunks = min(STEP, chunks_of(part.width) - chunk);
    if (WHOLE_ROWS) {
        if (lane == 0) {
            barrier_expect(bar, 16 * ROW_BYTES);
            bulk_copy(stage, part.weights + (u64)part.top * ROW_BYTES, 8 * ROW_BYTES, bar);
            bulk_copy(stage + HALF_BYTES, part.weights + (u64)part.bottom * ROW_BYTES, 8 * ROW_BYTES, bar);
        }
    } else if (FORMAT == 0) {
        const u32 bytes = 2 * CHUNK * chunks;
        if (lane == 0) barrier_expect(bar, 16 * bytes);
        __syncwarp();
        if (lane < 16) {
            const int row = (lane < 8 ? part.top : part.bottom) + lane % 8;
            bulk_copy(stage + lane * ROW_STRIDE, part.weights + ((u64)row * part.width + chunk * CHUNK) * 2, bytes, bar);
        }
    } else if (lane == 0) {
        const u32 bytes = BLOCK * chunks;
        const u64 along = chunks_of(part.width);
        barrier_expect(bar, 2 * bytes);
        bulk_copy(stage, part.weights + (part.top / 8 * along + chunk) * BLOCK, bytes, bar);
        bulk_copy(stage + HALF_BYTES, part.weights + (part.bottom / 8 * along + chunk) * BLOCK, bytes, bar);
    }
}

// Tokens' values for one chunk, in the order of a lane's weights: 8 values of token g, and of g + 8, for each register quad.
constexpr int QUADS = CHUNK / 32;
struct Columns { uint4 value[TILES][QUADS]; };

DEVICE void load_columns(Columns& made, const u8* source, int width, int tokens, int index, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int token = 8 * tile + g;
            const int at = index + (FORMAT == 0 ? 8 * t : FORMAT == 1 ? 32 * q + 8 * t : 64 * (q / 2) + 16 * t + 8 * (q % 2));
            made.value[tile][q] = load_global(source + ((u64)token * width + at) * 2, token < tokens && at < width);
        }
}

DEVICE void multiply_chunk(float (&sum)[TILES][4], const Columns& columns, u32 upper, u32 lower, int lane) {
    if (FORMAT == 0) {
        const uint4 a = load_shared(upper), b = load_shared(lower);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 x = columns.value[tile][0];
            mma_model(sum[tile], a.x, b.x, a.y, b.y, x.x, x.y);
            mma_model(sum[tile], a.z, b.z, a.w, b.w, x.z, x.w);
        }
        return;
    }
    const int g = lane / 4;
    u16 scale[2][GROUPS ? GROUPS : 1];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scale[0][i]) : "r"(upper - 16 * lane + CODES + 2 * (GROUPS * g + i)));
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scale[1][i]) : "r"(lower - 16 * lane + CODES + 2 * (GROUPS * g + i)));
    }
    u32 codes[2][CODES / 128 + 4];
#pragma unroll
    for (int i = 0; i < CODES / 512; ++i) {
        const uint4 a = load_shared(upper + 512 * i), b = load_shared(lower + 512 * i);
        codes[0][4 * i] = a.x, codes[0][4 * i + 1] = a.y, codes[0][4 * i + 2] = a.z, codes[0][4 * i + 3] = a.w;
        codes[1][4 * i] = b.x, codes[1][4 * i + 1] = b.y, codes[1][4 * i + 2] = b.z, codes[1][4 * i + 3] = b.w;
    }
    float part[2][TILES][4];  // two, so that products need not wait for each other
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int group = GROUPS * q / 4;
        if (GROUPS * q % 4 == 0)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) part[0][tile][i] = part[1][tile][i] = 0;
        u32 a[4], b[4];  // eight values of row g, of row g + 8
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (FORMAT == 1) a[i] = code_pair(codes[0][q], i), b[i] = code_pair(codes[1][q], i);
            else {
                const int word = 2 * q + i / 2, by = 8 * (i % 2);
                a[i] = float8_pair(codes[0][word] >> by), b[i] = float8_pair(codes[1][word] >> by);
            }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 x = columns.value[tile][q];
            if (FORMAT == 1) {
                mma_model(part[0][tile], CODE_OFFSET, CODE_OFFSET, CODE_OFFSET, CODE_OFFSET, x.x, x.y);
                mma_model(part[1][tile], CODE_OFFSET, CODE_OFFSET, CODE_OFFSET, CODE_OFFSET, x.z, x.w);
            }
            mma_model(part[0][tile], a[0], b[0], a[1], b[1], x.x, x.y);
            mma_model(part[1][tile], a[2], b[2], a[3], b[3], x.z, x.w);
            if (GROUPS * (q + 1) % 4 == 0) {
                const float up = from_bf16(scale[0][group]), low = from_bf16(scale[1][group]);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[tile][i] += (i < 2 ? up : low) * (part[0][tile][i] + part[1][tile][i]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- integers

DEVICE float max_or_nan(float a, float b) {
    float made;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(made) : "f"(a), "f"(b));
    return made;
}
DEVICE void mma_fixed(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Integers of values whose largest is `most`, and the scale that undoes it and the 16 of codes in upper halves. What is
// not finite makes every sum NaN.
DEVICE float fixed_factor(float most) { return most > 1e-30f ? FIXED_MOST / most : 0.f; }
DEVICE float fixed_scale(float most) { return most * (1.f / (16 * FIXED_MOST)); }
struct HiLo { int hi, lo; };
DEVICE HiLo fixed(float x, float factor) {
    const int whole = __float2int_rn(x * factor);
    const int hi = (whole + 64) >> 7;
    return {hi, whole - 128 * hi};
}

// Place of a value among the eight of its lane: even nibbles of a word of codes, then odd ones.
DEVICE int fixed_place(int column) { return ((2 * column) & 7) | (column >> 2); }

// The token as integers, in shared memory: 16 lanes' values for each chunk; 32 zeros behind it.
DEVICE void fix_hidden(u8* made, const u8* hidden) {
    for (int group = threadIdx.x; group < 16 * ((HIDDEN + 127) / 128); group += 32 * WARPS) {
        const uint4 raw = load_global(hidden + 16 * group, group < HIDDEN / 8);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        float x[8], most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = from_model((u16)(words[i / 2] >> (16 * (i % 2))));
            most = max_or_nan(most, fabsf(x[i]));
        }
        u32 codes[2][2] = {};
        const float factor = fixed_factor(most);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const HiLo parts = fixed(x[i], factor);
            const int place = fixed_place(i);
            codes[0][place / 4] |= (parts.hi & 255) << (8 * (place % 4));
            codes[1][place / 4] |= (parts.lo & 255) << (8 * (place % 4));
        }
        u8* chunk = made + group / 16 * FIXED_CHUNK;
        const int q = group % 16 / 4, t = group % 4;
        *(uint2*)(chunk + 64 * t + 8 * q) = {codes[0][0], codes[0][1]};
        *(uint2*)(chunk + 64 * t + 32 + 8 * q) = {codes[1][0], codes[1][1]};
        *(float*)(chunk + FIXED_SCALES + 16 * t + 4 * q) = fixed_scale(most);
    }
    if (threadIdx.x < 8) ((u32*)(made + HIDDEN_BYTES))[threadIdx.x] = 0;
    asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory");
}

// A lane's part of a token's chunk: operand B of the chunk's four products, and their scales.
struct FixedColumns { uint4 codes[2], scales; };

DEVICE void load_fixed(FixedColumns& made, const u8* act, u32 hidden, int width, int chunk, int lane) {
    const int g = lane / 4, t = lane % 4;
    const bool own = g / 2 == t;  // of columns 2 t and 2 t + 1
    if (DOWN) {
        const bool there = chunk < chunks_of(width);
        const u8* from = act + chunk * FIXED_CHUNK;
        made.codes[0] = load_global(from + 64 * t + g % 2 * 32, there && own);
        made.codes[1] = load_global(from + 64 * t + g % 2 * 32 + 16, there && own);
        made.scales = load_global(from + FIXED_SCALES + 16 * t, there);
        if (width % 128) {  // nobody wrote what is behind the last column
            u32* scales = &made.scales.x;
#pragma unroll
            for (int q = 0; q < 4; ++q) scales[q] = 16 * chunk + 4 * q + t < width / 8 ? scales[q] : 0;
        }
    } else {
        const u32 from = hidden + (own ? 64 * t + g % 2 * 32 + chunk * FIXED_CHUNK : HIDDEN_BYTES);
        made.codes[0] = load_shared(from);
        made.codes[1] = load_shared(own ? from + 16 : from);
        made.scales = load_shared(hidden + chunk * FIXED_CHUNK + FIXED_SCALES + 16 * t);
    }
}

// `halves`: 0xf0f0f0f0, from a value that the compiler does not know; it would load the constant for every use.
DEVICE void multiply_fixed(float (&sum)[2], const FixedColumns& x, u32 upper, u32 lower, u32 halves, int lane) {
    const uint4 a = load_shared(upper), b = load_shared(lower);
    u32 scale[2][GROUPS > 1 ? GROUPS / 2 : 1];
#pragma unroll
    for (int i = 0; i < GROUPS / 2; ++i) {
        const u32 at = CODES + 2 * GROUPS * (lane / 4) + 4 * i - 16 * lane;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale[0][i]) : "r"(upper + at));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale[1][i]) : "r"(lower + at));
    }
    const u32 words[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
    const u32 columns[8] = {x.codes[0].x, x.codes[0].y, x.codes[0].z, x.codes[0].w,
                            x.codes[1].x, x.codes[1].y, x.codes[1].z, x.codes[1].w};
    const u32 scales[4] = {x.scales.x, x.scales.y, x.scales.z, x.scales.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        u32 even[2], odd[2];  // codes less 8, times 16
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            even[row] = ((words[row][q] << 4) & halves) ^ 0x80808080u;
            odd[row] = (words[row][q] & halves) ^ 0x80808080u;
        }
        int made[4] = {0, 0, 0, 0};
        mma_fixed(made, even[0], even[1], odd[0], odd[1], columns[2 * q], columns[2 * q + 1]);
        const int group = GROUPS * q / 4;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u32 pair = scale[row][group / 2];
            const float weight = group % 2 ? __uint_as_float(pair & 0xffff0000u) : from_bf16(pair);
            sum[row] += weight * __uint_as_float(scales[q]) * (float)(128 * made[2 * row] + made[2 * row + 1]);
        }
    }
}

// ---------------------------------------------------------------------------------------------- the end of an item

DEVICE void finish_gate_up(const float* weights, int count, const Params& p, const float* red, int item) {
    const int entry = item / ITEM_TILES;
    const bool is_shared = SHARED_INTERMEDIATE > 0 && entry >= count;
    const int tile = is_shared ? item - count * ITEM_TILES : item % ITEM_TILES;
    const int width = is_shared ? SHARED_INTERMEDIATE : INTERMEDIATE;
    u8* act = p.act + (u64)(is_shared ? MAX_LIST : entry) * p.tokens * ACT_BYTES;
    for (int i = threadIdx.x; i < 8 * p.tokens; i += 32 * WARPS) {
        const int row = i % 8, token = i / 8;
        float gate = 0, up = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            gate += red[(warp * 16 + row) * COLUMNS + token];
            up += red[(warp * 16 + row + 8) * COLUMNS + token];
        }
        const float weight = !is_shared ? weights[entry * p.tokens + token]
                             : p.shared_scale ? ((const volatile float*)p.shared_scale)[token] : 1.f;
        const float made = weight == 0.f ? 0.f : weight * activation(gate) * up;
        if (!FIXED) {
            ((u16*)act)[(u64)token * width + 8 * tile + row] = to_model(made);
            continue;
        }
        float most = fabsf(made);  // of the lanes 0 to 7 that are here
#pragma unroll
        for (int step = 1; step < 8; step *= 2) most = max_or_nan(most, __shfl_xor_sync(0xff, most, step));
        const HiLo parts = fixed(made, fixed_factor(most));
        u8* chunk = act + tile / 16 * FIXED_CHUNK;
        const int q = tile % 16 / 4, t = tile % 4;
        chunk[64 * t + 8 * q + fixed_place(row)] = (u8)parts.hi;
        chunk[64 * t + 32 + 8 * q + fixed_place(row)] = (u8)parts.lo;
        if (row == 0) *(float*)(chunk + FIXED_SCALES + 16 * t + 4 * q) = fixed_scale(most);
    }
}

DEVICE void finish_down(const Params& p, const float* red, int item) {
    for (int i = threadIdx.x; i < 16 * p.tokens; i += 32 * WARPS) {
        const int row = i % 16, token = i / 16;
        if (16 * item + row >= HIDDEN) continue;
        const u64 at = (u64)token * HIDDEN + 16 * item + row;
        float sum = p.residual ? from_model(((const volatile u16*)p.residual)[at]) : 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += red[(warp * 16 + row) * COLUMNS + token];
        ((u16*)p.out)[at] = to_model(sum);
    }
}

// ---------------------------------------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) expert_mlp(const Params p) {
    __shared__ Lists lists;
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    u8* ring = shared_memory;
    float* red = (float*)(shared_memory + STAGES * STAGE_BYTES);  // two of them, used in turn
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(address_of(full + i), 1), barrier_init(address_of(empty + i), SPLIT);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (ONE) __syncthreads();  // barriers are there
    if (!DOWN) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    if (ONE) read_pairs(lists, p, warp, lane);
    else list_experts(lists, p, p.tokens * TOP_K);
    const int count = ONE ? TOP_K : lists.count;
    const int* slots = lists.distinct[ONE ? warp : 0];
    const float* weights = lists.weight + (ONE && !DOWN && warp < WARPS ? warp * TOP_K : 0);
    const int items = DOWN ? ITEM_TILES : count * ITEM_TILES + SHARED_TILES;
    const int parts = DOWN ? count + (SHARED_INTERMEDIATE > 0) : 1;
    if (warp >= WARPS) {
        int stage = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x)
            for (int index = 0; index < parts; ++index) {
                const Part part = part_of(slots, count, p, item, index);
                if (ONE && !part.weights) continue;
                for (int chunk = 0; chunk < chunks_of(part.width); chunk += STEP, ++stage) {
                    if (stage % PRODUCERS != warp - WARPS) continue;
                    const int place = stage % STAGES;
                    if (stage >= STAGES) barrier_wait(address_of(empty + place), (stage / STAGES - 1) & 1);
                    stream_stage(part, chunk, address_of(ring + place * STAGE_BYTES), address_of(full + place), lane);
                }
            }
        return;
    }
    if (DOWN) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    u8* hidden = shared_memory + STAGES * STAGE_BYTES + 8 * RED_FLOATS;  // as integers
    if (FIXED && !DOWN) fix_hidden(hidden, p.hidden);
    const u32 halves = 0xf0f0f0f0u | p.tokens >> 16;
    int stage = 0, turn = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
        float sum[2][TILES][4] = {};  // two, so that products need not wait for each other
        float whole[2][2] = {};       // the same for integers
        for (int index = 0; index < parts; ++index) {
            const Part part = part_of(slots, count, p, item, index);
            if (ONE && !part.weights) continue;
            const int width = part.width;
            const bool is_shared = SHARED_INTERMEDIATE > 0 && index >= count;
            const u8* source = !DOWN ? p.hidden : p.act + (u64)(is_shared ? MAX_LIST : index) * p.tokens * ACT_BYTES;
            for (int chunk = 0; chunk < chunks_of(width); chunk += STEP, ++stage) {
                if (stage % TEAMS != warp / SPLIT) continue;
                const int own = warp % SPLIT;
                Columns columns[OWN];
                FixedColumns integers[OWN];
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const int c = chunk + own + SPLIT * i;
                    if (!FIXED) load_columns(columns[i], source, width, p.tokens, c * CHUNK, lane);
                    else if (DOWN) load_fixed(integers[i], source, 0, width, c, lane);
                }
                const int place = stage % STAGES;
                barrier_wait(address_of(full + place), (stage / STAGES) & 1);
                const u32 base = address_of(ring + place * STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const int c = own + SPLIT * i;
                    const u32 upper = base + (FORMAT == 0 ? lane / 4 * ROW_STRIDE + 2 * CHUNK * c + 16 * (lane % 4) : c * BLOCK + 16 * lane);
                    if (c >= STEP || chunk + c >= chunks_of(width)) continue;
                    if (!FIXED) multiply_chunk(sum[i % 2], columns[i], upper, upper + HALF_BYTES, lane);
                    else {
                        if (!DOWN) load_fixed(integers[i], nullptr, address_of(hidden), width, chunk + c, lane);
                        multiply_fixed(whole[i % 2], integers[i], upper, upper + HALF_BYTES, halves, lane);
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(address_of(empty + place));
            }
        }
        float* mine = red + turn * RED_FLOATS + warp * 16 * COLUMNS;
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int row = 0; FIXED && row < 2; ++row) {
            float all = whole[0][row] + whole[1][row];
            all += __shfl_xor_sync(FULL, all, 1);
            all += __shfl_xor_sync(FULL, all, 2);
            if (t == 0) mine[(g + 8 * row) * COLUMNS] = all;
        }
#pragma unroll
        for (int tile = 0; !FIXED && tile < TILES; ++tile) {
            mine[g * COLUMNS + 8 * tile + 2 * t] = sum[0][tile][0] + sum[1][tile][0];
            mine[g * COLUMNS + 8 * tile + 2 * t + 1] = sum[0][tile][1] + sum[1][tile][1];
            mine[(g + 8) * COLUMNS + 8 * tile + 2 * t] = sum[0][tile][2] + sum[1][tile][2];
            mine[(g + 8) * COLUMNS + 8 * tile + 2 * t + 1] = sum[0][tile][3] + sum[1][tile][3];
        }
        asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory");
        if (DOWN) finish_down(p, red + turn * RED_FLOATS, item);
        else finish_gate_up(weights, count, p, red + turn * RED_FLOATS, item);
    }
}
