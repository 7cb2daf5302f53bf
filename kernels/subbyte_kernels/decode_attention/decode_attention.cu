// Decode attention of one query token over packed tiles, the exact window and the sinks.
//
// One block computes one (row, KV head, split). Within it every warp works for itself on units of 64 tokens and keeps its
// own softmax, so the main loop has no barrier; then a warp merges a query's sums of the block and, if its split is the
// last of that query, those of all splits, always in the same order. Codes go from global memory to registers (lanes.py
// lays them out so that every load is contiguous), from there through a table in shared memory straight into operand A
// of the tensor cores' m16n8k16; the other operand holds queries or weights.
//
// Lane 4 g + t (g = 0..7, t = 0..3) holds of A the rows g and g + 8 and the contracted indices 2 t, 2 t + 1, 2 t + 8,
// 2 t + 9; of B column g and the same indices; of the result rows g and g + 8 and columns 2 t, 2 t + 1. The registers of
// A are (row g, 2 t), (row g + 8, 2 t), (row g, 2 t + 8), (row g + 8, 2 t + 8), two values each. An entry of a 4-D table
// is loaded into two neighbouring registers, so its first pair of channels has to be in row g and its second in row
// g + 8, at the same contracted index. B is what tells the two apart: queries come in quads, and the eight columns are
// 4 queries x 2 parities.
//
// Keys. Row g + 8 p of A holds pair p of token g, for 8 channels of lane t's part. Column (query, p) of B holds what
// the query has at pair p. In the result, row g of column (query, 0) plus row g + 8 of column (query, 1) is the score;
// the other two of the lane's four elements are products of pairs that do not belong together, and are not used.
//
// Values. Row g + 8 p of A holds pair p of part g, at contracted index (token, e): channel e of the pair. Column
// (query, e') of B is the weight of the token for the query where e = e', else 0:
//
//   sum over (token, e) of V[token, pair, e] P[token, query] [e = e'] = O[pair, e', query]
//
// so nothing has to be transposed, and all four elements are used: channels 4 i .. 4 i + 3 of part g for query t. Lane t
// thus computes the scores of query t, keeps its softmax and its output. P gets from the lanes that computed it (token
// g, query t) to those that need it (column g, tokens t and t + 4) by two shuffles for 16 tokens.
//
// The host defines, in front of warp.cuh and this text: HEAD_DIM, QUADS (groups of 4 queries), WARPS, BLOCKS (of an SM),
// MODEL_BF16 (the model's dtype is bf16, else fp16), SHARED_BASE and SHARED_BYTES (of dynamic shared memory); as lists:
// KEY_TIERS and VALUE_TIERS of TIER(index, id, kind), TABLES of TABLE(index, entries, dim), PAIRS of PAIR(index, id, kind
// and table of the keys' tier, the same of the values').

// ---------------------------------------------------------------------------------------------- constants

constexpr int UNIT = 64;
constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 4 * QUADS;
constexpr int STEPS = D / 32;         // instructions for 8 tokens of keys or of values and a quad of queries
constexpr float LOG2E = 1.4426950408889634f;
constexpr float SLACK = 8.0f;         // the running maximum may lag behind by a factor of 2^8: P stays far below 65504
#define INFINITE __int_as_float(0x7f800000)

// words of a lane's stream in a unit, and how many of them are decoded at a time
constexpr int words_of(Kind kind) { return UNIT * D / dim_of(kind) * bits_of(kind) / 1024; }
constexpr int batch_of(Kind kind) {
    const int most = bits_of(kind) == 6 ? 12 : 16;
    return words_of(kind) < most ? words_of(kind) : most;
}
constexpr int vector_of(Kind kind) { return words_of(kind) % 4 == 0 ? 4 : words_of(kind) % 2 == 0 ? 2 : 1; }
constexpr int record_of(Kind kind) { return 64 * words_of(kind) + TILE / 2; }
// FP8 and FP6 bits that are moved into fp16 unchanged come out smaller by a power of two
constexpr float unit_of(Kind kind) { return kind == FP8 ? 256.0f : kind == FP6 ? 16384.0f : 1.0f; }

#define TABLE(index, entries, dim) +1
constexpr int N_TABLES = 0 TABLES;
#undef TABLE
constexpr int entries_of(int index) {
    int found = 0;
#define TABLE(i, entries, dim) if (i == index) found = entries;
    TABLES
#undef TABLE
    return found;
}
// 128 bytes repeat one entry, so that every lane has banks of its own. Codes of 8 bits: entries lie 256 bytes apart, so
// that a code, moved as a whole byte, is an address already; two such tables lie between each other. The host gives the
// largest tables first.
constexpr int ENTRY_BYTES = 128, BLOCK_OF_TWO = 256 * 2 * ENTRY_BYTES;
constexpr int stride_of(int index) { return entries_of(index) == 256 ? 2 * ENTRY_BYTES : ENTRY_BYTES; }
constexpr int table_offset(int index) {
    int large = 0, offset = 0;
    for (int i = 0; i < index; ++i) entries_of(i) == 256 ? ++large : offset += entries_of(i) * ENTRY_BYTES;
    if (index < N_TABLES && entries_of(index) == 256) return large / 2 * BLOCK_OF_TWO + large % 2 * ENTRY_BYTES;
    return (large + 1) / 2 * BLOCK_OF_TWO + offset;
}

#define TIER(index, id, kind) +1
constexpr int N_KEY_TIERS = 0 KEY_TIERS;
constexpr int N_VALUE_TIERS = 0 VALUE_TIERS;
#undef TIER
#define PAIR(key_index, key_id, key_kind, key_table, value_index, value_id, value_kind, value_table) +1
constexpr int N_PAIRS = 0 PAIRS;
#undef PAIR

// Shared memory: each warp's packed sum, then its exact one | rotated queries | (m, l) of the sums | size of each
// query and its product with the mean | tables. The host says where dynamic shared memory begins, so that the
// address of a table is part of the instructions that read it.
constexpr int ROW_FLOATS = QUERIES * D;
constexpr int ROWS = 2 * WARPS;
constexpr int QUERY_AT = ROWS * ROW_FLOATS * 4;
constexpr int STATE_AT = QUERY_AT + QUERIES * D * 2;
constexpr int FACTOR_AT = STATE_AT + ROWS * QUERIES * 8;
constexpr int TABLES_AT = FACTOR_AT + QUERIES * 8;
static_assert(TABLES_AT + table_offset(N_TABLES) == SHARED_BYTES, "host and kernel agree");
constexpr int table_address(int index) { return index < 0 ? 0 : SHARED_BASE + TABLES_AT + table_offset(index); }

constexpr int some(int count) { return count ? count : 1; }

// What a block asks for first comes first: a line of constants that was not read yet takes long.
struct Params {
    const int4 *work;              // [blocks, 2]: row, head, split, splits; first unit, end, first partial result, tables; or null
    int heads, group, exact, tiles, splits;
    float scaling;
    const int *key_pages;          // [B, H, T], each row's tiles sorted by their pair of tiers
    const int *value_pages;
    u64 page_row, page_head;       // strides in elements
    const u16 *query;              // [B, HQ, D]
    u64 query_row, query_head;
    const float *mean;             // [B, H, D] or null
    const float *key_signs;        // [D]
    const u16 *exact_key;          // [B, H, E, D]
    const u16 *exact_value;
    const unsigned char *visible;  // [B, E]
    u64 exact_row, exact_head, exact_token, visible_row;
    const float *value_signs;      // [D]
    const float *sinks;            // [HQ] or null
    u16 *output;                   // [B, HQ, D]
    float *lse;                    // [B, HQ]
    u16 *partial;                  // [splits of all (row, head), QUERIES, D] fp16
    float4 *partial_state;         // [splits of all (row, head), QUERIES] maximum, denominator, unit of the sum
    u32 *arrived;                  // [B H, QUERIES], zero before and after
    const u32 *key_pool[some(N_KEY_TIERS)];
    const u32 *value_pool[some(N_VALUE_TIERS)];
    const u16 *table[some(N_TABLES)];
    u64 table_row[some(N_TABLES)], table_head[some(N_TABLES)];
};

extern __shared__ __align__(128) char shared[];

// ---------------------------------------------------------------------------------------------- small things

DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE u32 half2(float low, float high) {
    u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
DEVICE u32 bfloat2(float low, float high) {
    u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 model2(float low, float high) {
#if MODEL_BF16
    return bfloat2(low, high);
#else
    return half2(low, high);
#endif
}
DEVICE u32 select_bytes(u32 a, u32 selector, u32 b = 0) {  // bytes 0 to 3 are a's, 4 to 7 are b's
    u32 y; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector)); return y;
}

DEVICE void mma_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_model(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_model(c, a[0], a[1], a[2], a[3], b0, b1); }

// codes are read once: they pass L1 by
DEVICE void load_words(u32 *to, const u32 *from, int count) {
    if (count == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    else if (count == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
DEVICE float reduce_max_over_g(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit <<= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, bit));
    return x;
}
DEVICE float reduce_sum_over_g(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit <<= 1) x += __shfl_xor_sync(FULL, x, bit);
    return x;
}

// ---------------------------------------------------------------------------------------------- decoding

// Words of one batch of a lane's stream.
template <Kind kind> DEVICE void load_batch(u32 (&words)[16], const u32 *unit, int batch, int lane) {
    constexpr int V = vector_of(kind);
#pragma unroll
    for (int i = 0; i < batch_of(kind); i += V) load_words(words + i, unit + (batch * batch_of(kind) + i) * 32 + lane * V, V);
}

// The first batch of a unit; what comes after it is sent for as far as the L2 cache.
template <Kind kind> DEVICE void load_first(u32 (&words)[16], const u32 *unit, int lane) {
    constexpr int FIRST = batch_of(kind), LINES = words_of(kind);  // a word of all lanes is a line of 128 bytes
    load_batch<kind>(words, unit, 0, lane);
#pragma unroll
    for (int line = FIRST; line < LINES; line += 32)
        if (line + lane < LINES) asm volatile("prefetch.global.L2 [%0];" :: "l"(unit + (line + lane) * 32));
}

// Spare bits of a block of words, which are one more word of codes (bitpack.py).
template <Kind kind> DEVICE u32 spare_word(const u32 (&words)[16], int block) {
    constexpr int WORDS = bits_of(kind) == 7 ? 7 : 3, SPARE = bits_of(kind) == 7 ? 4 : 2;
    u32 spare = 0;
#pragma unroll
    for (int w = WORDS - 1; w >= 0; --w) spare = __funnelshift_l(words[block * WORDS + w], spare, SPARE);
    return spare;
}

// The word that holds code c of a batch, and its place in the word.
template <Kind kind> DEVICE u32 word_of(const u32 (&words)[16], int c, int &shift) {
    constexpr int BITS = bits_of(kind), EACH = 32 / BITS;
    if (BITS == 8) {
        shift = c % 4 * 8;
        return words[c / 4];
    }
    constexpr int WORDS = BITS == 7 ? 7 : 3, BLOCK = WORDS * 32 / BITS;
    const int block = c / BLOCK, place = c % BLOCK;
    if (place < WORDS * EACH) {
        shift = place % EACH * BITS;
        return words[block * WORDS + place / EACH];
    }
    shift = (place - WORDS * EACH) * BITS;
    return spare_word<kind>(words, block);
}

// Where the lane's copy of entry 0 lies in its table.
template <Kind kind> DEVICE u32 place_of(int lane) { return dim_of(kind) == 4 ? (lane & 15) * 8 : lane * 4; }

// Where the lane's copy of the entry for code c of a batch lies in its table.
template <Kind kind> DEVICE u32 entry_place(const u32 (&words)[16], int c, u32 place) {
    int shift;
    const u32 word = word_of<kind>(words, c, shift);
    if constexpr (bits_of(kind) == 8) return select_bytes(word, 0x7604 | shift / 8 << 4, place);  // the code becomes byte 1
    const u32 moved = shift >= 7 ? word >> (shift - 7) : word << (7 - shift);
    return (moved & (((1u << bits_of(kind)) - 1) << 7)) | place;
}

DEVICE u32 e4m3_pair(u32 word, int pair) {  // bytes 2 pair, 2 pair + 1 -> fp16, times 2^-8
    const u32 high = select_bytes(word, pair ? 0x3424 : 0x1404);
    return (high & 0x80008000u) | ((high & 0x7f007f00u) >> 1);
}
DEVICE u32 e2m3_pair(u32 low, u32 high) {  // two 6-bit codes -> fp16, times 2^-14
    const u32 both = low | high << 16;
    return (both & 0x00200020u) << 10 | (both & 0x001f001fu) << 7;
}

// Four neighbouring channels of a token as two registers: group `index` of the batch.
template <Kind kind, int table> DEVICE void four_values(u32 &first, u32 &second, const u32 (&words)[16], int index, u32 place) {
    if constexpr (dim_of(kind) == 4) {
        asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];"
            : "=r"(first), "=r"(second) : "r"(entry_place<kind>(words, index, place)), "n"(table_address(table)));
    } else if constexpr (dim_of(kind) == 2) {
        asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(first) : "r"(entry_place<kind>(words, 2 * index, place)), "n"(table_address(table)));
        asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(second) : "r"(entry_place<kind>(words, 2 * index + 1, place)), "n"(table_address(table)));
    } else if constexpr (kind == FP8) {
        first = e4m3_pair(words[index], 0);
        second = e4m3_pair(words[index], 1);
    } else {
        u32 code[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int shift;
            const u32 word = word_of<kind>(words, 4 * index + i, shift);
            code[i] = word >> shift & 63;
        }
        first = e2m3_pair(code[0], code[1]);
        second = e2m3_pair(code[2], code[3]);
    }
}

// ---------------------------------------------------------------------------------------------- one warp's state

struct Warp {
    int lane, g, t;
    float top[QUADS];     // running maximum of the scores in units of log 2, for query 4 a + t
    float total[QUADS];   // this lane's share of the denominator
    float sum[QUADS][STEPS][4];
    float largest;        // the unit of `sum`: weights are multiplied by value scales, which may have any size

    DEVICE void clear() {
        largest = 1e-30f;
#pragma unroll
        for (int a = 0; a < QUADS; ++a) {
            top[a] = -INFINITE;
            total[a] = 0.0f;
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[a][i][e] = 0.0f;
        }
    }

    DEVICE void scale_sum(int a, float factor) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[a][i][e] *= factor;
    }

    // Raise the running maxima to those of this unit where a score is far above, `highest` being the lane's own, and make
    // `largest` at least as large as every value scale of the unit.
    DEVICE void follow(const float (&highest)[QUADS], float scale) {
        bool above = scale > largest;
#pragma unroll
        for (int a = 0; a < QUADS; ++a) above |= highest[a] > top[a] + SLACK;
        if (!__any_sync(FULL, above)) return;
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) scale = fmaxf(scale, __shfl_xor_sync(FULL, scale, bit));
        float narrow = 1.0f;
        if (scale > largest) {
            narrow = __fdividef(largest, 2.0f * scale);
            largest = 2.0f * scale;
        }
#pragma unroll
        for (int a = 0; a < QUADS; ++a) {
            const float raised = fmaxf(top[a], reduce_max_over_g(highest[a]));
            const float keep = raised == -INFINITE ? 1.0f : exp2_fast(top[a] - raised);
            total[a] *= keep;
            scale_sum(a, keep * narrow);
            top[a] = raised;
        }
    }

    // Leave sums and states in shared memory.
    DEVICE void store(int row) {
        float *sums = reinterpret_cast<float *>(shared) + row * ROW_FLOATS;
        float2 *states = reinterpret_cast<float2 *>(shared + STATE_AT) + row * QUERIES;
        const float unit = largest;
#pragma unroll
        for (int a = 0; a < QUADS; ++a) {
            const float whole = reduce_sum_over_g(total[a]);
            if (g == 0) states[4 * a + t] = make_float2(top[a], whole);
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
                *reinterpret_cast<float4 *>(sums + (4 * a + t) * D + g * (D / 8) + 4 * i) =
                    make_float4(sum[a][i][0] * unit, sum[a][i][1] * unit, sum[a][i][2] * unit, sum[a][i][3] * unit);
        }
    }
};

// Weights of 16 tokens as B operands of two octets: `pair` holds this lane's query for tokens g (low) and g + 8 (high).
DEVICE void spread_weights(u32 (&b)[2][2], u32 pair, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 near = __shfl_sync(FULL, pair, 4 * t + (g >> 1)), far = __shfl_sync(FULL, pair, 4 * t + 16 + (g >> 1));
    const u32 low = g & 1 ? 0x1044 : 0x4410, high = g & 1 ? 0x3244 : 0x4432;
    b[0][0] = select_bytes(near, low);
    b[0][1] = select_bytes(far, low);
    b[1][0] = select_bytes(near, high);
    b[1][1] = select_bytes(far, high);
}

// ---------------------------------------------------------------------------------------------- packed units

constexpr int OCTETS = UNIT / 8;
typedef float Scores[OCTETS][QUADS];  // lane 4 g + t: tokens 8 i + g, queries 4 a + t
typedef u32 Queries[QUADS][STEPS][2];

// B operands of the group's queries: column g is query g / 2 of a quad, pairs g % 2 of lane t's channels.
DEVICE void load_queries(Queries &query, const u16 *from, u64 stride, int count, int g, int t) {
#pragma unroll
    for (int a = 0; a < QUADS; ++a) {
        const int row = 4 * a + (g >> 1);
        const u32 *pairs = reinterpret_cast<const u32 *>(from + row * stride) + t * (D / 8) + (g & 1);
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) query[a][j][half] = row < count ? pairs[4 * j + 2 * half] : 0;
    }
}

// Pairs from a table in two batches have a loop over them: less code, and 5 % less time on an H200 (FP6 and FP8, whose
// values are computed, lose 10 to 20 % by a loop). What differs between batches lies in registers that move by one
// batch's share.
constexpr bool rolled(Kind kind) { return dim_of(kind) == 2 && words_of(kind) / batch_of(kind) == 2; }

template <Kind kind> DEVICE void take(u32 (&words)[16], const u32 (&next)[16]) {
#pragma unroll
    for (int i = 0; i < batch_of(kind); ++i) words[i] = next[i];
}

// Scores of a batch's octets, those of `to` on.
template <Kind kind, int table>
DEVICE void key_batch(Scores &scores, int to, const u32 (&words)[16], const Queries &query, u32 place) {
    constexpr int EACH = OCTETS / (words_of(kind) / batch_of(kind));
#pragma unroll
    for (int octet = 0; octet < EACH; ++octet) {
        float c[QUADS][4];
#pragma unroll
        for (int a = 0; a < QUADS; ++a)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[a][e] = 0.0f;
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
            u32 k[4];
            four_values<kind, table>(k[0], k[1], words, 2 * (octet * STEPS + j), place);
            four_values<kind, table>(k[2], k[3], words, 2 * (octet * STEPS + j) + 1, place);
#pragma unroll
            for (int a = 0; a < QUADS; ++a) mma_half(c[a], k, query[a][j][0], query[a][j][1]);
        }
#pragma unroll
        for (int a = 0; a < QUADS; ++a) scores[to + octet][a] = c[a][0] + c[a][3];
    }
}

template <Kind kind, int table>
DEVICE void key_unit(Scores &scores, u32 (&words)[16], const u32 *unit, const Queries &query, u32 place, int lane) {
    constexpr int BATCHES = words_of(kind) / batch_of(kind), EACH = OCTETS / BATCHES;
    static_assert(EACH * BATCHES == OCTETS, "a batch is a whole number of octets");
    if constexpr (rolled(kind)) {
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            u32 next[16];
            if (batch + 1 < BATCHES) load_batch<kind>(next, unit, batch + 1, lane);
#pragma unroll
            for (int i = 0; i < OCTETS - EACH; ++i)
#pragma unroll
                for (int a = 0; a < QUADS; ++a) scores[i][a] = scores[i + EACH][a];
            key_batch<kind, table>(scores, OCTETS - EACH, words, query, place);
            take<kind>(words, next);
        }
    } else {
#pragma unroll
        for (int batch = 0; batch < BATCHES; ++batch) {
            u32 next[16];
            if (batch + 1 < BATCHES) load_batch<kind>(next, unit, batch + 1, lane);
            key_batch<kind, table>(scores, batch * EACH, words, query, place);
            if (batch + 1 < BATCHES) take<kind>(words, next);
        }
    }
}

template <Kind kind, int table>
DEVICE void value_batch(Warp &warp, const u32 (&words)[16], const u32 (&weights)[4][QUADS], int from, u32 place, int lane) {
    constexpr int EACH = OCTETS / (words_of(kind) / batch_of(kind));
    u32 b[QUADS][2][2];
#pragma unroll
    for (int octet = 0; octet < EACH; ++octet) {
        if (octet % 2 == 0)
#pragma unroll
            for (int a = 0; a < QUADS; ++a) spread_weights(b[a], weights[from + octet / 2][a], lane);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            u32 v[4];
            four_values<kind, table>(v[0], v[1], words, 2 * octet * STEPS + i, place);
            four_values<kind, table>(v[2], v[3], words, (2 * octet + 1) * STEPS + i, place);
#pragma unroll
            for (int a = 0; a < QUADS; ++a) mma_half(warp.sum[a][i], v, b[a][octet % 2][0], b[a][octet % 2][1]);
        }
    }
}

template <Kind kind, int table>
DEVICE void value_unit(Warp &warp, u32 (&words)[16], const u32 *unit, u32 (&weights)[4][QUADS], u32 place, int lane) {
    constexpr int BATCHES = words_of(kind) / batch_of(kind), EACH = OCTETS / BATCHES;
    static_assert(EACH % 2 == 0, "weights come for two octets");
    if constexpr (rolled(kind)) {
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            u32 next[16];
            if (batch + 1 < BATCHES) load_batch<kind>(next, unit, batch + 1, lane);
            value_batch<kind, table>(warp, words, weights, 0, place, lane);
            take<kind>(words, next);
#pragma unroll
            for (int m = 0; m < 4 - EACH / 2; ++m)
#pragma unroll
                for (int a = 0; a < QUADS; ++a) weights[m][a] = weights[m + EACH / 2][a];
        }
    } else {
#pragma unroll
        for (int batch = 0; batch < BATCHES; ++batch) {
            u32 next[16];
            if (batch + 1 < BATCHES) load_batch<kind>(next, unit, batch + 1, lane);
            value_batch<kind, table>(warp, words, weights, batch * EACH / 2, place, lane);
            if (batch + 1 < BATCHES) take<kind>(words, next);
        }
    }
}

// A unit of a record: where its codes and its scales lie.
template <Kind kind> DEVICE const u32 *codes_at(const u32 *pool, int page, int unit) {
    return pool + (u64)(page & 0xffffff) * record_of(kind) + (unit & 1) * 32 * words_of(kind);
}
template <Kind kind> DEVICE const u32 *scales_at(const u32 *pool, int page, int unit, int g) {
    return pool + (u64)(page & 0xffffff) * record_of(kind) + 64 * words_of(kind) + ((unit & 1) * 8 + g) * 4;
}

DEVICE void prefetch_key(const Params &p, int page, int unit, u32 (&words)[16], int lane) {
#define TIER(index, id, kind) \
    if (N_KEY_TIERS == 1 || page >> 24 == id) load_first<kind>(words, codes_at<kind>(p.key_pool[index], page, unit), lane);
    KEY_TIERS
#undef TIER
}
DEVICE void prefetch_value(const Params &p, int page, int unit, u32 (&words)[16], int lane) {
#define TIER(index, id, kind) \
    if (N_VALUE_TIERS == 1 || page >> 24 == id) load_first<kind>(words, codes_at<kind>(p.value_pool[index], page, unit), lane);
    VALUE_TIERS
#undef TIER
}
DEVICE void prefetch_scales(const Params &p, int key_page, int value_page, int unit, u32 (&key)[4], u32 (&value)[4], int g) {
#define TIER(index, id, kind) \
    if (N_KEY_TIERS == 1 || key_page >> 24 == id) load_words(key, scales_at<kind>(p.key_pool[index], key_page, unit, g), 4);
    KEY_TIERS
#undef TIER
#define TIER(index, id, kind) \
    if (N_VALUE_TIERS == 1 || value_page >> 24 == id) load_words(value, scales_at<kind>(p.value_pool[index], value_page, unit, g), 4);
    VALUE_TIERS
#undef TIER
}
// What a warp has loaded ahead: the first words of a unit's codes, and its scales.
struct Ahead {
    int key_page, value_page;
    u32 key_words[16], value_words[16], key_scales[4], value_scales[4];

    DEVICE void find(const int *key_pages, const int *value_pages, int unit, int end) {
        key_page = value_page = -1;
        if (unit < end) {
            key_page = key_pages[unit >> 1];
            value_page = value_pages[unit >> 1];
        }
        if (N_PAIRS > 1) {
            key_page = __shfl_sync(FULL, key_page, 0);
            value_page = __shfl_sync(FULL, value_page, 0);
        }
    }
    DEVICE void load(const Params &p, int unit, int lane) {
        if (key_page >= 0) {
            prefetch_key(p, key_page, unit, key_words, lane);
            prefetch_value(p, value_page, unit, value_words, lane);
            prefetch_scales(p, key_page, value_page, unit, key_scales, value_scales, lane >> 2);
        }
    }
};

// A run of units whose tiles have one pair of tiers; `ahead` holds the first of them, and afterwards the pages of the
// unit behind the run.
template <int key_index, int key_id, Kind key_kind, int key_table, int value_index, int value_id, Kind value_kind, int value_table>
DEVICE void run_of_units(const Params &p, Warp &warp, Ahead &ahead, const Queries &query, const float (&size)[QUADS],
                         const int *key_pages, const int *value_pages, int &unit, int end) {
    constexpr float KEY_UNIT = unit_of(key_kind), VALUE_UNIT = unit_of(value_kind);
    const int lane = warp.lane, g = warp.g;
    const u32 *key_pool = p.key_pool[key_index], *value_pool = p.value_pool[value_index];
    u32 (&key_words)[16] = ahead.key_words, (&value_words)[16] = ahead.value_words;
    u32 (&key_scales)[4] = ahead.key_scales, (&value_scales)[4] = ahead.value_scales;
    // through a shuffle, so that no table is read before the barrier, and the compiler does not mask each address again
    const u32 key_place = __shfl_sync(FULL, place_of<key_kind>(lane), lane);
    const u32 value_place = __shfl_sync(FULL, place_of<value_kind>(lane), lane);
    bool more;
    do {
        const int next = unit + WARPS;
        int next_key = -1, next_value = -1;
        if (next < end) {
            next_key = key_pages[next >> 1];
            next_value = value_pages[next >> 1];
        }
        Scores scores;
        key_unit<key_kind, key_table>(scores, key_words, codes_at<key_kind>(key_pool, ahead.key_page, unit), query, key_place, lane);
        more = next_key >= 0;
        if (N_PAIRS > 1) {  // the shuffles tell the compiler that all lanes agree
            next_key = __shfl_sync(FULL, next_key, 0);
            next_value = __shfl_sync(FULL, next_value, 0);
            more = next_key >> 24 == key_id && next_value >> 24 == value_id;
        }
        if (more) load_first<key_kind>(key_words, codes_at<key_kind>(key_pool, next_key, next), lane);

        // scores, their maxima, weights
        float highest[QUADS], widest = 0.0f;
#pragma unroll
        for (int a = 0; a < QUADS; ++a) highest[a] = -INFINITE;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float low = bf16_low(key_scales[m]) * KEY_UNIT, high = bf16_high(key_scales[m]) * KEY_UNIT;
            widest = fmaxf(widest, fmaxf(bf16_low(value_scales[m]), bf16_high(value_scales[m])));
#pragma unroll
            for (int a = 0; a < QUADS; ++a) {
                float &x = scores[2 * m][a], &y = scores[2 * m + 1][a];
                x *= low;
                y *= high;
                highest[a] = fmaxf(highest[a], fmaxf(x, y));
            }
        }
#pragma unroll
        for (int a = 0; a < QUADS; ++a) highest[a] *= size[a];
        warp.follow(highest, widest * VALUE_UNIT);
        const float shrink = __fdividef(VALUE_UNIT, warp.largest);
        u32 weights[4][QUADS];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float low = bf16_low(value_scales[m]) * shrink, high = bf16_high(value_scales[m]) * shrink;
#pragma unroll
            for (int a = 0; a < QUADS; ++a) {
                const float x = exp2_fast(fmaf(scores[2 * m][a], size[a], -warp.top[a]));
                const float y = exp2_fast(fmaf(scores[2 * m + 1][a], size[a], -warp.top[a]));
                warp.total[a] += x + y;
                weights[m][a] = half2(x * low, y * high);
            }
        }
        if (more) {
            load_words(key_scales, scales_at<key_kind>(key_pool, next_key, next, g), 4);
            load_words(value_scales, scales_at<value_kind>(value_pool, next_value, next, g), 4);
        }
        value_unit<value_kind, value_table>(warp, value_words, codes_at<value_kind>(value_pool, ahead.value_page, unit), weights,
                                            value_place, lane);
        if (more) load_first<value_kind>(value_words, codes_at<value_kind>(value_pool, next_value, next), lane);
        unit = next;
        ahead.key_page = next_key;
        ahead.value_page = next_value;
    } while (more);
}

// The host sorts a row's tiles by their pair, so a warp meets few runs, and all warps are in the same one most of the time:
// a loop has up to 30 KB of code.
DEVICE void packed_units(const Params &p, Warp &warp, Ahead &ahead, const int *key_pages, const int *value_pages, int unit, int end) {
    Queries query;
    load_queries(query, reinterpret_cast<const u16 *>(shared + QUERY_AT), D, QUERIES, warp.g, warp.t);
    float size[QUADS];
#pragma unroll
    for (int a = 0; a < QUADS; ++a) size[a] = reinterpret_cast<const float2 *>(shared + FACTOR_AT)[4 * a + warp.t].x;
    while (ahead.key_page >= 0) {
#define PAIR(key_index, key_id, key_kind, key_table, value_index, value_id, value_kind, value_table) \
    if (N_PAIRS == 1 || (ahead.key_page >> 24 == key_id && ahead.value_page >> 24 == value_id)) \
        run_of_units<key_index, key_id, key_kind, key_table, value_index, value_id, value_kind, value_table>( \
            p, warp, ahead, query, size, key_pages, value_pages, unit, end); \
    else
        PAIRS return;
#undef PAIR
        if (N_PAIRS > 1) ahead.load(p, unit, warp.lane);
    }
}

// ---------------------------------------------------------------------------------------------- exact tokens

// 16 exact tokens: operands straight from the model's keys and values. What lies where nobody sees it may be NaN.
struct ExactTokens {
    bool seen[2], there[4];       // tokens g, g + 8 of the scores; tokens t, t + 4, t + 8, t + 12 of the values
    u32 k[2][D / 8], v[4][D / 16];

    DEVICE void load(const Params &p, const u16 *keys, const u16 *values, const unsigned char *visible, int first, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first + g + 8 * half;
            seen[half] = false;
            if (token < p.exact) {
                seen[half] = visible[token];
#pragma unroll
                for (int i = 0; i < D / 8; i += 4)
                    load_words(k[half] + i, reinterpret_cast<const u32 *>(keys + token * p.exact_token + t * (D / 4)) + i, 4);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first + t + 4 * i;
            there[i] = false;
            if (token < p.exact) {
                there[i] = visible[token];
#pragma unroll
                for (int w = 0; w < D / 16; w += 4)
                    load_words(v[i] + w, reinterpret_cast<const u32 *>(values + token * p.exact_token + g * (D / 8)) + w, 4);
            }
        }
    }
};

DEVICE void exact_step(const Params &p, Warp &warp, const Queries &query, const ExactTokens &tokens) {
    const int lane = warp.lane;
    const u32 (&k)[2][D / 8] = tokens.k;
    float scores[2][QUADS], highest[QUADS];
    const float factor = p.scaling * LOG2E;
#pragma unroll
    for (int a = 0; a < QUADS; ++a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                const u32 operand[4] = {k[half][4 * j], k[half][4 * j + 1], k[half][4 * j + 2], k[half][4 * j + 3]};
                mma_model(c, operand, query[a][j][0], query[a][j][1]);
            }
            scores[half][a] = tokens.seen[half] ? (c[0] + c[3]) * factor : -INFINITE;
        }
        highest[a] = fmaxf(scores[0][a], scores[1][a]);
    }
    warp.follow(highest, 0.0f);
#pragma unroll
    for (int a = 0; a < QUADS; ++a) {
        const float top = warp.top[a] == -INFINITE ? 0.0f : warp.top[a];
        const float x = exp2_fast(scores[0][a] - top), y = exp2_fast(scores[1][a] - top);
        warp.total[a] += x + y;
        u32 b[2][2];
        spread_weights(b, model2(x, y), lane);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet)
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                u32 operand[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) operand[e] = tokens.there[2 * octet + e / 2] ? tokens.v[2 * octet + e / 2][2 * i + e % 2] : 0;
                mma_model(warp.sum[a][i], operand, b[octet][0], b[octet][1]);
            }
    }
}

// ---------------------------------------------------------------------------------------------- before and after

// Copies of each entry side by side; 16 bytes a thread and step.
template <int index, int entries, int dim> struct TableWords {
    static constexpr int COUNT = (entries * 8 + THREADS - 1) / THREADS;
    u32 first[COUNT], second[COUNT];

    DEVICE void load(const Params &p, int row, int head) {
        const u16 *from = p.table[index] + row * p.table_row[index] + head * p.table_head[index];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if (i >= entries * 8) break;
            const u32 *entry = reinterpret_cast<const u32 *>(from + (i >> 3) * dim);
            first[n] = __ldg(entry);
            second[n] = dim == 4 ? __ldg(entry + 1) : first[n];
        }
    }
    DEVICE void store() const {
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if (i >= entries * 8) break;
            *reinterpret_cast<uint4 *>(shared + TABLES_AT + table_offset(index) + (i >> 3) * stride_of(index) + (i & 7) * 16) =
                make_uint4(first[n], second[n], first[n], second[n]);
        }
    }
};

// One of the group's queries, rotated, in units of its largest element; and its product with the mean.
struct Placed {
    static constexpr int OWN = D / 32;
    float x[OWN], mean[OWN], signs[OWN];

    DEVICE void load(const Params &p, int row, int head, int query, int lane) {
        const bool real = query < p.group;
        const u16 *from = p.query + row * p.query_row + (u64)(head * p.group + query) * p.query_head + lane * OWN;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = from_model(real ? from[i] : (u16)0);
            mean[i] = p.mean ? p.mean[((u64)row * p.heads + head) * D + lane * OWN + i] : 0.0f;
            signs[i] = p.key_signs[lane * OWN + i];
        }
    }
    DEVICE void store(const Params &p, int query, int lane) {
        float offset = 0.0f, largest = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            offset += x[i] * mean[i];
            x[i] *= signs[i];
        }
        hadamard(x, lane);
#pragma unroll
        for (int i = 0; i < OWN; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) {
            largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bit));
            offset += __shfl_xor_sync(FULL, offset, bit);
        }
        const float inverse = largest > 0.0f ? __fdividef(1.0f, largest) : 0.0f;
        u16 *rotated = reinterpret_cast<u16 *>(shared + QUERY_AT) + query * D + lane * OWN;
#pragma unroll
        for (int i = 0; i < OWN; i += 2) *reinterpret_cast<u32 *>(rotated + i) = half2(x[i] * inverse, x[i + 1] * inverse);
        if (lane == 0)
            reinterpret_cast<float2 *>(shared + FACTOR_AT)[query] =
                make_float2(largest * INV_SQRT_D * p.scaling * LOG2E, offset * p.scaling * LOG2E);
    }
};

// Softmax states of up to 32 parts, one a lane (-infinite where there is none): the weight of each part against the
// largest maximum, which is returned; `total` becomes the weighted sum of denominators.
DEVICE float weigh(float2 state, float &weight, float &total) {
    float top = state.x;
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, bit));
    weight = state.x == -INFINITE ? 0.0f : exp2_fast(state.x - top);
    total = weight * state.y;
#pragma unroll
    for (int bit = 1; bit < 32; bit <<= 1) total += __shfl_xor_sync(FULL, total, bit);
    return top;
}

// Weighted sum of `count` warps' rows from `first` on, in the order of the warps; lane holds D/32 channels.
DEVICE void merge_warps(int first, int count, int query, int lane, float (&x)[D / 32], float &top, float &total) {
    constexpr int OWN = D / 32;
    const float2 *states = reinterpret_cast<const float2 *>(shared + STATE_AT) + first * QUERIES + query;
    const float *sums = reinterpret_cast<const float *>(shared) + first * ROW_FLOATS + query * D + lane * OWN;
    float weight;
    top = weigh(lane < count ? states[lane * QUERIES] : make_float2(-INFINITE, 0.0f), weight, total);
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = 0.0f;
#pragma unroll 4
    for (int w = 0; w < count; ++w) {
        const float factor = __shfl_sync(FULL, weight, w);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] += factor * sums[w * ROW_FLOATS + i];
    }
}

// The splits of a query -> output, by one warp. A row of sums takes D / 8 lanes, so a load of all lanes takes several.
DEVICE void merge_splits(const Params &p, u64 first_partial, int splits, int pair, int head, int query, int lane) {
    constexpr int LANES = D / 8, TOGETHER = 32 / LANES, LOADS = 32 / TOGETHER;
    const int within = lane / LANES, column = lane % LANES;
    const float sink = p.sinks ? p.sinks[head * p.group + query] * LOG2E : -INFINITE;
    float top = sink, total = sink == -INFINITE ? 0.0f : 1.0f, sum[8] = {};
#pragma unroll 1
    for (int from = 0; from < splits; from += 32) {
        const u64 first = (first_partial + from) * QUERIES + query;
        uint4 part[LOADS];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int split = n * TOGETHER + within;
            part[n] = make_uint4(0, 0, 0, 0);
            if (from + split < splits) part[n] = __ldcg(reinterpret_cast<const uint4 *>(p.partial + (first + split * QUERIES) * D) + column);
        }
        float4 state = make_float4(-INFINITE, 0.0f, 0.0f, 0.0f);
        if (from + lane < splits) state = __ldcg(p.partial_state + first + lane * QUERIES);
        float raised = fmaxf(top, state.x);
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) raised = fmaxf(raised, __shfl_xor_sync(FULL, raised, bit));
        const float keep = top == -INFINITE ? 0.0f : exp2_fast(top - raised);
        const float weight = state.x == -INFINITE ? 0.0f : exp2_fast(state.x - raised), factor = weight * state.z;
        top = raised;
        float more = weight * state.y;
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) more += __shfl_xor_sync(FULL, more, bit);
        total = total * keep + more;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] *= keep;
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            if (from + n * TOGETHER >= splits) break;
            const float of_row = __shfl_sync(FULL, factor, n * TOGETHER + within);
            const u32 pairs[4] = {part[n].x, part[n].y, part[n].z, part[n].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] += of_row * from_half(pairs[i]);
                sum[2 * i + 1] += of_row * from_half(pairs[i] >> 16);
            }
        }
    }
#pragma unroll
    for (int bit = LANES; bit < 32; bit <<= 1)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(FULL, sum[i], bit);
    const float inverse = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
    const u64 at = (u64)pair * p.group + query;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= inverse;
    if (within == 0)
        reinterpret_cast<uint4 *>(p.output + at * D)[column] =
            make_uint4(model2(sum[0], sum[1]), model2(sum[2], sum[3]), model2(sum[4], sum[5]), model2(sum[6], sum[7]));
    if (lane == 0) p.lse[at] = total > 0.0f ? (top + log2_fast(total)) * (1.0f / LOG2E) : -INFINITE;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_attention(const __grid_constant__ Params p) {
    // the shuffle tells the compiler that all lanes of a warp agree
    const int index = __shfl_sync(FULL, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (shared_address(shared) != SHARED_BASE) __trap();
    // the previous kernel of the stream may still be at its end when this one starts, and the next one may ask for its
    // weights where this one leaves room
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif

    // a grid of (splits, heads, rows) cuts all rows alike; where tiles cost differently, the host has made a list
    int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
    u32 splits = p.splits, first_unit = 2u * p.tiles * split / splits, end = 2u * p.tiles * (split + 1) / splits;
    u64 first_partial = (u64)(row * p.heads + head) * splits;
    u32 wanted = ~0u;  // tables of the tiers that the block meets
    if (p.work) {
        const int4 where = __ldg(p.work + 2 * blockIdx.x), what = __ldg(p.work + 2 * blockIdx.x + 1);
        row = where.x;
        if (row < 0) return;  // a list of fixed length may end earlier
        head = where.y;
        split = where.z;
        splits = where.w;
        first_unit = what.x;
        end = what.y;
        first_partial = what.z;
        wanted = what.w;
    }
    const int pair = row * p.heads + head;

    // work of this block: steps of 16 exact tokens, then units of packed ones, dealt out to the warps in turn
    const u32 exact_steps = (p.exact + 15) / 16;
    const int first_step = exact_steps * split / splits, steps = exact_steps * (split + 1) / splits - first_step;
    const int exact_rows = min(steps, WARPS);
    const int unit = first_unit + (index + WARPS - steps % WARPS) % WARPS;
    const int *key_pages = p.key_pages + row * p.page_row + head * p.page_head;
    const int *value_pages = p.value_pages + row * p.page_row + head * p.page_head;
    Warp warp;
    warp.lane = lane;
    warp.g = lane >> 2;
    warp.t = lane & 3;
    warp.clear();
    // everything that has to come from memory is asked for first, and addresses that are themselves loaded come last
    constexpr int PLACED = (QUERIES + WARPS - 1) / WARPS;
    Ahead ahead;
    Placed placed[PLACED];
    ExactTokens tokens;
    Queries query;
    const u16 *keys = p.exact_key + row * p.exact_row + head * p.exact_head;
    const u16 *values = p.exact_value + row * p.exact_row + head * p.exact_head;
    const unsigned char *visible = p.visible + row * p.visible_row;
#define TABLE(index, entries, dim) TableWords<index, entries, dim> table_##index;
    TABLES
#undef TABLE
    if (p.tiles) {
        ahead.find(key_pages, value_pages, unit, end);
#pragma unroll
        for (int n = 0; n < PLACED; ++n)
            if (n * WARPS + index < QUERIES) placed[n].load(p, row, head, n * WARPS + index, lane);
#define TABLE(index, entries, dim) if (wanted >> index & 1) table_##index.load(p, row, head);
        TABLES
#undef TABLE
    }
    if (index < exact_rows) {
        tokens.load(p, keys, values, visible, 16 * (first_step + index), lane);
        load_queries(query, p.query + row * p.query_row + (u64)head * p.group * p.query_head, p.query_head, p.group, warp.g, warp.t);
    }
    if (p.tiles) {
        ahead.load(p, unit, lane);
#define TABLE(index, entries, dim) if (wanted >> index & 1) table_##index.store();
        TABLES
#undef TABLE
#pragma unroll
        for (int n = 0; n < PLACED; ++n)
            if (n * WARPS + index < QUERIES) placed[n].store(p, n * WARPS + index, lane);
    }
    // exact tokens need neither tables nor rotated queries
    if (index < exact_rows) {
        warp.largest = 1.0f;
        for (int step = index; step < steps; step += WARPS) {
            if (step >= WARPS) tokens.load(p, keys, values, visible, 16 * (first_step + step), lane);
            exact_step(p, warp, query, tokens);
        }
        warp.store(WARPS + index);
        warp.clear();
    }
    if (p.tiles) {
        __syncthreads();
        packed_units(p, warp, ahead, key_pages, value_pages, unit, end);
    }
    warp.store(index);
    __syncthreads();

    // the block's sum: packed part rotated back, exact part as it is
    constexpr int OWN = D / 32;
    for (int query = index; query < p.group; query += WARPS) {
        float x[OWN], y[OWN], top, total, exact_top, exact_total;
        merge_warps(0, WARPS, query, lane, x, top, total);
        exact_top = -INFINITE;
        exact_total = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) y[i] = 0.0f;
        if (exact_rows) merge_warps(WARPS, exact_rows, query, lane, y, exact_top, exact_total);
        if (p.tiles) top += reinterpret_cast<const float2 *>(shared + FACTOR_AT)[query].y;
        hadamard(x, lane);
        const float both = fmaxf(top, exact_top);
        const float packed_weight = top == -INFINITE ? 0.0f : exp2_fast(top - both);
        const float exact_weight = exact_top == -INFINITE ? 0.0f : exp2_fast(exact_top - both);
        total = total * packed_weight + exact_total * exact_weight;
        float unit = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = (p.tiles ? x[i] * p.value_signs[lane * OWN + i] * INV_SQRT_D * packed_weight : 0.0f) + y[i] * exact_weight;
            unit = fmaxf(unit, fabsf(x[i]));
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) unit = fmaxf(unit, __shfl_xor_sync(FULL, unit, bit));
        unit = fmaxf(unit, 1e-37f);
        const float inverse = 1.0f / unit;
        const u64 at = (first_partial + split) * QUERIES + query;
        u32 *partial = reinterpret_cast<u32 *>(p.partial + at * D + lane * OWN);
#pragma unroll
        for (int i = 0; i < OWN; i += 2) partial[i / 2] = half2(x[i] * inverse, x[i + 1] * inverse);
        if (lane == 0) p.partial_state[at] = make_float4(both, total, unit, 0.0f);
        __syncwarp();
        if (splits > 1) {
            // what the warp has written comes before it, and what all splits' warps have written before the last one's loads
            u32 before = 0, *arrived = p.arrived + pair * QUERIES + query;
            if (lane == 0) asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
            if (__shfl_sync(FULL, before, 0) != splits - 1) continue;
            __syncwarp();
            if (lane == 0) *arrived = 0;
        }
        merge_splits(p, first_partial, splits, pair, head, query, lane);
    }
}
